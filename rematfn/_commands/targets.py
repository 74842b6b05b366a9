# SPDX-License-Identifier: Apache-2.0
"""Programs that are named on the command line: a script, or a function in one or in a module."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import os
import runpy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .arguments import CommandError

HELP = "script.py:function or module:function, called without arguments; or script.py, all of it"


def function_of(target: str) -> Callable[[], Any] | None:
    """Return the function that is named; None if it is a script that is.

    Raises:
        CommandError: There is none, or it wants arguments.
    """
    source, _, name = target.rpartition(":")
    if not source:
        if target.endswith(".py"):
            if not Path(target).is_file():
                raise CommandError(f"there is no file {target!r}")
            return None
        raise CommandError(f"{target!r} names no function: write {HELP}")
    # As Python does for a script, or with -m.
    folder = str(Path(source).resolve().parent) if source.endswith(".py") else os.getcwd()
    if folder not in sys.path:
        sys.path.insert(0, folder)
    if source.endswith(".py"):
        if not Path(source).is_file():
            raise CommandError(f"there is no file {source!r}")
        names: Any = runpy.run_path(source, run_name="rematfn_target")
    else:
        try:
            names = vars(importlib.import_module(source))
        except (ModuleNotFoundError, TypeError) as error:
            relative = source.startswith(".")  # a TypeError of importlib's
            missing = getattr(error, "name", None)
            if not relative and (missing is None or not f"{source}.".startswith(f"{missing}.")):
                raise  # of the module itself
            raise CommandError(f"cannot import {source!r}: {error}") from error
    if name not in names:
        public = [n for n, v in names.items() if callable(v) and not n.startswith("_")]
        raise CommandError(f"{source!r} has no {name!r}; it has {', '.join(public) or 'none'}")
    found = names[name]
    if not callable(found):
        raise CommandError(f"{target!r} is no function, it is {found!r}")
    with contextlib.suppress(ValueError):  # some have no signature
        needed = [
            parameter.name
            for parameter in inspect.signature(found).parameters.values()
            if parameter.default is parameter.empty
            and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        ]
        if needed:
            raise CommandError(
                f"{target!r} wants {', '.join(needed)}: name a function without arguments, such as "
                f"lambda: {name}(...)"
            )
    called: Callable[[], Any] = found
    return called


def run_script(path: str, arguments: Sequence[str]) -> None:
    """Run a script as Python would."""
    before = sys.argv, list(sys.path)
    sys.argv = [path, *arguments]
    sys.path.insert(0, str(Path(path).resolve().parent))
    try:
        runpy.run_path(path, run_name="__main__")
    except SystemExit as end:
        if end.code not in (None, 0):
            raise CommandError(f"{path} has ended with exit status {end.code}") from None
    finally:
        sys.argv = before[0]
        sys.path[:] = before[1]
