# SPDX-License-Identifier: Apache-2.0
"""Loading the C++ core, or saying in plain words why it cannot be loaded.

The core uses C++ interfaces of torch that may change with every minor version. Under another one
the dynamic loader stops at the first name it misses, and its message helps nobody. So there is a
core for each minor version, and its file is named after it. A wheel holds several; what is built
from source holds the one for the torch that it was built with.
"""

import importlib.machinery
import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Final

NAME: Final = "rematfn._C"
REBUILD: Final = "pip install --no-build-isolation --no-deps --force-reinstall ."

_FOLDER: Final = Path(__file__).parents[1]
_SUFFIX: Final = importlib.machinery.EXTENSION_SUFFIXES[0]  # tells Python's version and platform


def load_core() -> ModuleType:
    """Return the module `rematfn._C`: the core for the running torch."""
    try:
        import torch
    except ModuleNotFoundError as error:
        if error.name != "torch":  # torch is there, and something that it needs is not
            raise
        raise ImportError(
            "import rematfn: torch is not installed. rematfn is compiled against the torch it runs "
            "with: install torch first, then run `pip install --no-build-isolation .` in rematfn's "
            "source folder.",
            name="torch",
        ) from error

    path = choose_core(torch.__version__, cores())
    spec = importlib.util.spec_from_file_location(NAME, path)
    assert spec is not None, "its suffix is an extension's"
    assert spec.loader is not None, "its suffix is an extension's"
    core = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(core)
    sys.modules[NAME] = core
    return core


def cores(folder: Path = _FOLDER) -> dict[str, Path]:
    """Return the cores for this Python that are in a folder, by torch's minor version, in order."""
    found = {}
    for path in folder.glob(f"_C_torch*{_SUFFIX}"):
        if named := re.fullmatch(r"_C_torch(\d+)_(\d+)", path.name.removesuffix(_SUFFIX)):
            found[int(named[1]), int(named[2])] = path
    return {f"{major}.{minor}": path for (major, minor), path in sorted(found.items())}


def choose_core(running: str, among: dict[str, Path]) -> Path:
    """Return the core for a version of torch.

    Raises:
        ImportError: There is none. The message names the versions that there are, and the command
            that builds one.
    """
    if not among:
        raise ImportError(
            f"import rematfn: its C++ core {NAME} has not been built for this Python, "
            f"{sys.version.split()[0]}. Run `{REBUILD}` in rematfn's source folder; it needs a "
            "C++20 compiler and about a minute.",
            name=NAME,
        )
    path = among.get(".".join(running.split("+")[0].split(".")[:2]))
    if path is None:
        *others, newest = among
        there = f"{', '.join(others)} or {newest}" if others else newest
        raise ImportError(
            f"import rematfn: torch {running} is running, and this rematfn has a C++ core for "
            f"torch {there} only: torch's C++ interface changes with every minor version. Install "
            f"that torch, such as by `pip install 'torch=={newest}.*'`, or build rematfn for torch "
            f"{running}: `{REBUILD}` in its source folder.",
            name=NAME,
        )
    return path
