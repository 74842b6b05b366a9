# SPDX-License-Identifier: Apache-2.0
"""What budgets would cost: one measured call, and simulations of it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from .. import _C
from .._inspection.tables import Table
from .._transform.budget import BudgetLike, format_bytes, parse_budget
from .._transform.deferred import refuse_deferred
from .._transform.level import LevelOptions, call
from .._transform.remat import DEFAULT_POLICY, policy_of
from .._transform.rematted import name_of, rematted_of
from .._transform.tiers import TierLike, tiers_of
from ..policies import Guided, Policy
from ..policies._custom import Scorer
from ..policies._planned import Planned
from .drawing import draw_costs
from .trace import Trace, on_shapes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BUDGETS = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1)
_SEARCH = 100_000  # operators, for each budget: a tenth of a second or two
_STEPS = 8  # of a bisection over budgets
_DEFAULT: Policy = Guided(search=_SEARCH)
_Cell: TypeAlias = tuple[int, Policy, "_C.Link | None"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cost:
    """What a budget is foretold to cost.

    Attributes:
        budget: Bytes.
        fraction: Of the unconstrained peak.
        policy: By which policy, as it prints; ``"offload"`` in front: values may be moved as well.
        time: Of a call, in multiples of one without a budget; infinite if the program does not fit.
    """

    budget: int
    fraction: float
    policy: str
    time: float


class Profile:
    """What one call of a function needs, and what budgets would cost; :func:`profile` returns it.

    Attributes:
        name: What was called.
        trace: The record of the call.
        peak_bytes: The unconstrained peak.
        min_budget: The smallest budget, in bytes, that the default policy is foretold to fit in.
        seconds: What the operators took together; on fake tensors, what the cost model gives them.
        is_measured: Whether they were timed.
        costs: For each budget and policy, what it is foretold to cost.
    """

    def __init__(
        self,
        name: str,
        trace: Trace,
        budgets: Sequence[int],
        policies: Sequence[Policy],
        link: _C.Link | None,
        is_measured: bool,
        progress: bool,
    ) -> None:
        self.name = name
        self.trace = trace
        self.peak_bytes = trace.peak_bytes
        self.seconds = trace.cost
        self.is_measured = is_measured
        self._link = link
        program = _C.Program(trace._core)
        least = self._operators_need()
        self.min_budget = min(
            program.enough_for(DEFAULT_POLICY.core(), least, math.inf), self.peak_bytes
        )
        asked = [
            (budget, policy, moves)
            for policy in policies
            for moves in ([None] if link is None else [None, link])
            for budget in budgets
        ]
        self.costs: list[Cost] = [self._cost(*cell) for cell in _shown(asked, progress)]

    def _operators_need(self) -> int:
        """Return what the largest operator needs at once."""
        values = self.trace._core.values()
        most = 1
        for kind, data in self.trace._core.events():
            if kind == "call":
                read = sum(values[v][0] for v in {v for v, _ in data[8]} if values[v][1])
                most = max(most, read + data[3] + data[4])
        return most

    def _cost(self, budget: int, policy: Policy, link: _C.Link | None = None) -> Cost:
        time = 1 + self._overhead(budget, policy, link) / (self.seconds or 1.0)
        return Cost(
            budget=budget,
            fraction=budget / max(self.peak_bytes, 1),
            policy=("offload, " if link is not None else "") + _name(policy),
            time=time,
        )

    def _overhead(self, budget: int, policy: Policy, link: _C.Link | None) -> float:
        """Return the seconds of replays and of waiting; infinite if it does not fit."""
        if isinstance(policy, Planned):
            program = _C.Program(self.trace._core)
            if link is not None and isinstance(policy, Guided):
                policy.begin_moving(program, budget, link)
            else:
                policy.begin(program, budget)
            program.follow()
            return program.overhead()
        found = _C.simulate(self.trace._core, budget, policy.core(), None, "", 0)
        return found["replayed_cost"] * self.seconds if isinstance(found, dict) else math.inf

    def predict(self, budget: BudgetLike, policy: Policy | Scorer = _DEFAULT) -> Cost:
        """Return what a budget is foretold to cost; a fraction is one of the unconstrained peak."""
        parsed = parse_budget(budget)
        nbytes = parsed.bytes
        if parsed.fraction is not None:
            nbytes = max(1, int(parsed.fraction * self.peak_bytes))
        if nbytes is None:
            nbytes = self.peak_bytes
        return self._cost(nbytes, policy_of(policy, "predict(budget, policy)"), self._link)

    def budget_for(self, time: float) -> int:
        """Return the least budget at which a call is foretold to take at most ``time`` of its time.

        Args:
            time: In multiples of a call without a budget, such as 1.1.

        Returns:
            Bytes, found by bisection between :attr:`min_budget` and the peak.
        """
        if not time >= 1:
            raise ValueError(
                f"budget_for({time!r}): it must be at least 1, a call without replays."
            )
        low, high = self.min_budget, self.peak_bytes
        if self.predict(low).time <= time:
            return low
        for _ in range(_STEPS):
            middle = (low + high) // 2
            if self.predict(middle).time <= time:
                high = middle
            else:
                low = middle
        return high

    def table(self) -> Table:
        """Return the costs as a table, a column for each policy."""
        policies = list(dict.fromkeys(cost.policy for cost in self.costs))
        budgets = list(dict.fromkeys(cost.budget for cost in self.costs))
        times = {(cost.budget, cost.policy): cost.time for cost in self.costs}
        return Table(
            "Foretold time of a call",
            "in multiples of one without a budget",
            ("budget", "of the peak", *policies),
            [
                (
                    format_bytes(budget),
                    f"{budget / max(self.peak_bytes, 1):.2f}",
                    *(_ratio(times[budget, policy]) for policy in policies),
                )
                for budget in budgets
            ],
        )

    def figure(self) -> Figure:
        """Return the curve of time over budgets, one for each policy.

        Raises:
            ModuleNotFoundError: matplotlib is not installed.
        """
        curves: dict[str, list[tuple[int, float]]] = {}
        for cost in sorted(self.costs, key=lambda c: c.budget):
            fitting = curves.setdefault(cost.policy, [])
            if cost.time < math.inf:
                fitting.append((cost.budget, cost.time))
        return draw_costs(self.name, curves, self.min_budget, self.peak_bytes)

    def __str__(self) -> str:
        how = "measured" if self.is_measured else "by the cost model"
        return (
            f"{self.name}\n"
            f"peak       {format_bytes(self.peak_bytes)} without a budget\n"
            f"min budget {format_bytes(self.min_budget)}, as foretold\n"
            f"operators  {self.trace.operators}, {self.seconds:.3g} s ({how})\n\n"
            f"{self.table().text()}"
        )

    def _repr_html_(self) -> str:
        from html import escape

        return f"<pre>{escape(str(self).partition(chr(10) * 2)[0])}</pre>{self.table().html()}"


def profile(
    f: Callable[..., Any],
    *args: Any,
    kwargs: Mapping[str, Any] | None = None,
    budgets: Sequence[BudgetLike] = BUDGETS,
    policies: Sequence[Policy | Scorer] = (_DEFAULT,),
    offload: bool | TierLike = False,
    cap: BudgetLike = None,
    progress: bool = False,
) -> Profile:
    """Run ``f(*args)`` once, time its operators, and foretell what budgets would cost.

    The time of a call within a budget is foretold by the engine itself, run on the sizes and the
    times of that one call. A backward pass is in it if it runs inside of ``f``: profile a training
    step, or a gradient function such as ``torch.func.grad(loss)``.

    On fake tensors, or under a ``FakeTensorMode``, nothing is computed, for what fits nowhere;
    times are those of the cost model then.

    Args:
        f: A function of tensors, or what :func:`remat` returned, whose budget is not used then.
        *args: Its arguments. They are written to, and random numbers are drawn, as in any call.
        kwargs: The same, by name.
        budgets: Bytes or fractions of the peak, as for :func:`remat`.
        policies: By which policies.
        offload: A tier, as for :func:`remat`: what a call costs whose values may be moved there is
            foretold as well, by its measured bandwidths.
        cap: The most bytes that this one call may hold, for a program that does not fit otherwise.
        progress: Show a progress bar while simulations run, where `tqdm` is installed.

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
    try:
        f = rematted_of(f, "profile")[0]._f
    except TypeError:
        if not callable(f):
            raise TypeError(f"{name}: a function is needed, got {f!r}.") from None
    refuse_deferred(f, name)
    checked = [policy_of(policy, f"{name}, policies=...") for policy in policies]
    limits = [parse_budget(budget) for budget in budgets]
    given = dict(kwargs or {})
    is_measured = not on_shapes((args, given))
    if is_measured:
        trace = _timed(f, args, given, cap)
    else:
        from .shapes import trace_on_shapes

        trace = Trace(trace_on_shapes(f, args, given, backward=False))
    nbytes = [
        trace.peak_bytes
        if limit == parse_budget(None)
        else limit.bytes or max(1, int((limit.fraction or 1) * trace.peak_bytes))
        for limit in limits
    ]
    link = tiers_of(offload, f"{name}, offload=...").link(drops=True) if offload else None
    return Profile(name_of(f), trace, nbytes, checked, link, is_measured, progress)


def _timed(
    f: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], cap: BudgetLike
) -> Trace:
    limit = parse_budget(cap)
    if limit.fraction is not None or limit.shared is not None:
        raise TypeError(f'profile(f, cap={cap!r}): bytes are needed, such as "8GiB".')
    if _C.stack_depth() > 0:
        raise RuntimeError("profile(f): it cannot run inside of another level; call it outside.")
    policy = DEFAULT_POLICY
    options = LevelOptions(
        budget=limit.bytes,
        shared=None,
        policy=policy.core(),
        discards=False,
        timed=True,
        verify=False,
        name="profile",
        record=True,
        unit=limit.unit,
    )
    levels: list[_C.Level] = []
    call(f, args, kwargs, options, levels.append)
    trace = levels[0].report().take_trace()
    if trace is None:
        raise RuntimeError("profile(f): the call has more operators than are written down.")
    return Trace(trace)


def _shown(asked: list[_Cell], progress: bool) -> Iterable[_Cell]:
    if not progress:
        return asked
    try:
        from tqdm import tqdm
    except ModuleNotFoundError:
        return asked
    shown: Iterable[_Cell] = tqdm(asked, desc="simulating", unit="budget", leave=False)
    return shown


def _name(policy: Policy) -> str:
    return "Guided()" if policy == _DEFAULT else repr(policy)


def _ratio(time: float) -> str:
    return "does not fit" if math.isinf(time) else f"{time:.2f}"
