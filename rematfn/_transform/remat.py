# SPDX-License-Identifier: Apache-2.0
"""The transform `remat`, in all its spellings."""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import sys
import types
import weakref
from collections.abc import Callable
from typing import Any, Generic, Literal, ParamSpec, TypeVar, overload

import torch
from torch import nn
from torch._C._dynamo.eval_frame import set_eval_frame

from .. import _C
from .._interop.opaque import watch_compiler
from ..policies import Custom, Guided, Policy
from ..policies._custom import Scorer
from ..policies._planned import Planned
from .budget import BudgetLike, Limit, parse_budget
from .deferred import refuse_deferred
from .level import MAX_OPERATIONS, LevelOptions, call
from .measured import Advice, Memory, Ran
from .signature import Signature, signature_of

P = ParamSpec("P")
R = TypeVar("R")
M = TypeVar("M", bound=nn.Module)
Cost = Literal["model", "time"]

_DEFAULT = Guided()


@dataclasses.dataclass(frozen=True)
class Options:
    """What `remat` was asked for, beside the function."""

    budget: Limit
    policy: Policy
    cost: Cost
    verify: bool
    max_operations: int = MAX_OPERATIONS


class Rematted(Generic[P, R]):
    """A function under a budget, as :func:`remat` returns it.

    Attributes:
        budget: The budget as it was parsed.
        policy: What is evicted when room is needed.
        last_call: What the last call did, and its backward goes on to do (:func:`rematfn.stats`).
    """

    # Not in `__dict__`, which what wraps the function copies.
    __slots__ = (
        *("__dict__", "__weakref__", "budget", "policy", "last_call"),
        *("_f", "_options", "_memory"),
    )

    def __init__(self, f: Callable[P, R], options: Options) -> None:
        functools.update_wrapper(self, f)
        self.budget = options.budget
        self.policy = options.policy
        self.last_call: Ran | None = None
        self._f = f
        self._options = options
        self._memory = Memory()

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> R:
        watch_compiler()
        around = set_eval_frame(None)  # a compiler around us is not to compile `f` under a level
        try:
            return self._run(args, kwargs)
        finally:
            set_eval_frame(around)

    __call__._torchdynamo_disable = True  # type: ignore[attr-defined]
    __call__._torchdynamo_disable_msg = "remat runs its function eagerly"  # type: ignore[attr-defined]

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> R:
        options, signature, advice = self._resolve(args, kwargs)
        failed: list[Callable[[], None]] = []

        def started(level: _C.Level) -> None:
            ran = Ran(level.report(), advice, self.budget.fraction)
            self.last_call = ran
            if signature is not None:
                failed.append(self._memory.begin(signature, ran))

        try:
            result: R = call(self._f, args, kwargs, options, started)
        except BaseException:
            for fail in failed:
                fail()
            raise
        return result

    def know(self, args: tuple[Any, ...], kwargs: dict[str, Any], peak_bytes: int) -> None:
        """Note the unconstrained peak of calls with these arguments."""
        self._memory.know(self._signature(args, kwargs), peak_bytes)

    def _signature(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Signature:
        return signature_of(args, kwargs, getattr(self._f, "__self__", None))

    def _resolve(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[LevelOptions, Signature | None, Advice]:
        """Return how to call, the signature if what it does is to be known, and what is known."""
        shared = self.budget.shared
        options = LevelOptions(
            budget=self.budget.bytes,
            shared=shared._shared if shared is not None else None,
            score=self.policy.score(),
            keeping=self.policy.keeping(),
            judge=self.policy.judge(),
            discards=self.policy.discards and self.budget == Limit(),
            evict_everything=self.policy.evict_everything,
            timed=self._options.cost == "time",
            verify=self._options.verify,
            name=self._describe(),
            max_operations=self._options.max_operations,
        )
        fraction = self.budget.fraction
        # Only the outermost level is recorded and guided: its record holds what runs inside. Where
        # nothing is planned, the record of a first call serves the figure of a BudgetError.
        outermost = _C.stack_depth() == 0
        # What a call may have of a shared budget is known only when it asks: it is not planned for.
        planned = options.budget is not None and shared is None
        if fraction is None and not (planned and outermost):
            why = (
                "there is no budget"
                if options.budget is None
                else "its budget is shared"
                if shared is not None
                else "it runs inside another level"
            )
            return options, None, Advice("online", why)
        if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None:
            return options, None, Advice("online", "it runs on shapes alone")
        guided = outermost and isinstance(self.policy, Planned)
        signature = self._signature(args, kwargs)  # See Note [What makes two calls alike]
        advice = self._memory.advise(signature, guided=guided, outermost=outermost)
        options = dataclasses.replace(options, record=advice.record)
        if fraction is not None and advice.peak_bytes is not None:
            options = dataclasses.replace(
                options,
                budget=max(1, int(fraction * advice.peak_bytes)),
                fraction=fraction,
                is_estimate=advice.is_estimate and advice.gives_way,
                is_estimate_unguided=advice.gives_way,
            )
        if advice.way is not None:
            assert isinstance(self.policy, Planned)
            assert options.budget is not None
            like = None if advice.way.planned else self._memory.like(signature)
            program = advice.way.program(options.budget, self.policy, like)
            options = dataclasses.replace(options, program=program)
            if advice.way.planned is None:
                advice = dataclasses.replace(advice, kind="online", why="no plan fits its budget")
        return options, signature, advice

    def _describe(self) -> str:
        name = getattr(self, "__name__", type(self._f).__name__)
        return f"remat({name}, budget={self.budget})"

    def __get__(self, instance: object, owner: type | None = None) -> Callable[..., R]:
        """Bind where `f` would: functions do, and neither bound methods nor most objects."""
        bind = getattr(type(self._f), "__get__", None)
        if instance is None or bind is None or bind(self._f, instance, owner) is self._f:
            return self
        return types.MethodType(self, instance)

    def __getattr__(self, name: str) -> Any:
        """Return what `f` has, such as `__code__`, but not what it is bound to."""
        if name in Rematted.__slots__ or name in ("__self__", "__func__"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self._f, name)

    def __reduce__(self) -> str | tuple[Any, ...]:
        """Pickle the name, as functions do, or else `f` and the options; no memories of calls."""
        if self._is_importable():
            return str(self.__qualname__)
        return Rematted, (self._f, self._options)

    def __deepcopy__(self, memo: dict[int, Any]) -> Rematted[P, R]:
        if self._is_importable():
            return self
        return Rematted(copy.deepcopy(self._f, memo), self._options)

    def _is_importable(self) -> bool:
        """Return whether the name that `f` was defined under now is this, as a decorator's is."""
        found: Any = sys.modules.get(getattr(self, "__module__", None) or "")
        for name in getattr(self, "__qualname__", "").split("."):
            found = getattr(found, name, None)
        return found is self

    def __repr__(self) -> str:
        return f"<{self._describe()} at {id(self):#x}>"


@overload
def remat(  # type: ignore[overload-overlap]  # a module is callable, and stays a module
    f: M,
    budget: BudgetLike = None,
    *,
    policy: Policy | Scorer = _DEFAULT,
    cost: Cost = "model",
    verify: bool = False,
    max_operations: int = MAX_OPERATIONS,
) -> M: ...
@overload
def remat(
    f: Callable[P, R],
    budget: BudgetLike = None,
    *,
    policy: Policy | Scorer = _DEFAULT,
    cost: Cost = "model",
    verify: bool = False,
    max_operations: int = MAX_OPERATIONS,
) -> Rematted[P, R]: ...
@overload
def remat(
    f: None = None,
    budget: BudgetLike = None,
    *,
    policy: Policy | Scorer = _DEFAULT,
    cost: Cost = "model",
    verify: bool = False,
    max_operations: int = MAX_OPERATIONS,
) -> Callable[[Callable[P, R]], Rematted[P, R]]: ...
def remat(
    f: Any = None,
    budget: BudgetLike = None,
    *,
    policy: Policy | Scorer = _DEFAULT,
    cost: Cost = "model",
    verify: bool = False,
    max_operations: int = MAX_OPERATIONS,
) -> Any:
    """Return a function equal to ``f`` whose intermediates occupy at most ``budget`` bytes.

    While the returned function runs, and until the graph it leaves behind is freed, tensors that do
    not fit are evicted, and rematerialised from their lineage when they are read again (Kirisame et
    al., *Dynamic Tensor Rematerialization*, ICLR 2021). Values and gradients are bitwise those of
    ``f``; random operators draw what they drew, and writes to tensors from outside happen once.

    ``remat`` is a transform: it nests with itself, with :mod:`torch.func` (``grad``, ``vjp``,
    ``jvp``, ``vmap``, ...) in either order, and with ``.backward()``.

    Args:
        f: A function of tensors, a method, a ``staticmethod`` or ``classmethod``, or an
            ``nn.Module``. Arguments and results may be any pytree. Without ``f``, a decorator is
            returned.
        budget: The most bytes of tensors made inside that may be resident at once. Residuals, the
            backward's intermediates, scratch of the running operator (on a CPU) and copies of what
            was overwritten count; results and gradients until they leave the function; arguments,
            parameters, captured tensors and the record of what was done (host memory) not. Bytes
            (``4096``), a string with a unit (``"1.5GiB"``, ``"200MB"``), a float in (0, 1] (that
            fraction of the peak that the call would have without a budget, as the calls before it
            have measured; the very first has no cap, unless :func:`warmup` has), a
            :class:`Budget` that several functions share, or None (no cap).
        policy: What to evict first. :class:`Guided` unless given, which learns from the first call
            of each signature; with :class:`ON` nothing is learnt or searched for. Within a shared
            budget no call is guided: those of policies that plan go by their ``first`` policy.
            For experiments, a function of a :class:`Candidate` (:class:`Custom`).
        cost: ``"model"`` estimates an operator's cost from bytes and FLOPs, the same on every run
            and machine; ``"time"`` measures it.
        verify: Compare the results of each replay with those of the operator's first run, and raise
            a :class:`ReplayError` that names the operator and the first element that differs. For
            trying out kernels of your own, best with ``policy=EvictEverything()``. It reads every
            result once more, and keeps two bytes for each of its elements, outside of the budget.
        max_operations: How many operators a call may have on record before that is trimmed. Each
            takes some 530 bytes of host memory, outside of the budget (and 330 more for a number
            among its arguments); the first call of a signature, which is written down for later
            ones, twice that. When a record is trimmed, the oldest resident values become constants,
            so that a loop that feeds on its own result does not remember every step. Constants are
            not evicted, so they are given no more than half of the bytes to spare; evicted values
            need their record, however long it is. In nested calls the outermost one decides.

    Returns:
        A function with the signature of ``f``. For a module: a module of the same class that shares
        all of its state with ``f`` (parameters, buffers, submodules, hooks, mode), whose
        ``forward`` alone is transformed. :func:`stats` says what its last call did.

    Raises:
        TypeError: ``f`` is not callable, or an option is of the wrong type; or ``f`` is a generator
            function or an async function, whose body runs after the call, outside of every budget.
            (from a call) ``f`` has returned a generator, a coroutine or another awaitable.
        ValueError: The budget or ``cost`` means nothing.
        BudgetError: (from a call or its backward) one operator needs more than the budget at once.
        ReplayError: (from a call or its backward) a tensor from outside that a replay would read
            was overwritten meanwhile; or, with ``verify``, an operator gave other bits when it
            was replayed.

    Example:
        >>> import torch, rematfn
        >>> def loss(x):
        ...     return x.sin().cos().exp().sum()
        >>> x = torch.linspace(0, 1, 1024)
        >>> g = torch.func.grad(rematfn.remat(loss, budget="16KiB"))
        >>> torch.equal(g(x), torch.func.grad(loss)(x))
        True
    """
    if f is None:
        return functools.partial(
            remat,
            budget=budget,
            policy=policy,
            cost=cost,
            verify=verify,
            max_operations=max_operations,
        )
    if not isinstance(policy, Policy) and callable(policy) and not isinstance(policy, type):
        policy = Custom(policy)
    if not isinstance(policy, Policy):
        raise TypeError(
            "remat(f, policy=...): a policy such as rematfn.policies.ON() is needed, got "
            f"{policy!r}."
        )
    if cost not in ("model", "time"):
        raise ValueError(f'remat(f, cost=...): "model" or "time" is needed, got {cost!r}.')
    if not isinstance(verify, bool):
        raise TypeError(f"remat(f, verify=...): True or False is needed, got {verify!r}.")
    if isinstance(max_operations, bool) or not isinstance(max_operations, int):
        raise TypeError(f"remat(f, max_operations=...): an int is needed, got {max_operations!r}.")
    if not 1 <= max_operations < 1 << 63:
        raise ValueError(
            f"remat(f, max_operations=...): it must be at least 1, got {max_operations!r}."
        )
    options = Options(parse_budget(budget), policy, cost, verify, max_operations)
    refuse_deferred(f, "remat(f)")
    if isinstance(f, staticmethod | classmethod):
        refuse_deferred(f.__func__, "remat(f)")
        return type(f)(Rematted(f.__func__, options))
    if isinstance(f, nn.Module):
        return _remat_module(f, options)
    if not callable(f):
        advice = "To give only options, name them: @remat(budget=...)."
        if hasattr(type(f), "__get__"):
            advice = f"Transform the function inside: write @remat below @{type(f).__name__}."
        raise TypeError(f"remat(f): a function or an nn.Module is needed, got {f!r}. {advice}")
    return Rematted(f, options)


def rematted_of(g: Any, call: str) -> tuple[Rematted[..., Any], tuple[Any, ...]]:
    """Return the outermost rematted function that ``g`` is or wraps, and its first arguments.

    Raises:
        TypeError: There is none that can be found; ``call`` is the function that was given ``g``.
    """
    inside, seen = g, set[int]()
    given: tuple[Any, ...] = ()
    while not isinstance(inside, Rematted):
        seen.add(id(inside))
        names = ["__rematted__", "__func__", "__wrapped__"]
        if isinstance(inside, functools.partial | functools.partialmethod):
            names = ["func"]
            given = (*inside.args, *given)
        elif isinstance(inside, types.MethodType):
            given = (inside.__self__, *given)
        inside = next((x for n in names if (x := getattr(inside, n, None)) is not None), None)
        if inside is None or id(inside) in seen:
            raise TypeError(
                f"{call}(g): what remat() returned is needed, got {g!r}, which wraps no such "
                f"function that can be found. Keep what remat() returned, and pass that: "
                f"g = remat(f, ...), rematfn.{call}(g). Of a module inside of another one, pass "
                f"the one inside."
            )
    return inside, given


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

    def __get__(self, twin: nn.Module | None, owner: type) -> Any:
        if twin is None:
            return getattr(type(self._module), self._name)
        current = getattr(self._module, self._name)
        if current is None or current in self._made or self._enters_a_level(current, owner):
            return current
        if self._now is None or self._now._f != current:
            self._now = Rematted(current, self._options)
            self._made.add(self._now)
        return self._now

    # A compiler that looked inside would guard the bound method, which is another one each time.
    __get__._torchdynamo_disable = True  # type: ignore[attr-defined]
    __get__._torchdynamo_disable_msg = "remat runs its function eagerly"  # type: ignore[attr-defined]

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


def _remat_module(module: M, options: Options) -> M:
    """Return a module that is ``module`` in everything but its ``forward``.

    The two share one ``__dict__``: what is set on one is set on the other, names and state dicts
    are the same, and nothing has to be kept in step. What is the twin's own sits in its class.
    """

    class Twin(type(module)):  # type: ignore[misc]
        forward = _Slot("forward", module, options)  # See Note [What the module would run]
        _compiled_call_impl = _Slot("_compiled_call_impl", module, options)

        @property
        def __rematted__(self) -> Any:
            compiled = self._compiled_call_impl
            return compiled if isinstance(compiled, Rematted) else self.forward

        def __copy__(self) -> Any:
            return _remat_module(copy.copy(module), options)

        def __deepcopy__(self, memo: dict[int, Any]) -> Any:
            return _remat_module(copy.deepcopy(module, memo), options)

        def __reduce__(self) -> tuple[Any, ...]:
            return _remat_module, (module, options)

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
    return twin
