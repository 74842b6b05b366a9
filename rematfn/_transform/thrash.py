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

import dataclasses
import warnings
from typing import Final

from .. import _C
from ..errors import BudgetError, ThrashingWarning
from ..policies import Custom, Policy
from ..policies._planned import Guided, Planned
from .budget import Limit, format_bytes
from .history import History

DEFAULT_MOST: Final = 4.0


def parse_most_replays(given: object, name: str) -> float | None:
    """Return the option ``most_replays`` of the transform ``name``."""
    if given is None:
        return None
    if isinstance(given, bool) or not isinstance(given, int | float):
        raise TypeError(
            f"{name}(f, most_replays=...): a number is needed, in multiples of the program's cost, "
            f"such as 4.0, got {given!r}."
        )
    if not given > 0:
        raise ValueError(f"{name}(f, most_replays=...): it must be above 0, got {given!r}.")
    return float(given)


@dataclasses.dataclass(frozen=True)
class Thrash:
    """A call that replays more than it may.

    Attributes:
        call: The transform as the user wrote it.
        replayed: What it replays, in multiples of the program's cost.
        budget: In bytes.
        most: The limit.
        is_default: Whether the user has set none.
        fraction: The budget as it was given, if that was a fraction.
        policy: The policy of the function.
        link: Over which values may be moved.
        history: What is known of the function.
    """

    call: str
    replayed: float
    budget: int
    most: float
    is_default: bool
    fraction: float | None
    policy: Policy
    link: _C.Link | None
    history: History

    def report(self, what: str, program: _C.Program | None, *, done: bool = False) -> None:
        """Raise; or, if it is ``done`` or nobody has asked, warn once.

        ``program`` is what was recorded, if it was.

        Raises:
            BudgetError: The user has set the limit, and it is not done.
        """
        warns = done or self.is_default
        if warns and self.history.has_warned:
            return
        message = (
            f"{self.call}: {what} replays {self.replayed:.3g} times the program's cost within "
            f"{format_bytes(self.budget)}, most_replays allows {self.most:g} times"
            f"{' by default' if self.is_default else ''}."
            f"{self._advice(program)}"
        )
        if not warns:
            raise BudgetError(message)
        self.history.has_warned = True
        warnings.warn(message, ThrashingWarning, stacklevel=5)

    def _advice(self, program: _C.Program | None) -> str:
        first = self.policy.first if isinstance(self.policy, Planned) else self.policy
        allow = " Or give most_replays a larger number."
        unsure = isinstance(self.policy, Planned) and not isinstance(self.policy, Guided)
        if program is None or unsure or isinstance(first, Custom):
            return " Raise the budget." + allow
        # A plan replays no more than the policy that it begins with.
        enough = program.enough_for(first.core(), self.budget, self.most, self.link)
        text = format_bytes(enough)
        if text == format_bytes(self.budget):  # times have decided what went, and how
            return " By its record it need not; later calls are likely to replay less." + allow
        text = Limit(fraction=self.fraction).in_its_terms(enough, self.budget)
        return f" Raise the budget to about {text}, in which it does not." + allow
