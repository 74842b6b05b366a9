# SPDX-License-Identifier: Apache-2.0
"""What budgets would cost: one measured call or a few, and simulations of them."""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from .. import _C
from .._C import format_bytes
from .._inspection.tables import new_figure, shortened, table, unit_of
from .._transform.advice import name_of
from .._transform.budget import BudgetLike, Limit, parse_budget, parse_bytes
from .._transform.deferred import refuse_deferred
from .._transform.remat import DEFAULT_POLICY
from .._transform.tiers import TierLike, tiers_of
from .._transform.transformed import without_level
from ..errors import expect
from ..policies import Guided
from .shapes import is_on_shapes, trace_on_shapes
from .trace import Trace, recorded

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BUDGETS = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1)
_SEARCH = 100_000  # operators, for each budget: a tenth of a second or two
_STEPS = 8  # of a bisection over budgets
_POLICY = Guided(search=_SEARCH)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cost:
    """What a budget is predicted to cost.

    Attributes:
        budget: Bytes.
        fraction: Of the unconstrained peak.
        time: Of a call, in multiples of one without a budget; infinite if the program does not fit.
            It may be less than 1: a level keeps its memory from call to call, see :func:`profile`.
    """

    budget: int
    fraction: float
    time: float


# Note [What a profile predicts]
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
# A call within a budget plans by what the cost model gives each operator, and takes the time that
# each operator takes. So the simulation runs on the model's costs, and the operators that it
# replays are charged what was measured. Where values may be moved, plans go by measured times too.
#
# What an operator takes depends on where its results lie. Outside of a level the allocator gives
# large blocks back to the system, which clears each page anew at its first touch: in a DenseNet's
# training step on a CPU, 600,000 page faults, a third of the time. A level keeps its pages. So the
# operators are timed in a level that evicts nothing, once its memory is warm, and a call without a
# level is timed for itself, as what the rest is a multiple of.


class Profile:
    """What one call of a function needs, and what budgets would cost; :func:`profile` returns it.

    Attributes:
        name: What was called.
        trace: The record of the call, whose operators cost what they were measured to take.
        peak_bytes: The unconstrained peak.
        result_bytes: What the call returns of what it made. That is in its budget until it returns,
            so a budget of less computes results again: gradients of a network whose parameters are
            large beside its batch.
        min_budget: The smallest budget, in bytes, that the default policy is predicted to fit in
            without thrashing: what it replays costs at most ten times the program, or two times
            that of one with very many operators.
        seconds: What a call takes without a budget; on fake tensors, what the cost model gives it.
        is_measured: Whether they were timed.
        costs: For each budget, what it is predicted to cost.
    """

    def __init__(
        self,
        name: str,
        trace: Trace,
        seconds: float,
        within: float,
        budgets: Sequence[Limit],
        link: _C.Link | None,
        is_measured: bool,
    ) -> None:
        self.name = name
        self.trace = trace
        self.peak_bytes = self.trace.peak_bytes
        self.result_bytes = self.trace._core.result_bytes
        self.seconds = seconds
        self.is_measured = is_measured
        self._within = within
        self._link = link
        costs = self.trace._core.costs()
        self._times = [taken for taken, _ in costs]
        # See Note [What a profile predicts]. What moves is compared with times.
        by_model = self.trace._core.with_costs([given or taken for taken, given in costs])
        self._planned = by_model if link is None else self.trace._core
        program = _C.Program(self._planned)
        online, peak = DEFAULT_POLICY.core(), self.peak_bytes
        whole: Any = _C.simulate(self.trace._core, max(1, peak), online, None, "", 0)
        self._least = max(1, whole["min_budget"])  # what the largest operator needs at once
        self.min_budget = min(program.enough_for(online, self._least, math.inf, link)[0], peak)
        self.costs = [self._cost_within(budget) for budget in budgets]

    def predict(self, budget: BudgetLike) -> Cost:
        """Return what a budget is predicted to cost; a fraction is of the unconstrained peak."""
        return self._cost_within(parse_budget(budget, "predict(budget={})"))

    def _cost_within(self, budget: Limit) -> Cost:
        nbytes = budget.of(self.peak_bytes) or self.peak_bytes
        overhead = self._overhead(nbytes)
        # Of what takes no time by the model, a call that fits takes as long as without a budget.
        time = (self._within + overhead) / self.seconds if self.seconds else 1.0 + overhead
        fraction = nbytes / max(self.peak_bytes, 1)
        return Cost(budget=nbytes, fraction=fraction, time=time)

    def _overhead(self, budget: int) -> float:
        """Return the seconds of replays and of waiting; infinite if it does not fit."""
        if budget < self._least:
            return math.inf
        plan = _C.Program(self._planned)
        _POLICY.begin(plan, budget, link=self._link)
        plan.finish()
        overhead = plan.overhead()
        if self._link is not None or overhead == math.inf:
            return overhead
        found: Any = _C.simulate(self._planned, budget, _POLICY.core(), plan, "", 0)
        replayed: list[int] = found["replayed_calls"]
        return sum(self._times[call] for call in replayed)

    def budget_for(self, time: float) -> int:
        """Return the least budget in which a call would take at most ``time`` of its time.

        Args:
            time: In multiples of a call without a budget, such as 1.1.

        Returns:
            Bytes, found by bisection between :attr:`min_budget` and the peak.

        Raises:
            ValueError: A call is predicted to take longer even where nothing is evicted.
        """
        is_number = isinstance(time, int | float)
        expect(is_number, "budget_for(time)", "a multiple of a call's time, such as 1.1,", time)
        low, high = self.min_budget, self.peak_bytes
        least = self.predict(high).time
        if not time >= least:
            raise ValueError(
                f"budget_for({time!r}): a call that evicts nothing is predicted to take "
                f"{least:.3g} of its time already. Ask for more than that."
            )
        if self.predict(low).time <= time:
            return low
        for _ in range(_STEPS):
            middle = (low + high) // 2
            if self.predict(middle).time <= time:
                high = middle
            else:
                low = middle
        return high

    def figure(self) -> Figure:
        """Return the curve of time over budgets.

        Raises:
            ModuleNotFoundError: matplotlib is not installed.
        """
        figure = new_figure(7.5, 4.6)
        axes = figure.add_subplot()
        unit, size = unit_of(self.peak_bytes)
        fitting = sorted((c.budget / size, c.time) for c in self.costs if c.time < math.inf)
        axes.plot([budget for budget, _ in fitting], [time for _, time in fitting], marker="o")
        axes.axvline(self.min_budget / size, color="#888888", ls=":", label="smallest budget")
        axes.axvline(self.peak_bytes / size, color="#888888", label="peak without one")
        axes.set_title(shortened(f"{self.name}: predicted time within budgets", 80), fontsize=10)
        axes.set_xlabel(f"budget, {unit}")
        axes.set_ylabel("time, in multiples of a call without a budget")
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=min(0.95, axes.get_ylim()[0]))
        axes.grid(color="#dddddd", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=8)
        return figure

    def __str__(self) -> str:
        how = "measured" if self.is_measured else "by the cost model"
        costs = table(
            "Predicted time of a call",
            "in multiples of one without a budget",
            ("budget", "of the peak", "time"),
            [
                (
                    format_bytes(cost.budget),
                    f"{cost.fraction:.2f}",
                    f"{cost.time:.2f}" if cost.time < math.inf else "does not fit",
                )
                for cost in self.costs
            ],
        )
        return (
            f"{self.name}\n"
            f"peak       {format_bytes(self.peak_bytes)} without a budget\n"
            f"results    {format_bytes(self.result_bytes)}, in a budget until the call returns\n"
            f"min budget {format_bytes(self.min_budget)}, as predicted: with less it thrashes, "
            f"or does not fit\n"
            f"time       {self.seconds:.3g} s ({how}), {self.trace.operators} operators\n\n"
            f"{costs}"
        )

    __repr__ = __str__  # a notebook shows it


def profile(
    f: Callable[..., Any],
    *args: Any,
    kwargs: Mapping[str, Any] | None = None,
    budgets: Iterable[BudgetLike] = BUDGETS,
    offload: bool | TierLike = False,
    cap: BudgetLike = None,
    calls: int = 1,
) -> Profile:
    """Run ``f(*args)`` once, time its operators, and predict what budgets would cost.

    The time of a call within a budget is predicted by the engine itself, run on the sizes and the
    times of that one call, or the medians of several. A backward pass is in it if it runs inside
    of ``f``: profile a training step, or a gradient function such as ``torch.func.grad(loss)``.

    On fake tensors, or under a ``FakeTensorMode``, nothing is computed, for what fits nowhere;
    times are those of the cost model then.

    Args:
        f: A function of tensors, or what :func:`remat` returned, whose budget is not used then.
        *args: Its arguments. They are written to, and random numbers are drawn, as in any call.
        kwargs: The same, by name.
        budgets: Bytes or fractions of the peak, as for :func:`remat`.
        offload: A tier, as for :func:`remat`: where values may be moved, by its measured
            bandwidths.
        cap: The most bytes that this one call may hold, for a program that does not fit otherwise.
        calls: How many calls to time. 1: one call, whose operators' times are all that is known.
            More: medians of so many calls without a level and as many in a level that evicts
            nothing, once its memory is warm; ``f`` runs ``2 * calls + 3`` times in all. On a CPU
            the two differ by as much as a third, since a level keeps its memory from call to call.

    Raises:
        TypeError: ``f`` is not callable, or an option is of the wrong type.
        BudgetError: The call does not fit in ``cap``.

    Example:
        >>> import torch, rematfn
        >>> def loss(x):
        ...     return x.sin().cos().exp().sin().cos().sum()
        >>> found = rematfn.profile(torch.func.grad(loss), torch.ones(1024))
        >>> found.min_budget < found.peak_bytes
        True
        >>> found.min_budget <= found.budget_for(1.5) <= found.peak_bytes
        True
    """
    name = "profile(f)"
    expect(callable(f) and not isinstance(f, type), name, "a function", f)
    refuse_deferred(f, name)
    is_several = isinstance(budgets, Iterable) and not isinstance(budgets, str)
    expect(is_several, "profile(f, budgets=...)", "a list of budgets", budgets)
    limits = [parse_budget(budget, "profile(f, budgets=[{}])") for budget in budgets]
    given = dict(kwargs or {})
    tiers = tiers_of(offload, f"{name}, offload=...")
    link = tiers.link(True, (args, given))
    is_measured = not is_on_shapes((args, given))
    with without_level(f):
        if is_measured:
            packing = [tier for tier in tiers.open() if tier.packs]
            trace, seconds, within = _measured(f, args, given, cap, calls, packing)
        else:
            trace = Trace(trace_on_shapes(f, args, given, backward=False))
            seconds = within = trace.cost
        return Profile(name_of(f), trace, seconds, within, limits, link, is_measured)


def _measured(
    f: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    cap: BudgetLike,
    calls: int,
    packing: Sequence[_C.Tier],
) -> tuple[Trace, float, float]:
    """Call it once, or as often as :func:`rematfn.profile` says, where nothing is evicted.

    Returns:
        The program, whose operators cost what they took, and the seconds of a call without a level
        and within one.
    """
    is_number = type(calls) is int and calls >= 1
    expect(is_number, "profile(f, calls=...)", "a whole number above 0", calls, ValueError)
    limit = parse_bytes(cap, "profile(f, cap={})")

    def run_recorded(budget: int | None) -> _C.Trace:
        return recorded(
            f, args, kwargs, "profile", budget=budget, unit=limit.unit, timed=True, tiers=packing
        )

    once = Trace(run_recorded(limit.bytes))
    if calls == 1:
        return once, once.cost, once.cost
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
        return trace, trace.cost, trace.cost
    return trace, plain, statistics.median(within)


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
