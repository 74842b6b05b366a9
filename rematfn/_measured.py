# SPDX-License-Identifier: Apache-2.0
"""What a first call teaches the later ones: measured, then guided.

The two phases are those of Peng et al., *Capuchin* (ASPLOS 2020): one call is run as it comes and
watched, those after it know what is next.
"""

from __future__ import annotations

import threading
import warnings
from collections import OrderedDict

from . import _C
from ._policy import Planned
from ._signature import Signature

_MOST_SIGNATURES = 16
# Seconds that the second call of a signature may wait for a better plan than the first that fits.
_PATIENCE = 0.05
SEARCH_THREAD = "rematfn search"


class Measured:
    """A signature's first call: its peak, and the program it ran."""

    def __init__(self, level: _C.Level) -> None:
        self._level = level
        self.last: _C.Level | None = None  # of the last guided call
        self._program: _C.Program | None = None
        self._planned: int | None = None  # the budget that was searched for

    @property
    def peak_bytes(self) -> int:
        """The most bytes that were resident at once."""
        peak = self._level.read()["peak_bytes"]
        assert isinstance(peak, int)
        return peak

    def drop_program(self) -> None:
        """Forget the program: nobody is going to be guided by it."""
        self._level.take_trace()

    def lost(self) -> bool:
        """Whether the last guided call went another way than the first one."""
        return self.last is not None and self.last.guide_lost()

    def program(self, budget: int, policy: Planned) -> _C.Program | None:
        """Return the program with a plan for ``budget``; None if nothing is known, or nothing fits.

        The first plan that fits is there at once. A thread goes on looking for a better one, for
        later calls, as ``policy.search`` says.
        """
        if self._program is None:
            trace = self._level.take_trace()
            if trace is None:
                return None
            try:
                trace.check()
            except ValueError as error:
                warnings.warn(f"{error}; not guided. Please report it.", stacklevel=2)
                return None
            self._program = _C.Program(trace)
        program = self._program
        if self._planned != budget:
            self._planned = budget
            policy.plan(program, budget, _PATIENCE)
            if policy.search > _PATIENCE and program.replayed_cost() > 0:
                threading.Thread(
                    target=policy.plan, args=(program, budget), name=SEARCH_THREAD, daemon=True
                ).start()
        return program


class Memory:
    """The measured signatures of one function, the most recently used of them."""

    def __init__(self) -> None:
        self._measured: OrderedDict[Signature, Measured] = OrderedDict()

    def get(self, signature: Signature) -> Measured | None:
        """Return what was measured of ``signature``, if anything."""
        found = self._measured.get(signature)
        if found is not None:
            self._measured.move_to_end(signature)
        return found

    def note(self, signature: Signature, level: _C.Level, first: bool) -> None:
        """Remember the level of a first call, or of a later one."""
        if first:
            self._measured[signature] = Measured(level)
            while len(self._measured) > _MOST_SIGNATURES:
                self._measured.popitem(last=False)
        elif signature in self._measured:
            self._measured[signature].last = level

    def forget(self, signature: Signature) -> None:
        """Let the next call be a first one."""
        self._measured.pop(signature, None)
