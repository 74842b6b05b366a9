# SPDX-License-Identifier: Apache-2.0
"""Programs that were recorded, and the plans that calls of them follow."""

import atexit
import copy
import itertools
import math
import os
import threading
import warnings
import weakref

from .. import _C
from ..policies._planned import Planned

# Note [A plan for another size]
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
# A call that needs a quarter more than the recorded one has less of its peak in the same budget. A
# plan that is good at half of the peak may be worse than none at 0.4. So a call that differs has a
# plan for the record in as much of the record's peak. Calls whose shares are the same power of
# `_STEP` have one search, for the least of these shares. It leaves local search out, so that it
# takes some thirty simulations, and begins with what was found for the next share. Records of the
# same program have one set of such searches, so that calls of most sizes share a few.
_STEP = 1.06

_MOST_OPERATORS = 1 << 20  # of all records; an operator takes about 300 bytes

# See Note [A search needs nothing of the interpreter]. C's own atexit comes after Python has gone;
# what is registered early, on import, runs after the user's handlers, which may call functions.
atexit.register(_C.end_searches)

# No code of the user's runs under it. Whoever forks holds it, so that a child finds it free.
lock = threading.RLock()
os.register_at_fork(before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release)


class RecordedProgram:
    """A program that a call has run, and a plan that later calls of it follow."""

    def __init__(
        self,
        trace: _C.Trace,
        held_bytes: int,
        peak_bytes: int,
        makes_state: bool,
        like: "RecordedProgram | None" = None,
    ) -> None:
        self.held_bytes = held_bytes  # by the call, at the most
        self.peak_bytes = peak_bytes  # the same without a budget
        self.makes_state = makes_state  # See Note [The first step makes the state]
        self.operators = trace.operators
        self.program: _C.Program | None = None  # with or without a plan
        self._for_others: dict[int, _C.Program] = {}  # by the steps that their budgets are
        try:
            trace.check()
            self.program = _C.Program(trace)
        except ValueError as error:
            warnings.warn(f"{error}; not guided. Please report it.", stacklevel=3)
        # Whose plans calls that differ follow: the first record of the same program.
        self._first = self
        first = None if like is None else like._first
        if first is not None and first.program is not None and self.program is not None:
            self._first = first if first.program.note_same(self.program) else self
        self._last_use = next(_uses)
        _programs.add(self)
        # What was used longest ago loses its record, if they are too much.
        left = _MOST_OPERATORS
        for known in sorted(_programs, key=lambda known: known._last_use, reverse=True):
            if (left := left - known.operators) < 0:
                known.program = None
                known._for_others.clear()
                known.operators = 0

    @property
    def planned(self) -> _C.Program | None:
        """The program, if there is a plan for it."""
        program = self.program
        return program if program is not None and program.overhead() < math.inf else None

    def for_another(
        self, policy: Planned, budget: int, peak_bytes: int, link: _C.Link | None = None
    ) -> _C.Program | None:
        """Return the program with a plan for a call that differs, and has another peak, if any.

        See Note [A plan for another size].
        """
        first = self._first if self._first.program is not None else self
        program = first.program
        if program is None:
            return None
        within = first._within(budget, peak_bytes)
        if budget <= within < budget * _STEP and program.overhead() < math.inf:
            return program
        step = int(math.log(max(within, 1), _STEP))
        found = first._for_others.get(step) or copy.copy(program)
        first._for_others[step] = found
        if not found.budget or within < found.budget:
            like = first._planned_for(within)
            policy.begin(found, within, like=like, link=link, local=False)
        return found

    @property
    def suits_others(self) -> bool:
        """Whether the last call that differed ran the same operators."""
        first = self._first.program
        return first is not None and first.others_run_alike

    def start_for(self, budget: int) -> _C.Program | None:
        """Return the program with a plan for about as much of its peak, if there is one."""
        return self._first._planned_for(self._first._within(budget, self.peak_bytes))

    def _within(self, budget: int, peak_bytes: int) -> int:
        """Return as much of the own peak as a budget is of another."""
        return int(min(budget / max(peak_bytes, 1), 1) * self.peak_bytes)

    def _planned_for(self, budget: int) -> _C.Program | None:
        """Return the program with its best plan for no more than a budget, or the next higher.

        None where nothing has to go: a plan for less evicts all the same.
        """
        if budget >= self.peak_bytes:
            return None
        known = [self.program, *self._for_others.values()]
        planned = [one for one in known if one is not None and one.overhead() < math.inf]
        fits = [program for program in planned if program.budget <= budget]
        if fits:
            return min(fits, key=lambda program: program.overhead())
        return min(planned, key=lambda program: program.budget, default=None)

    def note_use(self) -> None:
        """Note that a call is about to follow it; those that none follows are forgotten first."""
        self._first._last_use = self._last_use = next(_uses)


# What all functions remember together.
_programs: weakref.WeakSet[RecordedProgram] = weakref.WeakSet()
_uses = itertools.count()


def finish_searches() -> None:
    """Wait until all searches that have begun are over: for tests and measurements."""
    with lock:
        begun = list(_programs)
    for known in begun:
        for program in (known.program, *known._for_others.values()):
            if program is not None:
                program.finish()
