# SPDX-License-Identifier: Apache-2.0
"""What a user reads when torch, the compiler or the extension is missing or does not fit."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rematfn._interop import compat

ROOT = Path(__file__).parents[2]
BLOCK = "import runpy, sys; sys.modules['torch'] = None; "


@pytest.fixture
def setup_script():
    spec = importlib.util.spec_from_file_location("setup_script", ROOT / "setup.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("built", "running"),
    [("2.13.0", "2.13.0+cpu"), ("2.13.0", "2.13.1"), ("2.15.0a0+git1", "2.15.0")],
)
def test_the_same_minor_version_fits(built, running):
    compat.check_torch_version(built, running)


@pytest.mark.parametrize(
    ("built", "running"), [("2.12.1", "2.13.0+cpu"), ("2.13.0", "2.1.3"), ("2.13.0", "3.13.0")]
)
def test_another_minor_version_is_an_error_with_both_and_the_fix(built, running):
    with pytest.raises(ImportError) as caught:
        compat.check_torch_version(built, running)
    message = str(caught.value)
    assert f"built with torch {built}" in message
    assert f"torch {running} is running" in message
    assert compat.REBUILD in message


@pytest.mark.parametrize("missing", ["rematfn._C", "rematfn._built_with"])
def test_an_extension_that_was_never_built_is_named_with_the_fix(monkeypatch, missing):
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ImportError, match="has not been built") as caught:
        compat.load_extension()
    assert compat.REBUILD in str(caught.value)


def test_building_without_torch_says_to_install_it_first():
    run = python(BLOCK + "runpy.run_path('setup.py', run_name='__main__')")
    assert run.returncode == 1
    assert run.stderr.startswith("rematfn: building needs torch 2.12 or newer")
    assert "pip install --no-build-isolation ." in run.stderr


def test_building_without_a_compiler_says_what_was_tried(setup_script, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(setup_script.sysconfig, "get_config_var", lambda name: None)
    with pytest.raises(SystemExit) as caught:
        setup_script.find_compiler()
    assert "(tried c++, g++, clang++)" in caught.value.code
    assert "apt-get install g++" in caught.value.code


def python(program):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
