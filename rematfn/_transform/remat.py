# SPDX-License-Identifier: Apache-2.0
"""The transform `remat`, in all its spellings."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ParamSpec, TypedDict, TypeVar, overload

from torch import nn

from .._interop.opaque import not_compiled
from ..policies import Guided, Policy
from ..policies._custom import Scorer
from .budget import BudgetLike, parse_budget
from .deferred import refuse_deferred
from .level import MAX_OPERATIONS
from .modules import remat_module
from .options import Cost, Options, methods_of, policy_of
from .rematted import Rematted
from .tiers import TierLike, tiers_of

if TYPE_CHECKING:
    from typing_extensions import Unpack

P = ParamSpec("P")
R = TypeVar("R")
M = TypeVar("M", bound=nn.Module)

DEFAULT_POLICY: Policy = Guided()  # of simulate() as well


class _Options(TypedDict, total=False):
    """The options by name, of all that can be transformed."""

    policy: Policy | Scorer
    cost: Cost
    verify: bool
    max_operations: int
    most_replays: float | None
    offload: bool | TierLike
    where: bool


@overload
def remat(  # type: ignore[overload-overlap]  # a module is callable, and stays a module
    f: M,
    budget: BudgetLike = None,
    *,
    methods: Sequence[str] = ("forward",),
    **options: Unpack[_Options],
) -> M: ...
@overload
def remat(
    f: Callable[P, R],
    budget: BudgetLike = None,
    **options: Unpack[_Options],
) -> Rematted[P, R]: ...
@overload
def remat(
    f: None = None,
    budget: BudgetLike = None,
    **options: Unpack[_Options],
) -> Callable[[Callable[P, R]], Rematted[P, R]]: ...
def remat(
    f: Any = None,
    budget: BudgetLike = None,
    *,
    policy: Policy | Scorer = DEFAULT_POLICY,
    cost: Cost = "model",
    verify: bool = False,
    max_operations: int = MAX_OPERATIONS,
    most_replays: float | None = None,
    offload: bool | TierLike = False,
    where: bool = False,
    methods: Sequence[str] = ("forward",),
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
            fraction of the largest peak that its calls would have had without a budget, as those
            before it have measured; the very first has no cap, unless :func:`warmup` has), a
            :class:`Budget` that several functions share, or None (no cap).
        policy: What to evict first. :class:`Guided` unless given, which learns from the first call
            of each signature; with :class:`ON` nothing is learnt or searched for. Within a shared
            budget no call is guided: those of policies that plan go by their ``first`` policy.
            For experiments, a function of a :class:`Candidate` (:class:`Custom`).
        cost: ``"model"`` estimates an operator's cost from bytes and FLOPs, the same on every run
            and machine; ``"time"`` measures it. With ``offload`` it is measured in any case.
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
        most_replays: The most that the replays of a call may cost, in multiples of the program's
            cost; beyond that it is a :class:`BudgetError`. A call that follows a plan is judged
            before it begins, unless values may be moved. One that nothing is known of is stopped
            while it runs, once it is past the limit by what can be told of its cost (three times
            that of its forward, where a backward is to come), and else judged when it is over, its
            backward included: what a backward has done after the call is warned of, at the next
            call. None: 4, and nothing but a :class:`ThrashingWarning`, once. ``float("inf")``: no
            limit. Inside of another call, that one decides.
        offload: Where values may be moved to instead: True (the host's memory for values on an
            accelerator, a disk for those on a CPU), or a tier as :func:`offload` takes it; False or
            None: nowhere. Each value that has to go then goes the cheaper way: it is dropped and
            computed again, or moved and fetched. What cannot be computed again, such as a copy of
            an argument that is overwritten, or a constant, can still be moved.
        where: Write down what each call does to memory, at which line and in which module of the
            program, for :func:`explain` and :func:`timeline`; a BudgetError then names the line.
            :func:`where` does it for a block.
        methods: Of a module: the names of the methods that are transformed, each with what it knows
            of its own calls. For a module whose ``forward`` returns what computes later, or that
            has none: ``remat(flow, budget, methods=["log_prob"])``.

    Returns:
        A function with the signature of ``f``; or, for a module, one of the same class that shares
        all of its state with ``f`` (parameters, buffers, submodules, hooks, mode), whose
        ``forward`` alone, or ``methods``, are transformed. :func:`stats` says what its last call
        did.

    Raises:
        TypeError: ``f`` is not callable, or an option is of the wrong type; or ``f`` is a generator
            function or an async function, whose body runs after the call, outside of every budget;
            or a lazy module whose parameters have no shape yet.
            (from a call) ``f`` has returned a generator, a coroutine or another awaitable.
        ValueError: The budget or ``cost`` means nothing, ``offload`` is no folder, or the module
            has no such methods.
        BudgetError: (from a call or its backward) one operator needs more than the budget at once;
            or (from a call) its replays cost more than ``most_replays``. The message says from
            which budget on they do not, if the call was recorded.
        ReplayError: (from a call or its backward) a tensor from outside that a replay would read
            was overwritten meanwhile; or, with ``verify``, an operator gave other bits when it
            was replayed.
        OffloadError: with ``offload``, as for :func:`offload`.

    Example:
        >>> import torch, rematfn
        >>> def loss(x):
        ...     return x.sin().cos().exp().sum()
        >>> x = torch.linspace(0, 1, 1024)
        >>> g = torch.func.grad(rematfn.remat(loss, budget="16KiB"))
        >>> torch.equal(g(x), torch.func.grad(loss)(x))
        True
    """
    options = Options(
        budget=parse_budget(budget),
        policy=policy_of(policy, "remat(f, policy=...)"),
        cost=cost,
        verify=verify,
        max_operations=max_operations,
        tiers=tiers_of(offload, "remat(f, offload=...)"),
        most_replays=most_replays,
        where=where,
        methods=methods_of(methods, "remat"),
    )
    return functools.partial(transformed, options=options) if f is None else transformed(f, options)


@not_compiled
def transformed(f: Any, options: Options) -> Any:
    """Return ``f``, a function, a method or a module, under levels of ``options``."""
    name = options.name
    if options.methods != Options.methods and not isinstance(f, nn.Module):
        raise TypeError(f"{name}(f, methods=...): these are methods of an nn.Module, got {f!r}.")
    refuse_deferred(f, f"{name}(f)")
    if isinstance(f, staticmethod | classmethod):
        refuse_deferred(f.__func__, f"{name}(f)")
        return type(f)(Rematted(f.__func__, options))
    if isinstance(f, nn.Module):
        return remat_module(f, options)
    if isinstance(f, type):
        raise TypeError(
            f"{name}(f): a function or an nn.Module is needed, got the class {f.__qualname__}, "
            "whose call is its constructor. Transform an instance, "
            f"{name}({f.__name__}(...), budget), or write @{name} above a method."
        )
    if not callable(f):
        advice = "To give only options, name them: @" + name + "(budget=...)."
        if hasattr(type(f), "__get__"):
            advice = f"Transform the function inside: write @{name} below @{type(f).__name__}."
        raise TypeError(f"{name}(f): a function or an nn.Module is needed, got {f!r}. {advice}")
    return Rematted(f, options)
