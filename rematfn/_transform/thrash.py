# SPDX-License-Identifier: Apache-2.0
"""Calls that replay more than the limit that was set.

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
comes then, and not while the call runs.
"""

from __future__ import annotations

import warnings

from .. import _C
from ..errors import BudgetError, ThrashingWarning
from ..policies import Custom
from ..policies._planned import Guided, Planned
from .budget import format_bytes
from .history import History
from .options import Options


def tell_of_thrashing(
    call: str,
    options: Options,
    history: History,
    replayed: float,
    budget: int,
    program: _C.Program | None,
    *,
    done: bool = False,
) -> None:
    """Raise; or, if it is done or nobody has asked, warn once.

    Args:
        call: The transform as the user wrote it, and which call of it.
        options: What was asked for.
        history: What is known of the function.
        replayed: What it replays, in multiples of the program's cost.
        budget: In bytes.
        program: What was recorded, if it was.
        done: Whether nothing can be refused any more.

    Raises:
        BudgetError: The user has set the limit, and it is not done.
    """
    is_default = options.most_replays is None
    if (done or is_default) and history.has_warned:
        return
    message = (
        f"{call} replays {replayed:.3g} times the program's cost within {format_bytes(budget)}, "
        f"most_replays allows {options.limit:g} times{' by default' if is_default else ''}."
        f"{_advice(options, budget, program)}"
    )
    if not (done or is_default):
        raise BudgetError(message)
    history.has_warned = True
    warnings.warn(message, ThrashingWarning, stacklevel=5)


def _advice(options: Options, budget: int, program: _C.Program | None) -> str:
    policy = options.policy
    first = policy.first if isinstance(policy, Planned) else policy
    allow = " Or give most_replays a larger number."
    unsure = isinstance(policy, Planned) and not isinstance(policy, Guided)
    if program is None or unsure or isinstance(first, Custom):
        return " Raise the budget." + allow
    # A plan replays no more than the policy that it begins with.
    link = options.tiers.link(options.drops)
    enough = program.enough_for(first.core(), budget, options.limit, link)
    if format_bytes(enough) == format_bytes(budget):  # times have decided what went, and how
        return " By its record it need not; later calls are likely to replay less." + allow
    text = options.budget.in_its_terms(enough, budget)
    return f" Raise the budget to about {text}, in which it does not." + allow
