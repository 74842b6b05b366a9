# SPDX-License-Identifier: Apache-2.0
"""An `nn.Module` under a budget: a twin that shares its state, with `forward` transformed."""

import copy
import dataclasses
import inspect
import types
import weakref
from typing import Any, NoReturn, TypeVar

import torch
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin

from .._interop.compiler import not_compiled, refuse_symbolic_trace
from .._interop.distributed import share_state
from .history import History
from .options import Options
from .transformed import Transformed

M = TypeVar("M", bound=nn.Module)


class _Method(Transformed[..., Any]):
    """What a twin gives for a bound method: what takes it apart gets the function below the level.

    Mixed precision puts a method together again (`net.forward = MethodType(autocast(f), net)` with
    the `__func__` of what was there), so that a copy of the module runs the copy's weights.
    """

    __slots__ = ()

    def __getattr__(self, name: str) -> Any:
        if name in ("__func__", "__self__"):
            return getattr(self._f, name)
        return super().__getattr__(name)


class _Own:
    """What a twin has beside the state that it shares."""

    def __init__(self, module: nn.Module, options: Options, twin_class: type) -> None:
        self.module = module
        self.options = options
        self.twin_class = twin_class
        self._now: dict[str, Transformed[..., Any] | None] = {}
        self._made: weakref.WeakSet[Transformed[..., Any]] = weakref.WeakSet()
        # Some frameworks set a new closure for every call.
        self._histories: weakref.WeakKeyDictionary[types.CodeType, History] = (
            weakref.WeakKeyDictionary()
        )

    def transformed(self, name: str, current: Any) -> Any:
        """Return what the module has as `name`, transformed if it is not yet."""
        if current is None or current in self._made:
            return current
        now = self._now.get(name)
        if now is None or now._f != current:
            now = self._now[name] = None  # nobody else may have it, and its history is free
            now = self._now[name] = _Method(current, self.options, self._history_of(current))
            self._made.add(now)
        return now

    def _history_of(self, f: Any) -> History:
        code = getattr(f, "__code__", None)
        if code is None:
            return History()
        found = self._histories.setdefault(code, History())
        # One wrapper may be within another of the same code.
        return History() if any(made._history is found for made in self._made) else found


class _Slot:
    """An attribute of a module's twin that holds what the module runs, and gives it transformed.

    Note [What the module would run]
    ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
    `forward` need not be the class's: torch.compile, mixed precision and monkeypatches set it on
    the instance, before `remat` or after. A twin that had a method of this name would be passed by,
    since instances come before classes, and all would silently run outside of every level.
    So the name is a data descriptor of the twin's class, which comes before both. Whenever it is
    asked it looks up what the module has, and gives that transformed. What is set is often made of
    what was got (`net.forward = autocast(net.forward)`); so what was got stays what it was, and one
    level is then within another. What was got and is put back is not transformed twice.
    """

    def __init__(self, name: str, base: type[nn.Module]) -> None:
        self._name = name
        self._base = base

    # A compiler that looked inside would guard the bound method, which is another one each time.
    @not_compiled
    def __get__(self, twin: Any, owner: type) -> Any:
        if twin is None:
            if self._name == "forward":
                refuse_symbolic_trace(f"remat({self._base.__name__}(...), budget)")
            return getattr(self._base, self._name)
        own: _Own = twin._rematfn_own
        if twin.__dict__ is not own.module.__dict__:
            raise TypeError(
                f"{_made_by(own)}: its twin was given a `__dict__` of its own, and "
                "would run the module that it was made of. Transform what is to have it."
            )
        current = getattr(own.module, self._name)
        is_its_own = isinstance(current, types.MethodType) and current.__self__ is own.module
        if is_its_own and type(twin) is not own.twin_class:
            # What changed the class (parametrizations, FSDP2) may have put properties there.
            current = types.MethodType(current.__func__, twin)
        if self._name == "_compiled_call_impl":
            compiled = getattr(inspect.unwrap(current), "__self__", None)
            if isinstance(compiled, owner):  # the twin's own calls, which enter a level
                return current
        return own.transformed(self._name, current)

    def __set__(self, twin: nn.Module, value: Any) -> None:
        twin.__dict__[self._name] = value

    def __delete__(self, twin: nn.Module) -> None:
        if self._name not in twin.__dict__:
            raise AttributeError(self._name)
        del twin.__dict__[self._name]


class _Twin:
    """What the class of a twin has before that of its module."""

    __slots__ = ()
    _rematfn_own: _Own

    @property
    def __transformed__(self) -> Any:
        compiled = self._compiled_call_impl  # type: ignore[attr-defined]
        return compiled if isinstance(compiled, Transformed) else self.forward  # type: ignore[attr-defined]

    def __prepare_scriptable__(self) -> None:
        self.__transformed__.__prepare_scriptable__()

    def _replicate_for_data_parallel(self) -> NoReturn:
        raise TypeError(
            f"nn.DataParallel of {_made_by(self._rematfn_own)}: its replicas "
            "would run the module that they were made of. Use "
            "nn.parallel.DistributedDataParallel, one process for each device."
        )

    def __copy__(self) -> Any:
        return _twin_like(self, copy.copy(self._rematfn_own.module))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        module = copy.deepcopy(self._rematfn_own.module, memo)
        if id(self) in memo:  # of what is set on it, something is bound to it
            return memo[id(self)]
        return _twin_like(self, module)

    def __reduce__(self) -> tuple[Any, ...]:
        own = self._rematfn_own
        if type(self) is not own.twin_class:
            raise TypeError(
                f"{_made_by(own)} cannot be pickled: its class has been made "
                f"{type(self).__name__} since. Save its state_dict()."
            )
        return remat_module, (own.module, own.options)


def _made_by(own: _Own) -> str:
    return f"{own.options.name}({type(own.module).__name__})"


def _twin_like(twin: _Twin, module: nn.Module) -> Any:
    """Return the twin of another module, of the same class and options."""
    made: Any = remat_module(module, twin._rematfn_own.options)
    made.__class__ = type(twin)
    return made


_twin_classes: weakref.WeakKeyDictionary[type, dict[bool, weakref.ref[type]]] = (
    weakref.WeakKeyDictionary()
)


def _twin_class(base: type[nn.Module], has_forward: bool) -> type:
    """Return the class of all twins of modules that are ``base``.

    One for all: frameworks tell layers by their class, and keep classes for ever, so a class has
    nothing of a module's.
    """
    made = _twin_classes.setdefault(base, {})
    known = made[has_forward]() if has_forward in made else None
    if known is not None:
        return known
    names = ["forward", "_compiled_call_impl"] if has_forward else ["__call__"]
    # See Note [What the module would run]
    body: dict[str, Any] = {name: _Slot(name, base) for name in names}
    body |= {"__slots__": ("_rematfn_own",), "__module__": base.__module__}
    body["__qualname__"] = base.__qualname__

    def new(cls: type, /, *args: Any, **kwargs: Any) -> Any:
        """Make a plain module, of `type(model)(config)` and the like."""
        if cls is not twin_class:
            raise TypeError(
                f"{cls.__name__}(...): it is a subclass of what remat({base.__name__}) is made of. "
                f"Derive it from {base.__name__}, and transform what it makes."
            )
        return base(*args, **kwargs)

    body["__new__"] = new
    if not has_forward:
        body["__transformed__"] = property(lambda self: self.__call__)
    if issubclass(base, torch.fx.GraphModule):  # which writes what it makes into its class
        body["recompile"] = lambda self: self._rematfn_own.module.recompile()
    bases = (base,) if issubclass(base, _Twin) else (_Twin, base)
    metaclass: Any = type(base)
    twin_class: type = metaclass(base.__name__, bases, body)
    made[has_forward] = weakref.ref(twin_class)
    return twin_class


def remat_module(module: M, options: Options) -> M:
    """Return a module that is ``module`` in everything but its ``forward``.

    The two share one ``__dict__``: what is set on one is set on the other, names and state dicts
    are the same, and nothing has to be kept in step. What is the twin's own sits in a slot.
    """
    base = type(module)
    lazy: Any = module
    if isinstance(lazy, LazyModuleMixin) and lazy.has_uninitialized_params():  # type: ignore[misc]
        raise TypeError(
            f"{options.name}({base.__name__}): its parameters have no shape yet, and it becomes a "
            "module of another class when they get one. Call it once, then transform it."
        )
    has_forward = getattr(module.forward, "__func__", None) is not nn.Module.forward
    twin_class = _twin_class(base, has_forward)
    twin: Any = object.__new__(twin_class)
    object.__setattr__(twin, "__dict__", module.__dict__)
    of = dataclasses.replace(options, of=base.__name__)
    object.__setattr__(twin, "_rematfn_own", _Own(module, of, twin_class))
    share_state(module, twin)
    return twin  # type: ignore[no-any-return]
