# SPDX-License-Identifier: Apache-2.0
"""``python -m rematfn profile``, ``explain``, ``timeline``: looking at a program."""

import argparse
import contextlib
import functools
import inspect
import runpy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import rematfn
from rematfn._transform.deferred import refuse_deferred
from rematfn._transform.where import asked
from rematfn.errors import RematError

from .arguments import CommandError, add_offload, budget, positive, writable

_PICTURES = (".png", ".svg", ".pdf")
_HELP = "script.py:function, called without arguments; or script.py, all of it"


def add(commands: Any) -> None:
    profile = _command(
        commands,
        _profile,
        "what budgets would cost a program",
        "Run a program once without a budget, time its operators, and predict by simulation what"
        " budgets would cost: the unconstrained peak, the smallest budget, and time over budgets.",
    )
    profile.add_argument(
        "--budgets",
        type=budget,
        nargs="+",
        metavar="BUDGET",
        help="fractions of the peak (0.3) or bytes (200MB); by default 0.9 to 0.1",
    )
    profile.add_argument(
        "--calls", type=positive, default=1, help="how many to time; 3 predict better than one"
    )
    profile.add_argument(
        "--out", type=writable(*_PICTURES), help="save the curve: .png, .svg or .pdf"
    )
    add_offload(profile)

    explain = _command(
        commands,
        _explain,
        "what a call kept, evicted and replayed, where and why",
        "Run a function within a budget, or a script, and explain the last transformed call.",
    )
    explain.add_argument("--rows", type=positive, default=8, help="rows of each table")
    _call(explain)

    timeline = _command(
        commands,
        _timeline,
        "memory over the operators of a call, and over time",
        "Run a function within a budget, or a script, and draw what the last transformed call"
        " held.",
    )
    timeline.add_argument(
        "--out",
        type=writable(*_PICTURES, ".json", ".json.gz"),
        default=Path("timeline.png"),
        help="where to save it: .png, .svg, .pdf, or .json for Perfetto",
    )
    _call(timeline)


def _command(
    commands: Any, run: Callable[..., int], short: str, long: str
) -> argparse.ArgumentParser:
    made: argparse.ArgumentParser
    made = commands.add_parser(run.__name__[1:], help=short, description=long)
    made.set_defaults(command=run, fail=made.error)
    made.add_argument("target", help=_HELP)
    made.add_argument("arguments", nargs="*", help="of the script; after -- if they begin with -")
    return made


def _call(command: argparse.ArgumentParser) -> None:
    command.add_argument("--budget", type=budget, help="of the function: bytes, or 0.3 of its peak")
    command.add_argument(
        "--calls", type=positive, default=3, help="of the function; the last one is looked at"
    )
    add_offload(command)


def _profile(options: argparse.Namespace) -> int:
    f = _function_of(options.target)
    if f is None:
        path = options.target

        def f() -> None:
            _run_script(path, options.arguments)

        f.__name__ = Path(path).name
    budgets = {} if options.budgets is None else {"budgets": options.budgets}
    found = rematfn.profile(f, calls=options.calls, offload=options.offload, **budgets)
    print(found)
    if options.out is not None:
        found.figure().savefig(options.out)
        print(f"picture: {options.out}")
    return 0


def _explain(options: argparse.Namespace) -> int:
    print(rematfn.explain(_called(options), rows=options.rows))
    return 0


def _timeline(options: argparse.Namespace) -> int:
    shown = rematfn.timeline(_called(options))
    shown.save(options.out)
    print(shown)
    print(f"saved: {options.out}")
    return 0


def _called(options: argparse.Namespace) -> Any:
    """Run the program; return the transformed function that it has called last."""
    f = _function_of(options.target)
    if f is None and options.budget is not None:
        options.fail("--budget is of a function: name one, script.py:function")
    with rematfn.where():
        try:
            if f is None:
                _run_script(options.target, options.arguments)
            else:
                g = rematfn.remat(f, options.budget, offload=options.offload)
                for _ in range(options.calls):
                    g()
        except RematError as error:  # the refused call can be looked at
            print(f"{type(error).__name__}: {error}\n", file=sys.stderr)
        if asked.called is None:
            raise CommandError(
                f"{options.target} has called no function that remat() or offload() returned; "
                f"name a function of it, {options.target}:function, and a --budget"
            )
        return asked.called


def _function_of(target: str) -> Callable[[], Any] | None:
    """Return the function that is named; None if it is a script that is."""
    file, _, name = target.rpartition(":") if ":" in target else (target, "", "")
    if not file.endswith(".py"):
        raise CommandError(f"{target!r} names no script: write {_HELP}")
    if not Path(file).is_file():
        raise CommandError(f"there is no file {file!r}")
    if target.endswith(":"):
        raise CommandError(f"{target!r} names no function: write {_HELP}")
    if not name:
        return None
    folder = str(Path(file).resolve().parent)  # as Python does for a script
    if folder not in sys.path:
        sys.path.insert(0, folder)
    names = runpy.run_path(file, run_name="rematfn_target")
    first, *attributes = name.split(".")
    found = functools.reduce(lambda x, part: getattr(x, part, None), attributes, names.get(first))
    if not callable(found):
        public = [n for n, v in names.items() if callable(v) and not n.startswith("_")]
        raise CommandError(
            f"{file!r} has no function {name!r}; it has {', '.join(public) or 'none'}"
        )
    with contextlib.suppress(ValueError):  # some have no signature
        try:
            inspect.signature(found).bind()
        except TypeError as error:
            raise CommandError(
                f"{target!r}: {error}; name a function without arguments, such as "
                f"lambda: {name}(...)"
            ) from None
    try:
        refuse_deferred(found, target)
    except TypeError as error:
        raise CommandError(str(error)) from None
    called: Callable[[], Any] = found
    return called


def _run_script(path: str, arguments: Sequence[str]) -> None:
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
