# SPDX-License-Identifier: Apache-2.0
"""Where in the program: what calls of transformed functions write down on request."""

import contextlib
import sysconfig
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from .. import _C
from .recorded import lock

# Frames of these are passed over: see Note [A place is a line and a module].
_C.set_libraries(
    [
        *(f"{Path(torch.__file__).parent.with_name(name)}/" for name in ("torch", "functorch")),
        *(
            f"{Path(__file__).parents[1] / name}/"
            for name in ("_inspection", "_interop", "_traces", "_transform", "policies", "testing")
        ),
        *(f"{sysconfig.get_path(name)}/" for name in ("stdlib", "platstdlib")),
    ]
)


class _Asked(threading.local):
    def __init__(self) -> None:
        self.blocks = 0  # of `where` that the thread is in
        self.modules: list[tuple[nn.Module, str]] = []  # whose forward runs, and their paths


asked = _Asked()
_names: weakref.WeakKeyDictionary[nn.Module, dict[int, str]] = weakref.WeakKeyDictionary()


@contextlib.contextmanager
def where() -> Iterator[None]:
    """Have the calls of transformed functions in this block write down what they do, and where.

    As ``remat(f, ..., where=True)`` does for one function. :func:`explain` and :func:`timeline`
    then say what became of each value, by the line and the module that made it, and a
    :class:`BudgetError` names the line of the operator that does not fit. It is for this thread,
    and for calls that begin inside of the block; their backward may run after it.

    Example:
        >>> import torch, rematfn
        >>> g = rematfn.remat(lambda x: x.sin().cos().sum(), "1MiB")
        >>> with rematfn.where():
        ...     _ = torch.func.grad(g)(torch.ones(4))
        >>> rematfn.explain(g).stats.replays
        0
    """
    asked.blocks += 1
    try:
        with module_paths():
            yield
    finally:
        asked.blocks -= 1


_blocks = 0
_hooks: list[Any] = []


@contextlib.contextmanager
def module_paths(root: object = None) -> Iterator[None]:
    """Have the extension know, on each thread, which module's ``forward`` runs.

    ``root``: whose ``forward`` is about to run, if it is a module's.
    """
    _change_blocks(+1)
    around = asked.modules[-1][0] if asked.modules else None
    # A transformed module has its original's state, and has said already where it is.
    is_known = around is not None and around.__dict__ is getattr(root, "__dict__", None)
    depth = len(asked.modules)
    if isinstance(root, nn.Module) and not is_known:
        _enter(root, None)
    try:
        yield
    finally:
        while len(asked.modules) > depth:  # hooks do not run where an interrupt passes
            _leave(asked.modules[-1][0], None, None)
        _change_blocks(-1)


def _change_blocks(by: int) -> None:
    global _blocks
    with lock:
        _blocks += by
        if _blocks > 0 and not _hooks:
            _hooks.append(register_module_forward_pre_hook(_enter))
            _hooks.append(register_module_forward_hook(_leave, always_call=True))
        elif _blocks == 0:
            while _hooks:
                _hooks.pop().remove()


def _enter(module: nn.Module, args: Any) -> None:
    if torch.compiler.is_compiling():  # what looks for paths would be compiled, for each path anew
        return
    path = _path_of(module)
    asked.modules.append((module, path))
    _C.set_module(path)


def _leave(module: nn.Module, args: Any, result: Any) -> None:
    if torch.compiler.is_compiling():
        return
    # It may have been entered before anybody asked.
    if asked.modules and asked.modules[-1][0] is module:
        asked.modules.pop()
        _C.set_module(asked.modules[-1][1] if asked.modules else "")


def _path_of(module: nn.Module) -> str:
    """Return ``"GPT.blocks.0.mlp"``: from the outermost module whose forward runs."""
    for around, path in reversed(asked.modules):
        if around not in _names:
            _names[around] = {id(inner): name for name, inner in around.named_modules()}
        name = _names[around].get(id(module))
        if name is not None:
            return f"{path}.{name}" if name else path
    return type(module).__name__
