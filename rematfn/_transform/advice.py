# SPDX-License-Identifier: Apache-2.0
"""What a function is told whose calls cost more than they need to, gain nothing, or cannot be."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any, NoReturn

from .. import _C
from .._interop.pytrees import tensors_of
from ..errors import BudgetError, DeferredWarning, FloorWarning, NotGuidedWarning
from ..policies._planned import Planned
from .budget import Limit, format_bytes
from .deferred import module_held_by
from .history import History, Ran

_LOST = 3  # guided calls in a row
_NEAR = 0.9  # of the budget
_COSTLY = 1.0  # in multiples of the program's cost


def advise(call: str, ran: Ran, history: History) -> None:
    """Warn, once of each, if a call that is over says that something is to be done about all."""
    if not ran.to_advise or not ran.report.is_over():
        return
    ran.to_advise = False
    if ran.forecast.kind == "guided":
        history.lost_in_a_row = history.lost_in_a_row + 1 if ran.report.guide_lost else 0
    if history.lost_in_a_row >= _LOST and NotGuidedWarning not in history.advised:
        history.advised.add(NotGuidedWarning)
        warnings.warn(
            f"{call}: {_LOST} calls in a row left the record that they were to follow, the last at "
            f"`{ran.report.lost_at}`: which operators run, or how large they are, differs from "
            f"call to call. Such calls choose what to evict as they go, and each second one is "
            f"recorded in vain. If that is as it must be, policy=rematfn.policies.ON() records "
            f"nothing.",
            NotGuidedWarning,
            stacklevel=4,
        )
    figures = ran.read()
    budget, needed = figures["budget"], figures["min_budget"]
    if not isinstance(budget, int) or not isinstance(needed, int):
        return
    if needed <= _NEAR * budget or figures["replayed_cost"] <= _COSTLY:
        return
    if FloorWarning in history.advised:
        return
    history.advised.add(FloorWarning)
    warnings.warn(
        f"{call}: `{ran.report.neediest}` needs {format_bytes(needed)} of the budget at once, of "
        f"{format_bytes(budget)}, and what is replayed for it costs "
        f"{figures['replayed_cost']:.2g} times the program. Raise the budget, or have that "
        f"operator work in smaller pieces; rematfn.explain(g) says at which line it is called, "
        f"after a call inside of `with rematfn.where():`.",
        FloorWarning,
        stacklevel=4,
    )


def advise_of_deferred(
    call: str, instead: str, result: Any, given: Sequence[Any], ran: Ran
) -> None:
    """Warn if a call has returned what is going to compute, and not what it was ``given``."""
    if any(result is it for it in given):
        return
    found = module_held_by(result, given)
    if found is not None:
        holder, module = found
        name = getattr(holder, "__qualname__", type(holder).__qualname__)
        what = (
            f"it has returned {name}, which holds {type(module).__name__}; what that computes "
            "later, it computes outside of the budget"
        )
    elif not ran.read()["operators"] and not tensors_of(result):
        what = (
            f"the call has run no operator, and returned {type(result).__qualname__}; the budget "
            "has had no effect"
        )
    else:
        return
    text = f"{call}: {what}. Transform a function that computes all: for example, {instead}."
    warnings.warn(text, DeferredWarning, stacklevel=5)


def refuse(
    call: str,
    program: _C.Program,
    policy: Planned,
    limit: Limit,
    budget: int,
    link: _C.Link | None,
) -> NoReturn:
    """Raise before a call begins that would be refused when it has changed what it updates.

    ``budget``: what the ``limit`` comes to, in bytes.

    Raises:
        BudgetError: Always.
    """
    enough = program.enough_for(policy.first.core(), budget, math.inf, link)
    raise BudgetError(
        f"{call}: a call like this one was recorded, and does not fit in {format_bytes(budget)}. "
        "It updates tensors of the caller's (parameters, buffers, states), so it is refused before "
        "it begins; nothing has been changed. Raise the budget to "
        f"{limit.in_its_terms(enough, budget)}, in which the whole call fits."
    )
