# SPDX-License-Identifier: Apache-2.0
"""Programs of C++ that put parts of the core to the test, apart from Python and tensors."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

CORE = Path(__file__).parents[1] / "csrc"
TORCH = Path(torch.__file__).parent
# `make sanitize` and `make sanitize-threads` say which. The program is instrumented as a whole.
SANITIZERS = os.environ.get("REMATFN_SANITIZE")
SANITIZE = ["-g1", f"-fsanitize={SANITIZERS}"] if SANITIZERS else []
# What is preloaded for Python is neither the compiler's nor the program's, which has its own.
ENVIRONMENT = {k: v for k, v in os.environ.items() if k != "LD_PRELOAD"}


def compile_model(folder: Path, sources: Iterable[Path], *, with_c10: bool = False) -> Path:
    """Compile a program into ``folder``; nothing of torch is linked but its ``c10``, if at all."""
    compiler = os.environ.get("CXX", "c++")
    if not shutil.which(compiler):
        pytest.skip("needs a C++ compiler")
    flags = ["-std=c++20", "-O1", *SANITIZE, f"-I{CORE}"]
    libraries = ["-pthread"]
    if with_c10:
        flags.append(f"-isystem{TORCH / 'include'}")
        libraries += [f"-L{TORCH / 'lib'}", "-lc10", f"-Wl,-rpath,{TORCH / 'lib'}"]

    def compiled(source: Path) -> str:
        found = folder / f"{source.parent.name}-{source.stem}.o"
        command = [compiler, *flags, "-c", str(source), "-o", str(found)]
        subprocess.run(command, check=True, env=ENVIRONMENT)
        return str(found)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(compiled, sources))
    program = folder / "model"
    command = [compiler, *SANITIZE, *objects, *libraries, "-o", str(program)]
    subprocess.run(command, check=True, env=ENVIRONMENT)
    return program


def run_model(program: Path, *arguments: str, timeout: float = 300) -> None:
    """Run it; what went wrong is what it printed."""
    command = [str(program), *arguments]
    found = subprocess.run(
        command, capture_output=True, text=True, timeout=timeout, env=ENVIRONMENT
    )
    assert found.returncode == 0, f"{' '.join(arguments)}: {found.stdout}{found.stderr}"
