# SPDX-License-Identifier: Apache-2.0
"""What a function is told whose calls cost more than they need to, gain nothing, or cannot be.

Note [What the replays of a call are compared with]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Replays are compared with the cost of the whole program. While a first call runs, that is not known:
what has run so far is only a part, and a call that replays its forward ten times over may still be
cheap when its backward, which costs twice as much and reads what is there, is counted. To compare
with the part would be to speak too early. So:
  - A call that follows a plan is judged before it begins, by what its plan replays in the
    simulator, which counts as the engine does. Nothing has run then, and no level is there.
  - A call without a plan is judged when it is over: as it returns, if no backward is to come, else
    when the function is called again. What is done cannot be refused, so then it is a warning.
  - Before that it is stopped by the core, if it is past the limit by any estimate of what it will
    cost: Note [A call that thrashes is stopped].
A plan that moves values is not judged before, since what it costs is waiting, too.

Where the user has set no limit, the limit is DEFAULT_MOST, and all that is said is a warning, once
for each function. Its figure must be right, and the record of a call that is over tells it: so it
comes then, and not while the call runs. A call may never be over, so it is stopped at ENDLESS.
"""

import functools
import math
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn, Protocol

import torch

from .. import _C
from .._C import format_bytes
from .._interop.pytrees import tensors_of
from ..errors import (
    BudgetError,
    DeferredWarning,
    FloorWarning,
    NotGuidedWarning,
    ThrashingWarning,
)
from ..policies import Custom
from ..policies._planned import Guided, Planned
from .budget import Limit
from .history import MOST_LOST, Call, History
from .options import Options

_NEAR = 0.9  # of the budget
_COSTLY = 1.0  # in multiples of the program's cost


class Told(Protocol):
    """A transformed function: how messages call it, what was asked for, and what is known of it."""

    _described: str
    _options: Options
    _history: History


def look_back(g: Told, ran: Call, *, of_the_last: bool) -> None:
    """Say so if a call that is over, its backward included, has cost more than it need have.

    ``of_the_last``: whether another one is about to begin.

    Raises:
        BudgetError: It has replayed more than the user allows, and has just returned.
    """
    if not ran.to_judge or not ran.report.is_over():
        return
    ran.to_judge = False
    options, figures = g._options, ran.read()
    replayed = figures["replayed_cost"]
    follows = ran.kind == "guided" and ran.as_recorded and not ran.report.guide_lost
    by_plan = follows and not options.tiers  # it was judged then
    if options.limit < replayed < math.inf and not by_plan and not ran.report.stopped:
        program = g._history.record_of(ran, guided=isinstance(options.policy, Planned))
        which = ": the last call" if of_the_last else ": the call"
        refused = not (of_the_last or options.most_replays is None)  # what is done cannot be
        _tell_of_thrashing(g, ran, which, replayed, figures["budget"], program, refused=refused)
    _advise(g, ran, figures)


def judge_plan(g: Told, ran: Call, program: _C.Program, budget: int) -> None:
    """Report replays beyond `most_replays`; where that is an error, once the search is over."""
    most, cost, which = g._options.stopped_at, program.cost or math.inf, ": the call, by its plan,"
    if most < program.overhead() / cost < math.inf:
        program.finish()
    replayed = program.overhead() / cost
    if g._options.limit < replayed < math.inf and program.is_settled():
        _tell_of_thrashing(g, ran, which, replayed, budget, program, refused=replayed > most)


def _tell_of_thrashing(
    g: Told,
    ran: Call,
    which: str,
    replayed: float,
    budget: int,
    program: _C.Program | None,
    *,
    refused: bool,
) -> None:
    """Raise, or warn once."""
    is_default = g._options.most_replays is None
    if not refused and ThrashingWarning in g._history.warned_of:
        return
    allowed = f"most_replays allows {g._options.limit:g} times{' by default' if is_default else ''}"
    if refused and is_default:
        allowed = f"and is stopped at {g._options.stopped_at:g} times"
    message = (
        f"{which} replays {replayed:.3g} times the program's cost within {format_bytes(budget)}, "
        f"{allowed}.{_against_thrashing(g._options, ran, budget, program)}"
    )
    if refused:
        raise BudgetError(g._described + message)
    _warn_once(g, ThrashingWarning, message)


def _against_thrashing(options: Options, ran: Call, budget: int, program: _C.Program | None) -> str:
    policy = options.policy
    allow = " Or give most_replays a larger number."
    unsure = isinstance(policy, Planned) and not isinstance(policy, Guided)
    if program is None or unsure or isinstance(getattr(policy, "first", policy), Custom):
        return " Raise the budget." + allow
    # A plan replays no more than the policy that it begins with.
    link = options.tiers.link(options.drops)
    terms = options.budget.unit, ran.of_bytes
    enough, text = program.enough_for(policy.core(), budget, options.limit, link, *terms)
    if format_bytes(enough) == format_bytes(budget):  # times have decided what went, and how
        return " By its record it need not; later calls are likely to replay less." + allow
    return f" Raise the budget to about {text}, in which it does not." + allow


def _advise(g: Told, ran: Call, figures: dict[str, Any]) -> None:
    """Warn if a call that is over says that something is to be done about all."""
    history = g._history
    if ran.kind == "guided":
        history.lost_in_a_row = history.lost_in_a_row + 1 if ran.report.guide_lost else 0
    if history.lost_in_a_row >= MOST_LOST:
        # A plan that is given up is left at no operator.
        where = f", the last at `{ran.report.lost_at}`" if ran.report.lost_at else ""
        _warn_once(
            g,
            NotGuidedWarning,
            f": {MOST_LOST} calls in a row left the record that they were to follow{where}: most "
            f"of the operators that run there are in no record, or replays cost more than was "
            f"planned. Such calls choose what to evict as they go. If that is as it must be, "
            f"policy=rematfn.policies.ON() records nothing.",
        )
    budget, needed = figures["budget"], figures["min_budget"]
    if not isinstance(budget, int) or not isinstance(needed, int):
        return
    if needed <= _NEAR * budget or figures["replayed_cost"] <= _COSTLY:
        return
    _warn_once(
        g,
        FloorWarning,
        f": `{ran.report.neediest}` needs {format_bytes(needed)} of the budget at once, of "
        f"{format_bytes(budget)}, and what is replayed for it costs "
        f"{figures['replayed_cost']:.2g} times the program. Raise the budget, or have that "
        f"operator work in smaller pieces; rematfn.explain(g) says at which line it is called, "
        f"after a call inside of `with rematfn.where():`.",
    )


def look_at_result(g: Told, f: Any, result: Any, given: Sequence[Any], ran: Call) -> None:
    """Warn if a call of ``f`` has computed nothing, and returned what was not ``given`` to it."""
    options = g._options
    has_no_effect = options.budget == Limit() and not options.tiers
    given = (*given, getattr(f, "__self__", f))
    if has_no_effect or any(result is it for it in given):
        return
    if ran.read()["operators"] or tensors_of(result):
        return
    name = "module" if options.of else name_of(f).replace("<lambda>", "f")
    _warn_once(
        g,
        DeferredWarning,
        f": the call has run no operator, and returned {type(result).__qualname__}; the budget has "
        "had no effect. Transform a function that computes all: for example, "
        f"{options.name}(lambda c, x: {name}(c).log_prob(x), budget).",
    )


def refuse(g: Told, ran: Call, program: _C.Program, budget: int, link: _C.Link | None) -> NoReturn:
    """Raise before a call begins that would be refused when it has changed what it updates."""
    terms = g._options.budget.unit, ran.of_bytes
    _, text = program.enough_for(g._options.policy.core(), budget, math.inf, link, *terms)
    raise BudgetError(
        f"{g._described}: a call like this one was recorded, and does not fit in "
        f"{format_bytes(budget)}. "
        "It updates tensors of the caller's (parameters, buffers, states), so it is refused before "
        "it begins; nothing has been changed. Raise the budget to "
        f"{text}, in which the whole call fits."
    )


def name_of(f: Any) -> str:
    """Return what messages call ``f``: of a module's ``forward``, the module's class."""
    while isinstance(f, functools.partial):
        f = f.func
    name = getattr(f, "__name__", type(f).__name__)
    owner = getattr(f, "__self__", None)
    is_forward = name == "forward" and isinstance(owner, torch.nn.Module)
    return str(type(owner).__name__ if is_forward else name)


def _warn_once(g: Told, kind: type[Warning], text: str) -> None:
    """Warn at the line that has called the function, unless it was warned of that before."""
    if kind in g._history.warned_of:
        return
    g._history.warned_of.add(kind)
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_HERE):
        level, frame = level + 1, frame.f_back
    warnings.warn(g._described + text, kind, stacklevel=level)


_HERE = str(Path(__file__).parent)
