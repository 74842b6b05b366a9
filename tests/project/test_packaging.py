# SPDX-License-Identifier: Apache-2.0
"""What a user reads when torch, the compiler or the extension is missing or does not fit."""

import importlib.machinery
import importlib.util
import os
import platform
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from processes import python

import rematfn
from rematfn._interop import compat

ROOT = Path(__file__).parents[2]
BLOCK = "import runpy, sys; sys.modules['torch'] = None; "


def script(name):
    spec = importlib.util.spec_from_file_location(f"{name}_script", ROOT / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def setup_script():
    return script("setup")


@pytest.fixture
def wheels_script():
    return script("wheels")


# --- which core is taken --------------------------------------------------------------------------

SUFFIX = importlib.machinery.EXTENSION_SUFFIXES[0]


@pytest.fixture
def folder(tmp_path):
    """Return a package's folder with three cores, and files that are none for this Python."""
    for minor in ("2_15", "2_9", "2_13"):
        (tmp_path / f"_C_torch{minor}{SUFFIX}").touch()
    for name in (
        f"_C{SUFFIX}",
        f"_C_torchx{SUFFIX}",
        "_C_torch2_14.cpython-30-x86_64.so",
        "_C.pyi",
    ):
        (tmp_path / name).touch()
    return tmp_path


@pytest.mark.parametrize(
    ("running", "minor"),
    [("2.13.0+cpu", "2_13"), ("2.13.1", "2_13"), ("2.15.0a0+git1", "2_15"), ("2.9.1+cu130", "2_9")],
)
def test_the_core_of_the_running_minor_version_is_taken(folder, running, minor):
    path = compat.choose_core(running, compat.cores(folder))
    assert path == folder / f"_C_torch{minor}{SUFFIX}"


@pytest.mark.parametrize("running", ["2.14.1+cu130", "2.1.3", "3.13.0"])
def test_a_torch_without_a_core_is_an_error_with_what_there_is_and_the_fix(folder, running):
    with pytest.raises(ImportError) as caught:
        compat.choose_core(running, compat.cores(folder))
    message = str(caught.value)
    assert f"torch {running} is running" in message
    assert "a C++ core for torch 2.9, 2.13 or 2.15 only" in message
    assert "pip install 'torch==2.15.*'" in message
    assert f"or build rematfn for torch {running}: `{compat.REBUILD}`" in message


def test_no_core_for_this_python_is_an_error_with_the_fix(tmp_path):
    (tmp_path / "_C_torch2_13.cpython-30-x86_64.so").touch()
    with pytest.raises(ImportError, match="has not been built for this Python") as caught:
        compat.choose_core("2.13.0", compat.cores(tmp_path))
    assert compat.REBUILD in str(caught.value)


def test_importing_under_another_torch_says_so_before_a_core_is_loaded():
    ended = python("-c", "import torch; torch.__version__ = '2.99.0'; import rematfn")
    last = ended.err.splitlines()[-1]
    with pytest.raises(ImportError) as expected:
        compat.choose_core("2.99.0", compat.cores())
    assert last == f"ImportError: {expected.value}"


def test_importing_without_torch_says_to_install_it_first():
    ended = python("-c", "import sys; sys.modules['torch'] = None; import rematfn")
    assert "ImportError: import rematfn: torch is not installed" in ended.err.splitlines()[-1]


# --- what is built, and what it requires ----------------------------------------------------------


@pytest.mark.parametrize(
    ("minors", "text"),
    [
        ([(2, 13)], "torch==2.13.*"),
        ([(2, 12), (2, 13), (2, 14), (2, 15)], "torch>=2.12,<2.16"),
        ([(2, 12), (2, 14), (2, 17)], "torch>=2.12,<2.18,!=2.13.*,!=2.15.*,!=2.16.*"),
    ],
)
def test_a_package_requires_the_torches_that_it_has_cores_for(setup_script, minors, text):
    assert setup_script.requirement(minors) == text


def fake_torch(folder, version):
    (folder / "torch").mkdir(parents=True)
    text = f"from typing import Optional\n\n__version__ = '{version}'\ncuda = None\n"
    (folder / "torch/version.py").write_text(text)
    return str(folder / "torch")


def test_a_wheel_requires_the_range_of_its_torches(monkeypatch, tmp_path):
    folders = [fake_torch(tmp_path / v, v) for v in ("2.14.1+cu130", "2.12.1", "2.13.0+cpu")]
    monkeypatch.setenv("REMATFN_TORCHES", os.pathsep.join(folders))
    ended = python("setup.py", "--quiet", "dist_info", "--output-dir", str(tmp_path), cwd=ROOT)
    assert ended.code == 0, ended.err
    [metadata] = tmp_path.glob("*.dist-info/METADATA")
    required = re.findall(r"^Requires-Dist: (torch.*)", metadata.read_text(), re.M)
    assert required in (["torch>=2.12,<2.15"], ["torch<2.15,>=2.12"])


def test_a_core_is_built_for_each_torch_that_is_named(setup_script, monkeypatch, tmp_path):
    folders = [fake_torch(tmp_path / v, v) for v in ("2.14.1+cu130", "2.13.0+cpu")]
    monkeypatch.setenv("REMATFN_TORCHES", os.pathsep.join(folders))
    found = setup_script.find_torches()
    assert [*found.items()] == [
        ((2, 13), ("2.13.0", Path(folders[1]))),
        ((2, 14), ("2.14.1", Path(folders[0]))),
    ]
    built = [setup_script.core(minor, *torch, []) for minor, torch in found.items()]
    assert [core.name for core in built] == ["rematfn._C_torch2_13", "rematfn._C_torch2_14"]
    assert built[0].define_macros == [("REMATFN_BUILT_TORCH", '"2.13.0"')]
    assert f"-isystem{folders[0]}/include" in built[1].extra_compile_args


def test_a_wheel_has_no_core_for_a_torch_that_its_python_lacks(wheels_script, tmp_path):
    torch = Path(fake_torch(tmp_path, "2.15.0"))
    metadata = tmp_path / "torch-2.15.0+cpu.dist-info/METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Name: torch\nVersion: 2.15.0+cpu\nRequires-Python: >=3.11\n\nTensors\n")
    assert wheels_script.is_released_for(torch, "3.11.0")
    assert wheels_script.is_released_for(torch, "3.13.1")
    assert not wheels_script.is_released_for(torch, "3.10.13")


def test_a_python_that_does_not_run_has_no_wheel(wheels_script, tmp_path):
    assert wheels_script.version_of(sys.executable) == platform.python_version()
    assert wheels_script.version_of(str(tmp_path / "python3.12")) is None
    broken = tmp_path / "python3.13"  # as a version manager's, of a version that is not installed
    broken.write_text("#!/bin/sh\nexit 127\n")
    broken.chmod(0o755)
    assert wheels_script.version_of(str(broken)) is None


def test_a_torch_that_is_too_old_is_refused(setup_script, monkeypatch, tmp_path):
    monkeypatch.setenv("REMATFN_TORCHES", fake_torch(tmp_path, "2.3.1"))
    with pytest.raises(SystemExit) as caught:
        setup_script.find_torches()
    assert caught.value.code.startswith("rematfn: torch 2.3.1 is too old, 2.")


def test_what_an_earlier_build_left_is_removed(setup_script, folder):
    setup_script.remove_others({folder / f"_C_torch2_13{SUFFIX}"})
    assert sorted(path.name for path in folder.iterdir()) == sorted(
        [f"_C_torch2_13{SUFFIX}", "_C_torch2_14.cpython-30-x86_64.so", "_C.pyi"]
    )


def test_a_unit_is_compiled_again_when_what_it_read_has_changed(setup_script, tmp_path):
    product, header = tmp_path / "unit.o", tmp_path / "a header.h"
    assert not setup_script.is_current(product)
    header.touch()
    os.utime(header, (1e9, 1e9))
    product.touch()
    assert not setup_script.is_current(product)
    escaped = str(header).replace(" ", "\\ ")
    product.with_suffix(".d").write_text(f"{product}: {escaped} \\\n {ROOT}/setup.py\n")
    assert setup_script.is_current(product)
    header.touch()
    os.utime(header, (4e9, 4e9))
    assert not setup_script.is_current(product)
    header.unlink()
    assert not setup_script.is_current(product)


def test_the_oldest_versions_are_the_same_everywhere(setup_script):
    def text(name):
        return (ROOT / name).read_text(encoding="utf-8")

    torches = re.search(r"^TORCHES \?= (.+)$", text("Makefile"), re.M)[1].split()
    minors = [tuple(map(int, version.split(".")[:2])) for version in torches]
    assert minors[0] == setup_script.MIN_TORCH
    oldest, newest = ("{}.{}".format(*minor) for minor in (minors[0], minors[-1]))
    for name in ("README.md", "docs/install.md", "docs/versions.md"):
        assert f"torch {oldest} to {newest}" in " ".join(text(name).split())
    pythons = re.search(r"^PYTHONS \?= (.+)$", text("Makefile"), re.M)[1].split()
    assert f'requires-python = ">={pythons[0].removeprefix("python")}"' in text("pyproject.toml")
    first, *_, last = (name.removeprefix("python") for name in pythons)
    assert f"Python {first} to {last}" in text("docs/versions.md")


def test_the_changelog_begins_with_this_version():
    headings = re.findall(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.M)
    released = [heading for heading in headings if heading != "Unreleased"]
    assert released[0].split()[0] == rematfn.__version__


def test_what_is_done_as_an_exception_passes_is_compiled(setup_script, tmp_path):
    compiler = setup_script.find_compiler()
    compile_args, link_args = setup_script.flags(compiler)
    source, program = Path(__file__).with_name("way_out.cpp"), tmp_path / "way_out"
    command = [*shlex.split(compiler), *compile_args, *link_args]
    subprocess.run([*command, source, "-o", program], check=True)
    done = subprocess.run([program], capture_output=True, text=True, check=True)
    assert done.stdout == "0 0\n"


def test_the_core_loads_where_gcc_11s_library_is_the_systems():
    assert b"GLIBCXX_3.4.11" in Path(rematfn._C.__file__).read_bytes()
    assert b"GLIBCXX_3.4.30" not in Path(rematfn._C.__file__).read_bytes()


def test_a_build_by_a_profile_needs_gcc(setup_script, monkeypatch):
    monkeypatch.setattr(setup_script, "PROFILE", "folder")
    monkeypatch.setattr(setup_script, "is_gcc", lambda compiler: compiler != "clang++")
    assert "-fprofile-use" in setup_script.flags("g++")[0]
    with pytest.raises(SystemExit, match="needs GCC, and clang"):
        setup_script.flags("clang++")


# --- what is missing when one builds --------------------------------------------------------------


def test_building_without_torch_says_to_install_it_first():
    ended = python("-c", BLOCK + "runpy.run_path('setup.py', run_name='__main__')", cwd=ROOT)
    assert ended.code == 1
    assert ended.err.startswith("rematfn: building needs torch 2.11 or newer")
    assert "pip install --no-build-isolation ." in ended.err


def test_building_without_a_compiler_says_what_was_tried(setup_script, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(setup_script.sysconfig, "get_config_var", lambda name: None)
    with pytest.raises(SystemExit) as caught:
        setup_script.find_compiler()
    assert "(tried c++, g++, clang++)" in caught.value.code
    assert "apt-get install g++" in caught.value.code
