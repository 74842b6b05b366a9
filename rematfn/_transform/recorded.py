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

_MOST_OPERATORS_IN_ALL = 1 << 20  # of all records; an operator takes about 300 bytes

# See Note [A search needs nothing of the interpreter]. C's own atexit comes after Python has gone;
# what is registered early, on import, runs after the user's handlers, which may call functions.
atexit.register(_C.end_searches)

# No code of the user's runs under it. Whoever forks holds it, so that a child finds it free.
lock = threading.RLock()
os.register_at_fork(before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release)


class RecordedProgram:
    """A program that a call has run, and a plan that later calls of it follow."""

    def __init__(self, trace: _C.Trace, peak_bytes: int, makes_state: bool) -> None:
        self._trace: _C.Trace | None = trace
        self.peak_bytes = peak_bytes  # what the call held at the most
        self.makes_state = makes_state  # See Note [The first step makes the state]
        self._program: _C.Program | None = None
        self.operators = trace.operators
        _remember(self)

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
            return self._program

    def finish(self) -> None:
        """Wait until the search for a plan is over."""
        if self._program is not None:
            self._program.finish()

    @property
    def planned(self) -> _C.Program | None:
        """The program, if there is a plan for it."""
        program = self._program
        return program if program is not None and program.overhead() < math.inf else None

    def note_use(self) -> None:
        """Note that a call is about to follow it; those that none follows are forgotten first."""
        _programs.move_to_end(id(self))

    def forget(self) -> None:
        """Let go of the record."""
        self._trace = self._program = None
        self.operators = 0


def finish_searches() -> None:
    """Wait until all searches that have begun are over.

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
