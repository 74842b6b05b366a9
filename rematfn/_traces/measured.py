# SPDX-License-Identifier: Apache-2.0
"""Calls of a program that evicts nothing, timed operator by operator."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from .. import _C
from .._transform.budget import BYTES, BudgetLike, parse_budget
from .trace import Trace, recorded


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measured:
    """Calls of a program that evicted nothing.

    Attributes:
        trace: The program, whose operators cost what they took, or what the cost model gives them.
        seconds: A call without a level.
        within: A call within a level.
    """

    trace: Trace
    seconds: float
    within: float


def measured(
    f: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    cap: BudgetLike,
    calls: int,
) -> Measured:
    """Call it once, or as often as :func:`rematfn.profile` says."""
    if isinstance(calls, bool) or not isinstance(calls, int) or calls < 1:
        raise ValueError(f"profile(f, calls={calls!r}): a whole number above 0 is needed.")
    limit = parse_budget(cap, "profile(f, cap={})", BYTES)
    if limit.fraction is not None or limit.shared is not None:
        raise TypeError(f'profile(f, cap={cap!r}): bytes are needed, such as "8GiB".')

    def run_recorded(budget: int | None) -> _C.Trace:
        return recorded(f, args, kwargs, "profile", budget=budget, unit=limit.unit, timed=True)

    once = Trace(run_recorded(limit.bytes))
    if calls == 1:
        return Measured(trace=once, seconds=once.cost, within=once.cost)
    plain = 0.0
    if limit.bytes is None:
        plain = statistics.median(_seconds_of(lambda: f(*args, **kwargs), calls))
    traces: list[_C.Trace] = []
    bound = limit.bytes or once.peak_bytes
    within = _seconds_of(lambda: traces.append(run_recorded(bound)), calls)
    # A call that took another way is another program.
    last = traces[-1]
    alike = [t.costs() for t in traces[1:] if t.operators == last.operators]
    costs = [
        statistics.median(taken for taken, _ in operator) for operator in zip(*alike, strict=True)
    ]
    trace = Trace(last.with_costs(costs))
    if limit.bytes is not None:  # its calls replay: what they take is not what a program takes
        return Measured(trace=trace, seconds=trace.cost, within=trace.cost)
    return Measured(trace=trace, seconds=plain, within=statistics.median(within))


def _seconds_of(run: Callable[[], object], calls: int) -> list[float]:
    """Return what so many calls take, after one that is not timed."""
    run()
    taken = []
    for _ in range(calls):
        _synchronize()
        start = time.perf_counter()
        run()
        _synchronize()
        taken.append(time.perf_counter() - start)
    return taken


def _synchronize() -> None:
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
