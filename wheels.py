# SPDX-License-Identifier: Apache-2.0
"""Make the source distribution and a wheel for each Python, each with a core for each torch.

``make wheels`` runs this. What it makes lies in ``dist/``. A torch that is not released for a
Python has no core in its wheel: there it could not be used, and messages would advise it.

``REMATFN_PROFILE`` is the folder of a profile (``make fast``), by which all cores are built.

No torch is installed. Compiling takes the headers of one, and linking its libraries; they are the
same for each Python. A build of torch for CUDA has the headers that one for CPUs has, but for those
of CUDA and for macros that say what it was built with, and rematfn reads neither. So any wheel of a
version of torch does, and a core runs under each build of that version.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).resolve().parent
BUILD = ROOT / "build/wheels"
DIST = ROOT / "dist"
LIBRARIES = ("c10", "torch", "torch_cpu", "torch_python")
METADATA = "torch-*.dist-info/METADATA"
OF_TORCH = ("torch/include/", "torch/version.py", *(f"torch/lib/lib{n}.so" for n in LIBRARIES))


def pip(python: str, *arguments: str | Path, **environment: str) -> None:
    """Run pip of a Python."""
    command = [python, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments]
    subprocess.run(command, check=True, env={**os.environ, **environment})


def fetch_torch(version: str, index: str | None) -> Path:
    """Return a folder with what is needed of a version of torch."""
    folder = ROOT / "build/torches" / version
    if not folder.exists():
        print(f"Fetching torch {version}")
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
            source = ["--index-url", index] if index else []
            only = ["--no-deps", "--only-binary=:all:", "--dest", scratch, *source]
            pip(sys.executable, "download", *only, f"torch=={version}")
            [wheel] = Path(scratch).glob("*.whl")
            with zipfile.ZipFile(wheel) as archive:
                names = [
                    name
                    for name in archive.namelist()
                    if name.startswith(OF_TORCH) or Path(name).match(METADATA)
                ]
                archive.extractall(Path(scratch, "unpacked"), names)
            Path(scratch, "unpacked").rename(folder)
    return folder / "torch"


def is_released_for(torch: Path, python: str) -> bool:
    """Return whether a version of torch, in a folder, is released for a version of Python."""
    [metadata] = torch.parent.glob(METADATA)
    required = re.search(r"^Requires-Python: (.+)$", metadata.read_text(encoding="utf-8"), re.M)[1]
    return SpecifierSet(required).contains(python)


def version_of(python: str) -> str | None:
    """Return the version of Python that a command runs, or None if it runs none."""
    if not shutil.which(python):
        return None
    program = "import platform; print(platform.python_version())"
    run = subprocess.run([python, "-c", program], check=False, capture_output=True, text=True)
    return run.stdout.strip() if run.returncode == 0 else None


def make_sdist(torches: str) -> Path:
    """Return the source distribution, made anew."""
    DIST.mkdir(exist_ok=True)
    command = [sys.executable, "setup.py", "--quiet", "sdist", "--dist-dir", DIST]
    subprocess.run(command, check=True, env={**os.environ, "REMATFN_TORCHES": torches}, cwd=ROOT)
    return max(DIST.glob("rematfn-*.tar.gz"), key=lambda path: path.stat().st_mtime)


def make_wheel(python: str, sdist: Path, torches: str) -> Path:
    """Return the wheel for a Python, with the oldest platform that its symbols allow in its name.

    torch's libraries are left out: they are those of the torch that is running. So are the symbols
    that only a debugger reads, a quarter of a core.
    """
    shutil.rmtree(BUILD, ignore_errors=True)
    pip(python, "wheel", "--no-deps", "--wheel-dir", BUILD / "made", sdist, REMATFN_TORCHES=torches)
    [made] = (BUILD / "made").glob("*.whl")
    excluded = [word for n in LIBRARIES for word in ("--exclude", f"lib{n}.so")]
    repair = [sys.executable, "-m", "auditwheel", "repair", "--strip", *excluded]
    command = [*repair, "-w", BUILD / "named", made]
    subprocess.run(command, check=True)
    [named] = (BUILD / "named").glob("*.whl")
    return Path(shutil.move(named, DIST / named.name))


def main() -> None:
    """Make all that was asked for; exit with an error if a Python is missing."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--torches", nargs="+", required=True, help="versions, such as 2.13.0")
    parser.add_argument("--pythons", nargs="+", required=True, help="commands, such as python3.12")
    parser.add_argument("--torch-index", help="the package index to take torch from")
    options = parser.parse_args()
    found = {p: version for p in options.pythons if (version := version_of(p))}
    torches = [fetch_torch(version, options.torch_index) for version in options.torches]
    sdist = make_sdist(os.pathsep.join(map(str, torches)))
    print(sdist.name)
    for python, version in found.items():
        began = time.monotonic()
        usable = [str(torch) for torch in torches if is_released_for(torch, version)]
        wheel = make_wheel(python, sdist, os.pathsep.join(usable))
        minutes = (time.monotonic() - began) / 60
        print(f"{wheel.name}: {wheel.stat().st_size / 1e6:.1f} MB, {minutes:.1f} minutes")
    if missing := [python for python in options.pythons if python not in found]:
        sys.exit(f"make wheels: there is no wheel for {', '.join(missing)}, which cannot be run")


if __name__ == "__main__":
    main()
