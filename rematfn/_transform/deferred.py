# SPDX-License-Identifier: Apache-2.0
"""What runs after a call has returned, where no level would see it: bodies, and lazy results."""

import functools
import inspect
import types
from collections.abc import Awaitable, Callable, Generator
from typing import Any

from torch import nn

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
    if isinstance(result, Generator | Awaitable | types.AsyncGeneratorType):
        if isinstance(result, Generator | types.CoroutineType):
            result.close()  # nobody is going to wait for it
        raise TypeError(f"{call}: the function has returned a {type(result).__name__}; {_ADVICE}")
