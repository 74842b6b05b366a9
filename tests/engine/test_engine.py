# SPDX-License-Identifier: Apache-2.0
"""The engine apart from tensors: built without torch but for `c10/util`, and run on numbers."""

from __future__ import annotations

import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

TORCH = Path(torch.__file__).parent
TOP = Path(__file__).parents[2]
PARTS = ("base", "memory", "policy", "engine", "planning")
TESTS = ["chain", "programs", "moves", "searches"]
# `make sanitize` and `make sanitize-threads` say which. These parts are instrumented as a whole.
SANITIZERS = os.environ.get("REMATFN_SANITIZE")
SANITIZE = ["-g1", f"-fsanitize={SANITIZERS}"] if SANITIZERS else []
# What is preloaded for Python is neither the compiler's nor the program's, which has its own.
ENVIRONMENT = {k: v for k, v in os.environ.items() if k != "LD_PRELOAD"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compile these parts and the tests of them; nothing else of torch is linked."""
    compiler = os.environ.get("CXX", "c++")
    if not shutil.which(compiler):
        pytest.skip("needs a C++ compiler")
    folder = tmp_path_factory.mktemp("engine")
    sources = [path for part in PARTS for path in sorted((TOP / "csrc" / part).glob("*.cpp"))]
    sources.append(Path(__file__).with_name("engine_model.cpp"))
    includes = [f"-I{TOP / 'csrc'}", f"-isystem{TORCH / 'include'}"]

    def compiled(source: Path) -> str:
        found = folder / f"{source.parent.name}-{source.stem}.o"
        command = [compiler, "-std=c++20", "-O1", *SANITIZE, *includes, "-c", str(source)]
        subprocess.run([*command, "-o", str(found)], check=True, env=ENVIRONMENT)
        return str(found)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(compiled, sources))
    program, libraries = folder / "engine_model", TORCH / "lib"
    linked = [f"-L{libraries}", "-lc10", f"-Wl,-rpath,{libraries}", "-pthread"]
    command = [compiler, *SANITIZE, *objects, *linked, "-o", str(program)]
    subprocess.run(command, check=True, env=ENVIRONMENT)
    return program


# One test, so that not every process compiles.
def test_the_engine_keeps_its_promises_without_tensors(model: Path) -> None:
    for name in TESTS:
        found = subprocess.run(
            [str(model), name], capture_output=True, text=True, timeout=300, env=ENVIRONMENT
        )
        assert found.returncode == 0, f"{name}: {found.stdout}{found.stderr}"
