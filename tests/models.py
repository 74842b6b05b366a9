# SPDX-License-Identifier: Apache-2.0
"""Programs of C++ that put parts of the core to the test, apart from Python and tensors."""

import fcntl
import hashlib
import os
import shutil
import subprocess
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
CORE = HERE.parent / "csrc"
TORCH = Path(torch.__file__).parent
BUILT = HERE.parent / "build" / "tests"
# `make sanitize` and `make sanitize-threads` say which. The program is instrumented as a whole.
SANITIZERS = os.environ.get("REMATFN_SANITIZE")
SANITIZE = ["-g1", f"-fsanitize={SANITIZERS}"] if SANITIZERS else []
# What is preloaded for Python is neither the compiler's nor the program's, which has its own.
ENVIRONMENT = {k: v for k, v in os.environ.items() if k != "LD_PRELOAD"}


Make = Callable[[Path], None]


def built_once(name: str, options: Iterable[str], sources: Iterable[Path], make: Make) -> Path:
    """Return the file that ``make`` makes, anew where options, sources or torch are others."""
    texts = [path.read_text(encoding="utf-8") for path in sources]
    compiler = os.environ.get("CXX", "c++")
    known = "\n".join([torch.__version__, compiler, *options, *texts])
    found = BUILT / f"{name}-{hashlib.sha256(known.encode()).hexdigest()[:16]}"
    BUILT.mkdir(parents=True, exist_ok=True)
    with (BUILT / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not found.exists():
            for old in BUILT.glob(f"{name}-*"):
                old.unlink()
            part = found.with_name(f"{name}.part")
            make(part)
            part.rename(found)
    return found


def compile_model(name: str, sources: Iterable[Path], *, with_c10: bool = False) -> Path:
    """Compile a program; nothing of torch is linked but its ``c10``, if at all."""
    compiler = os.environ.get("CXX", "c++")
    if not shutil.which(compiler):
        pytest.skip("needs a C++ compiler")
    includes = [f"-I{CORE}", f"-I{HERE}", f"-isystem{TORCH / 'include'}"]
    flags = ["-std=c++20", "-O1", *SANITIZE, *includes]
    libraries = ["-pthread"]
    if with_c10:
        libraries += [f"-L{TORCH / 'lib'}", "-lc10", f"-Wl,-rpath,{TORCH / 'lib'}"]
    sources = list(sources)

    # As one unit: most of the time goes into headers.
    def make(program: Path) -> None:
        unit = "".join(f'#include "{source}"\n' for source in sources)
        command = [compiler, *flags, "-x", "c++", "-", "-x", "none", *libraries, "-o", str(program)]
        subprocess.run(command, input=unit, text=True, check=True, env=ENVIRONMENT)

    folders = {HERE, *(source.parent for source in sources)} - {CORE}
    headers = sorted({*CORE.rglob("*.h"), *(h for f in folders for h in f.glob("*.h"))})
    return built_once(name, [*flags, *libraries], [*sources, *headers], make)


def run_model(program: Path, *arguments: str, timeout: float = 300) -> str:
    """Run it and return what it printed: what went wrong, if it did not end well."""
    command = [str(program), *arguments]
    found = subprocess.run(
        command, capture_output=True, text=True, timeout=timeout, env=ENVIRONMENT
    )
    assert found.returncode == 0, f"{' '.join(arguments)}: {found.stdout}{found.stderr}"
    return found.stdout


def run_all(program: Path, *arguments: str) -> None:
    """Run each test of a program in a process of its own."""
    for name in run_model(program, *arguments).splitlines():
        run_model(program, *arguments, name)
