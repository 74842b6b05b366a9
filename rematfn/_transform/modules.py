# SPDX-License-Identifier: Apache-2.0
"""An `nn.Module` under a budget: a twin that shares its state, whose `forward` is transformed."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import types
import weakref
from typing import Any, NoReturn, TypeVar

from torch import nn

from .._interop.distributed import share_state
from .._interop.opaque import not_compiled
from .rematted import Options, Rematted

M = TypeVar("M", bound=nn.Module)


class _Slot:
    """An attribute of a module's twin that holds what the module runs, and gives it transformed.

    Note [What the module would run]
    ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
    `forward` need not be the class's: torch.compile, mixed precision and monkeypatches set it on
    the instance, before `remat` or after. A twin that had a method of this name would be passed by,
    since instances come before classes, and all would run outside of every level without a word.
    So the name is a data descriptor of the twin's class, which comes before both. Whenever it is
    asked it looks up what the module has, and gives that transformed. What is set is often made of
    what was got (`net.forward = autocast(net.forward)`); so what was got stays what it was, and one
    level is then within another. What was got and is put back is not transformed twice.
    """

    def __init__(self, name: str, module: nn.Module, options: Options) -> None:
        self._name = name
        self._module = module
        self._options = options
        self._now: Rematted[..., Any] | None = None
        self._made: weakref.WeakSet[Rematted[..., Any]] = weakref.WeakSet()

    # A compiler that looked inside would guard the bound method, which is another one each time.
    @not_compiled
    def __get__(self, twin: nn.Module | None, owner: type) -> Any:
        if twin is None:
            return getattr(type(self._module), self._name)
        if twin.__dict__ is not self._module.__dict__:
            raise TypeError(
                f"remat({type(self._module).__name__}): a replica, with tensors of its own, "
                "as nn.DataParallel makes them, and would run the module that it was made of. Use "
                "nn.parallel.DistributedDataParallel, one process for each device."
            )
        current = getattr(self._module, self._name)
        if current is None or current in self._made or self._enters_a_level(current, owner):
            return current
        if self._now is None or self._now._f != current:
            self._now = Rematted(current, self._options)
            self._made.add(self._now)
        return self._now

    def _enters_a_level(self, current: Any, owner: type) -> bool:
        """Return whether `current` is the twin's own calls, compiled."""
        if self._name == "forward":
            return False
        return isinstance(getattr(inspect.unwrap(current), "__self__", None), owner)

    def __set__(self, twin: nn.Module, value: Any) -> None:
        twin.__dict__[self._name] = value

    def __delete__(self, twin: nn.Module) -> None:
        if self._name not in twin.__dict__:
            raise AttributeError(self._name)
        del twin.__dict__[self._name]


def remat_module(module: M, options: Options) -> M:
    """Return a module that is ``module`` in everything but its ``forward``.

    The two share one ``__dict__``: what is set on one is set on the other, names and state dicts
    are the same, and nothing has to be kept in step. What is the twin's own sits in its class.
    """
    options = dataclasses.replace(options, of=type(module).__name__)

    class Twin(type(module)):  # type: ignore[misc]
        forward = _Slot("forward", module, options)  # See Note [What the module would run]
        _compiled_call_impl = _Slot("_compiled_call_impl", module, options)

        @property
        def __rematted__(self) -> Any:
            compiled = self._compiled_call_impl
            return compiled if isinstance(compiled, Rematted) else self.forward

        def __prepare_scriptable__(self) -> NoReturn:
            called: Rematted[..., Any] = self.__rematted__
            called.__prepare_scriptable__()

        def __copy__(self) -> Any:
            return remat_module(copy.copy(module), options)

        def __deepcopy__(self, memo: dict[int, Any]) -> Any:
            return remat_module(copy.deepcopy(module, memo), options)

        def __reduce__(self) -> tuple[Any, ...]:
            return remat_module, (module, options)

    Twin.__name__ = type(module).__name__
    Twin.__qualname__ = type(module).__qualname__
    Twin.__module__ = type(module).__module__
    if getattr(module.forward, "__func__", None) is nn.Module.forward:  # a `__call__` of its own
        called: Rematted[..., Any] = Rematted(
            types.MethodType(type(module).__call__, module), options
        )
        Twin.__call__ = lambda self, /, *args, **kwargs: called(*args, **kwargs)
        Twin.__rematted__ = called  # type: ignore[method-assign]
    twin = object.__new__(Twin)
    object.__setattr__(twin, "__dict__", module.__dict__)
    share_state(module, twin)
    return twin
