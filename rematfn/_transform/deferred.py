# SPDX-License-Identifier: Apache-2.0
"""What runs after a call has returned, where no level would see it: bodies, and lazy results."""

import functools
import inspect
import types
from collections import deque
from collections.abc import Awaitable, Callable, Generator, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from .signature import attributes_of

_KINDS: tuple[tuple[Callable[[Any], bool], str], ...] = (
    (inspect.isgeneratorfunction, "a generator function"),
    (inspect.isasyncgenfunction, "an asynchronous generator function"),
    (inspect.iscoroutinefunction, "an async function"),
)
_ADVICE = (
    "what it computes, it computes after its call has returned, outside of every budget. Put the "
    "computation into a function of its own that returns its result, transform that, and call it "
    "from there."
)


def refuse_deferred(f: Any, call: str) -> None:
    """Raise a TypeError if a call of ``f`` would return before its body has run."""
    called = f.forward if isinstance(f, nn.Module) else f
    while isinstance(called, functools.partial):
        called = called.func
    candidates = [called]
    if not isinstance(called, type | types.FunctionType | types.MethodType):
        candidates.append(inspect.getattr_static(type(called), "__call__", None))
    for candidate in candidates:
        for is_one, kind in _KINDS:
            if is_one(candidate):
                name = getattr(called, "__qualname__", type(called).__qualname__)
                raise TypeError(f"{call}: {name} is {kind}; {_ADVICE}")


def refuse_deferred_result(result: Any, call: str) -> None:
    """Raise a TypeError if ``result`` is what a call returns whose body has not run."""
    if isinstance(result, torch.Tensor | tuple | dict | list) or result is None:
        return
    if isinstance(result, Generator | Awaitable | types.AsyncGeneratorType):
        if isinstance(result, Generator | types.CoroutineType):
            result.close()  # nobody is going to wait for it
        raise TypeError(f"{call}: the function has returned a {type(result).__name__}; {_ADVICE}")


_MOST_LOOKED_AT = 10_000  # objects of one result
_HOLD_NOTHING = (torch.Tensor, str, bytes, int, float, complex, type, types.ModuleType)


def module_held_by(result: Any, given: Iterable[Any]) -> tuple[Any, nn.Module] | None:
    """Return an object in ``result`` that holds a module with parameters, and that module.

    What a function returns as such, it hands on: modules, and what was ``given`` to the call. But
    an object, or a function, that holds a module may compute with it later.
    """
    seen = {id(it): it for it in given if not isinstance(it, nn.Module)}
    todo: deque[tuple[Any, Any]] = deque([(result, None)])
    while todo and len(seen) < _MOST_LOOKED_AT:
        it, holder = todo.popleft()
        if it is None or isinstance(it, _HOLD_NOTHING) or id(it) in seen:
            continue
        seen[id(it)] = it  # alive, so that no other has its id
        if isinstance(it, nn.Module):
            if holder is not None and next(it.parameters(), None) is not None:
                return holder, it
        elif isinstance(it, tuple | list | set | frozenset):
            todo.extend((part, holder) for part in it)
        elif isinstance(it, Mapping):
            todo.extend((part, holder) for part in it.values())
        else:
            todo.extend((part, it if holder is None else holder) for part in _parts_of(it))
    return None


def _parts_of(it: Any) -> list[Any]:
    """Return what an object or a function refers to."""
    parts = list(attributes_of(it, type(it)))
    if isinstance(it, functools.partial):
        parts += [it.func, it.args, it.keywords]
    elif isinstance(it, types.MethodType):
        parts += [it.__self__, it.__func__]
    elif isinstance(it, types.FunctionType):
        parts += [it.__defaults__, it.__kwdefaults__]
        for cell in it.__closure__ or ():
            try:
                parts.append(cell.cell_contents)
            except ValueError:  # nothing has been assigned yet
                continue
    return parts
