# SPDX-License-Identifier: Apache-2.0
"""Statistics of a transformed function, and a look at what is alive."""

from __future__ import annotations

from typing import TypedDict, cast

import torch

from . import _C
from ._budget import format_bytes


class Record(TypedDict):
    """The fields of :class:`Stats`, read at one moment."""

    budget: int | None
    peak_bytes: int
    resident_bytes: int
    operators: int
    evictions: int
    replays: int
    replayed_cost: float
    replayed_flops: float
    min_budget: int


class Stats:
    """What the last call of a transformed function did, its backward included.

    The record is live: while a backward runs, or a graph keeps level tensors, the figures go on.

    Attributes:
        budget: Bytes the call may hold resident, or None.
        peak_bytes: The most bytes that were resident at once, those a running operator was about
            to allocate included.
        resident_bytes: Bytes resident now.
        operators: Operators the program ran, each counted once.
        evictions: How often a version's bytes were given up.
        replays: Recorded operations run again.
        replayed_cost: Their cost, as a fraction of the program's own.
        replayed_flops: Their FLOPs, as a fraction of the program's own. Matrix products,
            convolutions and attention have some.
        min_budget: The largest need of a single operator, in bytes: no smaller budget can do, and
            with one as small replays may need more. Known only for calls with a budget.
    """

    budget: int | None
    peak_bytes: int
    resident_bytes: int
    operators: int
    evictions: int
    replays: int
    replayed_cost: float
    replayed_flops: float
    min_budget: int

    def __init__(self, source: _C.Level | Record | None = None) -> None:
        self._source = source

    def _read(self) -> Record:
        if isinstance(self._source, dict):
            return self._source
        if self._source is None:
            return Record(
                budget=None,
                peak_bytes=0,
                resident_bytes=0,
                operators=0,
                evictions=0,
                replays=0,
                replayed_cost=0.0,
                replayed_flops=0.0,
                min_budget=0,
            )
        return cast("Record", self._source.read())

    def __getattr__(self, name: str) -> object:
        if name.startswith("_") or name not in Record.__annotations__:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return self._read()[name]  # type: ignore[literal-required]

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *Record.__annotations__]

    def __repr__(self) -> str:
        return f"Stats({', '.join(f'{k}={v}' for k, v in self._read().items())})"

    def __str__(self) -> str:
        r = self._read()
        budget = "none" if r["budget"] is None else format_bytes(r["budget"])
        return (
            f"budget     {budget}\n"
            f"peak       {format_bytes(r['peak_bytes'])}\n"
            f"resident   {format_bytes(r['resident_bytes'])}\n"
            f"operators  {r['operators']}\n"
            f"evictions  {r['evictions']}\n"
            f"replays    {r['replays']} ({r['replayed_cost']:.1%} of the cost)\n"
            f"min budget {format_bytes(r['min_budget'])}"
        )


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
