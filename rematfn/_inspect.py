# SPDX-License-Identifier: Apache-2.0
"""Statistics of a transformed function, and a look at what is alive."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch

from . import _C
from ._budget import format_bytes
from ._transform import Rematted


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stats:
    """What a call did, its backward included as far as it has run.

    What is not known is None: everything, before the first call.

    Attributes:
        budget: Bytes the call may hold resident, or None.
        peak_bytes: The most bytes that were resident at once, those a running operator was about
            to allocate included.
        resident_bytes: Bytes resident when the statistics were taken.
        operators: Operators the program ran, each counted once.
        evictions: How often a version's bytes were given up.
        replays: Recorded operations run again.
        replayed_cost: Their cost, as a fraction of the program's own.
        replayed_flops: Their FLOPs, as a fraction of the program's own. Matrix products,
            convolutions and attention have some.
        min_budget: The largest need of a single operator, in bytes: no smaller budget can do, and
            with one as small replays may need more. Known only for calls with a budget.
    """

    budget: int | None = None
    peak_bytes: int | None = None
    resident_bytes: int | None = None
    operators: int | None = None
    evictions: int | None = None
    replays: int | None = None
    replayed_cost: float | None = None
    replayed_flops: float | None = None
    min_budget: int | None = None

    def __str__(self) -> str:
        if self.operators is None:
            return "not called yet"
        return (
            f"budget     {_bytes(self.budget, 'none')}\n"
            f"peak       {_bytes(self.peak_bytes)}\n"
            f"resident   {_bytes(self.resident_bytes)}\n"
            f"operators  {self.operators}\n"
            f"evictions  {self.evictions}\n"
            f"replays    {self.replays} ({self.replayed_cost:.1%} of the cost)\n"
            f"min budget {_bytes(self.min_budget)}"
        )


def _bytes(nbytes: int | None, unknown: str = "unknown") -> str:
    return unknown if nbytes is None else format_bytes(nbytes)


def stats(g: Callable[..., Any]) -> Stats:
    """Return what the last call of ``g`` did, its backward included as far as it has run.

    The statistics are those of this moment. Asked again after the backward, they are the newer.

    Args:
        g: What :func:`remat` returned: a function, a method, whose statistics are its function's
            whatever it is bound to, or a module. Or what wraps such a function and says so, as
            ``torch.func.grad(g)``, ``functools.partial(g)`` and decorators that use
            :func:`functools.wraps` do.

    Raises:
        TypeError: There is no such function in ``g``.

    Example:
        >>> import torch, rematfn
        >>> g = rematfn.remat(lambda x: x.sin().cos().sum(), budget="1MiB")
        >>> rematfn.stats(g).operators is None
        True
        >>> _ = torch.func.grad(g)(torch.ones(4))
        >>> rematfn.stats(g).replays
        0
    """
    level = _rematted_in(g).last_level
    return Stats() if level is None else Stats(**level.read())


def _rematted_in(g: Any) -> Rematted[..., Any]:
    """Return the outermost rematted function that `g` is, or wraps."""
    inside, seen = g, set[int]()
    while not isinstance(inside, Rematted):
        seen.add(id(inside))
        names = ["__rematted__", "__func__", "__wrapped__"]
        if isinstance(inside, functools.partial | functools.partialmethod):
            names = ["func"]
        inside = next((x for n in names if (x := getattr(inside, n, None)) is not None), None)
        if inside is None or id(inside) in seen:
            raise TypeError(
                f"stats(g): what remat() returned is needed, got {g!r}, which wraps no such "
                f"function that can be found. Keep what remat() returned, and pass that: "
                f"g = remat(f, ...), rematfn.stats(g). Of a module inside of another one, pass "
                f"the one inside."
            )
    return inside


def check() -> None:
    """Assert the invariants of every live lineage table.

    Raises:
        RuntimeError: One is broken. That is a bug in rematfn; please report it.
    """
    _C.check()


def materialize(x: torch.Tensor) -> torch.Tensor:
    """Make the bytes of ``x`` resident, and return it.

    Operators find an evicted tensor's bytes by themselves. What goes past the dispatcher
    (``x.data_ptr()``, pickling, ``torch.save``) does not, and needs this first.

    Args:
        x: Any tensor. One that no level made, or that is resident, is returned as it is.

    Returns:
        ``x``, the same object.

    Raises:
        BudgetError: The replays do not fit in the budget.
    """
    _C.materialize(x)
    return x
