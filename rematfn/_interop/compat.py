# SPDX-License-Identifier: Apache-2.0
"""Loading the C++ extension, or saying in plain words why it cannot be loaded.

The extension uses C++ interfaces of torch that may change with every minor version. Under another
one the dynamic loader stops at the first name it misses, and its message helps nobody. So setup.py
leaves the version it built with in `rematfn/_built_with.py`, and it is read before the extension is
loaded.
"""

import importlib
from types import ModuleType
from typing import Final, cast

REBUILD: Final = "pip install --no-build-isolation --no-deps --force-reinstall ."

NO_TORCH: Final = (
    "import rematfn: torch is not installed. rematfn is compiled against the torch it runs with: "
    "install torch first, then run `pip install --no-build-isolation .` in rematfn's source folder."
)

NOT_BUILT: Final = (
    "import rematfn: its C++ extension rematfn._C has not been built for this Python. Run "
    f"`{REBUILD}` in rematfn's source folder; it needs a C++20 compiler and about a minute."
)


def load_extension() -> ModuleType:
    """Return the module `rematfn._C`, after checking that it fits the running torch.

    Raises:
        ImportError: torch is not installed, is of another minor version than the extension was
            built with, or the extension was never built.
    """
    try:
        import torch
    except ModuleNotFoundError as error:
        if error.name != "torch":  # torch is there, and something that it needs is not
            raise
        raise ImportError(NO_TORCH, name="torch") from error

    try:
        built_with = importlib.import_module("rematfn._built_with")
        check_torch_version(cast("str", built_with.TORCH), torch.__version__)
        return importlib.import_module("rematfn._C")
    except ModuleNotFoundError as error:
        if error.name not in ("rematfn._built_with", "rematfn._C"):
            raise
        raise ImportError(NOT_BUILT, name="rematfn._C") from error


def check_torch_version(built: str, running: str) -> None:
    """Raise unless both versions have the same major and minor number.

    Raises:
        ImportError: They differ, with both versions and the command that builds the extension anew.
    """
    if _minor(built) != _minor(running):
        raise ImportError(
            f"import rematfn: its extension was built with torch {built}, and torch {running} is "
            f"running. torch's C++ interface changes with every minor version: build rematfn again "
            f"with `{REBUILD}` in its source folder, or install torch {_minor(built)}.",
            name="rematfn._C",
        )


def _minor(version: str) -> str:
    return ".".join(version.split("+")[0].split(".")[:2])
