# SPDX-License-Identifier: Apache-2.0
"""Programs that were recorded, and the plans that calls of them follow."""

import atexit
import math
import os
import threading
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Iterable

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
        self.peak_bytes = peak_bytes  # what the call held at the most
        self.makes_state = makes_state  # See Note [The first step makes the state]
        self.operators = trace.operators
        self.program: _C.Program | None = None  # with or without a plan
        try:
            trace.check()
            self.program = _C.Program(trace)
        except ValueError as error:
            warnings.warn(f"{error}; not guided. Please report it.", stacklevel=3)
        name = id(self)
        _programs[name] = weakref.ref(self, lambda _: _programs.pop(name, None))
        # What was used longest ago loses its record, if they are too much.
        used = (known for ref in reversed(list(_programs.values())) if (known := ref()) is not None)
        forget_beyond(_MOST_OPERATORS_IN_ALL, used)

    @property
    def planned(self) -> _C.Program | None:
        """The program, if there is a plan for it."""
        program = self.program
        return program if program is not None and program.overhead() < math.inf else None

    def note_use(self) -> None:
        """Note that a call is about to follow it; those that none follows are forgotten first."""
        _programs.move_to_end(id(self))


# What all functions remember together, by id; what was used last comes last.
_programs: OrderedDict[int, weakref.ref[RecordedProgram]] = OrderedDict()


def forget_beyond(most: int, programs: Iterable[RecordedProgram]) -> None:
    """Drop the records of all but the first programs, which have so many operators at most."""
    for program in programs:
        most -= program.operators
        if most < 0:
            program.program = None
            program.operators = 0


def finish_searches() -> None:
    """Wait until all searches that have begun are over.

    For tests and measurements of calls that have been warmed up.
    """
    with lock:
        begun = [known for reference in _programs.values() if (known := reference()) is not None]
    for known in begun:
        if known.program is not None:
            known.program.finish()
