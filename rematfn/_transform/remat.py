# SPDX-License-Identifier: Apache-2.0
"""The transform `remat`, in all its spellings."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, cast, overload

from torch import nn

from .._interop.compiler import not_compiled
from ..policies import Guided, Policy
from ..policies._custom import Scorer
from .budget import BudgetLike, parse_budget
from .deferred import refuse_deferred
from .level import MAX_OPERATIONS
from .modules import remat_module
from .options import Cost, Options, policy_of
from .tiers import TierLike, tiers_of
from .transformed import Transformed

P = ParamSpec("P")
R = TypeVar("R")
M = TypeVar("M", bound=nn.Module)
Named = ParamSpec("Named")

DEFAULT_POLICY: Policy = Guided()  # of simulate() as well


class Transform(Protocol[Named]):
    """What `remat` and `offload` are to a type checker; ``Named`` are their options by name.

    A module is callable, and stays a module.
    """

    @overload
    def __call__(  # type: ignore[overload-overlap]
        self, f: M, budget: BudgetLike = None, *_: Named.args, **options: Named.kwargs
    ) -> M: ...
    @overload
    def __call__(
        self, f: Callable[P, R], budget: BudgetLike = None, *_: Named.args, **options: Named.kwargs
    ) -> Transformed[P, R]: ...
    @overload
    def __call__(
        self, f: None = None, budget: BudgetLike = None, *_: Named.args, **options: Named.kwargs
    ) -> Callable[[Callable[P, R]], Transformed[P, R]]: ...


def transform(of: Callable[Concatenate[Any, BudgetLike, Named], Any]) -> Transform[Named]:
    """Return the function itself, as a type checker is to see it."""
    return cast("Transform[Named]", of)


@transform
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
        budget: The most bytes of tensors made inside that may be resident at once.

            - These count: values that the forward saves for the backward, the backward's
              intermediates, scratch of the running operator (on a CPU), copies of what was
              overwritten. Results and gradients count until they leave the function.
            - These do not: arguments, parameters, captured tensors, and the record of what was
              done (host memory).

            It is written as bytes (``4096``), a string with a unit (``"1.5GiB"``, ``"200MB"``), a
            float in (0, 1], a :class:`Budget` that several functions share, or None (no cap). A
            float is that fraction of the largest peak that the function's calls would have had
            without a budget, as earlier calls have measured it. The very first call has no cap,
            unless :func:`warmup` ran before it.
        policy: What to evict first. The default is :class:`Guided`, which learns from the first
            call of each signature. :class:`ON` learns nothing. Within a shared budget no call is
            guided: a policy that plans then uses its ``first`` policy. For experiments, a function
            of a :class:`Candidate` (:class:`Custom`).
        cost: ``"model"`` estimates an operator's cost from bytes and FLOPs, the same on every run
            and machine; ``"time"`` measures it. With ``offload`` it is always measured.
        verify: Compare the results of each replay with those of the operator's first run, and raise
            a :class:`ReplayError` that names the operator. For trying out kernels of your own,
            best with ``policy=EvictEverything()``. It reads every result once more.
        max_operations: How many operators the record of a call may have before it is trimmed;
            262,144 unless given. An operator takes some 530 bytes of host memory, outside of the
            budget, and 330 more for a number among its arguments. In the first call of a signature,
            which is recorded for later ones, it takes twice that. To trim makes the oldest resident
            values constants, so that a loop over its own result does not remember every step.
            Constants cannot be evicted, so they get at most half of the spare bytes. Evicted values
            need their record, however long it is. In nested calls the outermost one decides.
        most_replays: The most that the replays of a call may cost, in multiples of the program's
            cost. Beyond that a :class:`BudgetError` is raised: before the call begins, if it
            follows a plan and values are not moved; otherwise while it runs, or when it returns. A
            running call is compared with an estimate of its cost: three times its forward, if a
            backward will come. If a backward replays too much after the call has returned, a
            warning comes at the next call. None: a :class:`ThrashingWarning` beyond 4, once, and
            the error only while a call runs, beyond 100. ``float("inf")``: no limit. In nested
            calls the outermost one decides.
        offload: Where values may be moved: True (the host's memory for values on an accelerator, a
            disk for those on a CPU), or a tier as :func:`offload` takes it; False or None: nowhere.
            Each value that is evicted is then dropped and computed again, or moved and fetched,
            whichever is cheaper. Values that cannot be computed again, such as a constant or a copy
            of an argument that is overwritten, can be moved, too.
        where: Write down what each call does to memory, at which line and in which module of the
            program, for :func:`explain` and :func:`timeline`; a BudgetError then names the line.
            :func:`where` does it for a block.

    Returns:
        A function with the signature of ``f``; or, for a module, one of the same class that shares
        all of its state with ``f`` (parameters, buffers, submodules, hooks, mode), whose
        ``forward`` alone is transformed. :func:`stats` says what its last call did.

    Raises:
        TypeError: ``f`` is not callable, or an option is of the wrong type; or ``f`` is a generator
            function or an async function, whose body runs after the call, outside of every budget;
            or a lazy module whose parameters have no shape yet.
            (from a call) ``f`` has returned a generator, a coroutine or another awaitable.
        ValueError: The budget or ``cost`` means nothing, or ``offload`` is no folder.
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
    )
    return functools.partial(transformed, options=options) if f is None else transformed(f, options)


@not_compiled
def transformed(f: Any, options: Options) -> Any:
    """Return ``f``, a function, a method or a module, under levels of ``options``."""
    name = options.name
    refuse_deferred(f, f"{name}(f)")
    if isinstance(f, staticmethod | classmethod):
        return type(f)(transformed(f.__func__, options))
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
    return Transformed(f, options)
