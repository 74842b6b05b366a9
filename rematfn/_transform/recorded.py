# SPDX-License-Identifier: Apache-2.0
"""Programs that were recorded, and the plans that calls of them follow."""

from __future__ import annotations

import atexit
import math
import os
import threading
import warnings
import weakref
from collections import OrderedDict

from .. import _C
from ..policies._planned import Guided, Planned

_MOST_OPERATORS_IN_ALL = 1 << 20  # of all records; an operator takes about 300 bytes

# Note [A plan goes by the number of the call]
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
# A thread looks for better plans while calls run. A call that took the best one found so far would
# follow another plan on a busy machine than on an idle one, and the ranks of a job other plans than
# one another. So a call has a share of the search: the operators simulated that come before it, a
# function of its number alone. It follows the best plan of its share, though the thread may be
# further; if the thread is not as far, the call simulates the rest itself. A share grows by what a
# thread simulates in less time than a call takes, by the cost model, so mostly nothing is waited
# for. What runs much faster than the model says, as on a GPU, waits for the most that a share grows
# by: a tenth to a quarter of a second at each call till the search is over, some ten calls.
# Where values move, the search that counts begins once a few calls have shown how long operators
# take; a search beside them would make these longer. So until then there is the first share of
# another search, by the times of the first call, and no more. Calls go on by its plan until the
# search is over: it has been tried, and of what the search finds only the end is put to the test by
# the clock. A plan of a small share may thrash where the simulation says that it does not. The
# times of calls are known then, so that a share may grow with them.
_FIRST_SHARE = 30_000  # of the first guided call: about a twentieth of a second
_SHARE_PER_SECOND = 200_000  # of a call's cost; 400,000 to 900,000 are simulated in one
_MOST_OF_A_CALL = 100_000
_TIMED_BY_THEN = 8  # calls; if they are not alike enough, the search goes on without their times
_ALL = 1 << 62
_ABOUT = 1.05

# See Note [A search needs nothing of the interpreter]. C's own atexit comes after Python has gone;
# what is registered early, on import, runs after the user's handlers, which may call functions.
atexit.register(_C.end_searches)

# No code of the user's runs under it. Whoever forks holds it, so that a child finds it free.
lock = threading.RLock()
os.register_at_fork(before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release)


class RecordedProgram:
    """A program that a call has run, and a search for the plan that later calls of it follow."""

    def __init__(self, trace: _C.Trace, peak_bytes: int, makes_state: bool) -> None:
        self._trace: _C.Trace | None = trace
        self.peak_bytes = peak_bytes  # what the call held at the most
        self.makes_state = makes_state  # See Note [The first step makes the state]
        self._program: _C.Program | None = None
        self._timed_anew = False  # by the times of later calls
        self._untimed = 0  # calls
        self._waits = False  # the search, until some have been timed
        self._before: _C.Program | None = None  # which calls follow until that is searched
        self._planned = 0  # the budget that is searched for
        self._share = 0  # See Note [A plan goes by the number of the call]
        self._grows_by = 0
        self.cost = math.inf  # of the program, in seconds, once that is known
        self.operators = trace.operators
        _remember(self)

    def plan_for(
        self,
        budget: int,
        policy: Planned,
        like: _C.Program | None,
        link: _C.Link | None = None,
    ) -> _C.Program | None:
        """Return the program with a plan for ``budget``, if one fits; None if there is no record.

        Each call counts: the next one follows a plan that more has been simulated for. The settings
        of ``like`` are tried before all others, and then one that fits will do for the first call.
        Values may be moved over ``link``.
        """
        with lock:
            program = self.program()
            if program is None:
                return None
            if link is not None and not self._timed_anew:
                timed = program.timed_anew()
                if timed is not None:  # what moving takes is compared with times
                    self._timed_anew = True
                    if self._fits(budget):
                        self._before = program
                    self._planned, like = 0, program
                    program = self._program = timed
                    self._grows_by = int(_SHARE_PER_SECOND * timed.cost)
            moves = link is not None and isinstance(policy, Guided)
            untimed = moves and not self._timed_anew
            self._untimed += untimed
            waits = self._waits = untimed and self._untimed <= _TIMED_BY_THEN
            if self._fits(budget):
                self._share += 0 if waits else self._grows_by
            else:
                self._before = self._before if self._planned == 0 else None
                self._planned = budget
                self._share = _FIRST_SHARE if like is None else 0
            planned, share, before = self._planned, self._share, self._before
        if isinstance(policy, Guided):
            policy.begin_moving(program, planned, link, like)
        else:
            policy.begin(program, planned, like)
        program.follow(share)
        if not waits:
            program.search_later()
        if before is None:
            return program
        if not program.is_searched(share):
            return before
        with lock:
            self._before = None
        return program

    def _fits(self, budget: int) -> bool:
        """Return whether what is searched for is for that budget."""
        # Peaks that depend on data are never quite the same; a little more is no new budget.
        return self._planned <= budget <= self._planned * _ABOUT

    def program(self) -> _C.Program | None:
        """Return the program, with or without a plan; None if there is no record."""
        with lock:
            trace, self._trace = self._trace, None
            if trace is not None:
                try:
                    trace.check()
                except ValueError as error:
                    warnings.warn(f"{error}; not guided. Please report it.", stacklevel=3)
                    return None
                self._program = _C.Program(trace)
                self.cost = self._program.cost or math.inf
                self._grows_by = int(min(_SHARE_PER_SECOND * self._program.cost, _MOST_OF_A_CALL))
            return self._program

    def finish(self) -> None:
        """Have later calls follow what the search comes to in the end, and wait for it."""
        if self._program is not None:
            with lock:
                self._share = _ALL
            self._program.follow()

    @property
    def planned(self) -> _C.Program | None:
        """The program, if there is a plan for it."""
        program = self._program
        return program if program is not None and program.overhead() < math.inf else None

    @property
    def is_settled(self) -> bool:
        """Whether later calls go on by the plan of the next one, and no other is tried."""
        with lock:
            program, share = self._program, self._share
            waits = self._waits or self._before is not None
        return program is not None and not waits and program.is_settled(share)

    def note_use(self) -> None:
        """Note that a call is about to follow it; those that none follows are forgotten first."""
        _programs.move_to_end(id(self))

    def forget(self) -> None:
        """Let go of the record."""
        self._trace = self._program = self._before = None
        self.operators = 0


def finish_searches() -> None:
    """Wait until all searches that have begun are over; later calls follow what they have found.

    For tests and measurements of calls that have been warmed up.
    """
    with lock:
        begun = [program for known in _programs.values() if (program := known()) is not None]
    for program in begun:
        program.finish()


# --- what all functions remember together ---------------------------------------------------------

# By id; what was used last comes last.
_programs: OrderedDict[int, weakref.ref[RecordedProgram]] = OrderedDict()


def _remember(program: RecordedProgram) -> None:
    """Note ``program``. What was used longest ago loses its record, if they are too much."""
    name = id(program)
    _programs[name] = weakref.ref(program, lambda _: _programs.pop(name, None))
    left = _MOST_OPERATORS_IN_ALL
    for reference in reversed(list(_programs.values())):
        known = reference()
        if known is None:
            continue
        left -= known.operators
        if left < 0 and known is not program:
            known.forget()
