# SPDX-License-Identifier: Apache-2.0
"""What the calls of a function teach the later ones: measured, then guided.

The two phases are those of Peng et al., *Capuchin* (ASPLOS 2020): one call is watched, those after
it know what is next.
"""

from __future__ import annotations

import atexit
import dataclasses
import math
import os
import threading
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Literal

from .. import _C
from ..policies._planned import Planned
from .signature import Signature

# A recorded operator takes about 300 bytes. A call of more than half a million is not recorded.
_MOST_OPERATORS = 1 << 19  # of the records of one function
_MOST_OPERATORS_IN_ALL = 1 << 20
_MOST_KEYS = 1024  # of one function; without a record a key is some numbers
_MOST_WAYS = 8  # of one key: what it has run, by its numbers

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
_FIRST_SHARE = 30_000  # of the first guided call: about a twentieth of a second
_SHARE_PER_SECOND = 200_000  # of a call's cost; 400,000 to 900,000 are simulated in one
_MOST_OF_A_CALL = 100_000
_ALL = 1 << 62
_ABOUT = 1.05
_MOST_PENDING = 4  # recorded calls, of one key, whose end is waited for

Kind = Literal["first", "estimated", "online", "guided"]

# See Note [A search needs nothing of the interpreter]. C's own atexit comes after Python has gone;
# what is registered early, on import, runs after the user's handlers, which may call functions.
atexit.register(_C.end_searches)

# No code of the user's runs under it. Whoever forks holds it, so that a child finds it free.
_lock = threading.RLock()
os.register_at_fork(
    before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release
)


class Way:
    """One program that calls with a key have run: its record, and a plan for it."""

    def __init__(self, trace: _C.Trace) -> None:
        self._trace: _C.Trace | None = trace
        self._program: _C.Program | None = None
        self._planned = 0  # the budget that is searched for
        self._share = 0  # See Note [A plan goes by the number of the call]
        self._grows_by = 0
        self.operators = trace.operators
        _remember(self)

    def program(self, budget: int, policy: Planned, like: _C.Program | None) -> _C.Program | None:
        """Return the program with a plan for ``budget``, if one fits; None if there is no record.

        Each call counts: the next one follows a plan that more has been simulated for. The settings
        of ``like`` are tried before all others, and then one that fits will do for the first call.
        """
        with _lock:
            trace, self._trace = self._trace, None
            if trace is not None:
                try:
                    trace.check()
                except ValueError as error:
                    warnings.warn(f"{error}; not guided. Please report it.", stacklevel=2)
                    return None
                self._program = _C.Program(trace)
                cost = self._program.cost
                self._grows_by = int(min(_SHARE_PER_SECOND * cost, _MOST_OF_A_CALL))
            program = self._program
            if program is None:
                return None
            # Peaks that depend on data are never quite the same; a little more is no new budget.
            if self._planned <= budget <= self._planned * _ABOUT:
                self._share += self._grows_by
            else:
                self._planned = budget
                self._share = _FIRST_SHARE if like is None else 0
            planned, share = self._planned, self._share
        policy.begin(program, planned, like)
        program.follow(share)
        program.search_later()
        return program

    def finish(self) -> None:
        """Have later calls follow what the search comes to in the end, and wait for it."""
        if self._program is not None:
            with _lock:
                self._share = _ALL
            self._program.follow()

    @property
    def planned(self) -> _C.Program | None:
        """The program, if there is a plan for it."""
        program = self._program
        return program if program is not None and program.replayed_cost() < math.inf else None

    def forget(self) -> None:
        """Let go of the record."""
        self._trace = self._program = None
        self.operators = 0


@dataclasses.dataclass(frozen=True)
class Advice:
    """What is known of a call that is about to run.

    Attributes:
        kind: What sort of call it will be.
        why: The reason, in words.
        record: Whether to write it down.
        peak_bytes: The unconstrained peak to expect, if there is any reason to expect one.
        is_estimate: Whether that may be another program's peak.
        gives_way: Whether a budget that is only estimated gives way to what an operator needs.
        way: What the call is expected to do, if that was recorded.
    """

    kind: Kind
    why: str
    record: bool = False
    peak_bytes: int | None = None
    is_estimate: bool = True
    gives_way: bool = True
    way: Way | None = None


class Ran:
    """A call that has begun: what it was, and its figures, which go on with its backward.

    See Note [Nothing of a call outlives it but numbers].
    """

    def __init__(self, report: _C.Report, advice: Advice, fraction: float | None) -> None:
        self._report = report
        self.advice = advice
        self._fraction = fraction

    def read(self) -> dict[str, Any]:
        """Return the figures of now."""
        kind, why = self.advice.kind, self.advice.why
        if self._report.guide_lost:
            kind, why = "online", "it took another way than the call that was recorded"
        return {**self._report.read(), "call": kind, "why": why}

    @property
    def peak_bytes(self) -> int:
        """The unconstrained peak; until the call is over, at least what was expected."""
        peak = self._report.read()["unconstrained_bytes"]
        assert isinstance(peak, int)
        return peak if self.is_over() else max(peak, self.advice.peak_bytes or 0)

    def is_over(self) -> bool:
        """Whether the call has returned, and its backward with it."""
        return self._report.is_over()

    def lost(self) -> bool:
        """Whether the call was guided, and took another way."""
        return self._report.guide_lost

    def take_trace(self) -> _C.Trace | None:
        """Return what was recorded; recording ends."""
        return self._report.take_trace()

    def was_too_tight(self) -> bool:
        """Whether the budget had to give way, and no peak that was worth it came after."""
        budget = self._report.read()["budget"]
        if self._fraction is None or not isinstance(budget, int):
            return False
        return budget > max(1, int(self._fraction * self.peak_bytes))


class _Key:
    """What is known of the calls with one key."""

    def __init__(self, signature: Signature) -> None:
        self.around = signature.around
        self.nbytes = signature.nbytes
        self.calls: OrderedDict[int, Ran | int] = OrderedDict()  # by numbers; latest last; or peaks
        self.ways: OrderedDict[int, Way] = OrderedDict()  # by numbers, latest recorded last
        self.recorded: list[tuple[int, Ran]] = []  # whose traces are still to be taken

    @property
    def latest(self) -> Ran | int:
        """The last call, or the peak that it would have."""
        return self.calls[next(reversed(self.calls))]


class Memory:
    """What is known of the calls of one function."""

    def __init__(self) -> None:
        self._keys: OrderedDict[tuple[object, ...], _Key] = OrderedDict()

    def advise(self, signature: Signature, *, guided: bool, outermost: bool) -> Advice:
        """Return what is known of a call.

        Args:
            signature: Its signature.
            guided: Whether a record guides later calls. Else that of a first call serves the
                figure of a BudgetError.
            outermost: Whether it can be recorded: what runs inside is in the record of the level
                around.
        """
        with _lock:
            key = self._keys.get(signature.key)
            if key is None:
                return self._advise_new(signature, outermost)
            self._keys.move_to_end(signature.key)
            self._harvest(key, guided)
            call = key.calls.get(signature.numbers, key.latest)
            same_numbers = signature.numbers in key.calls
            if isinstance(call, int):
                return Advice("estimated", _MEASURED, outermost, call)
            estimate = not (same_numbers and call.is_over())
            advice = Advice(
                kind="online",
                why=_SAME if same_numbers else _OTHER_NUMBERS,
                peak_bytes=call.peak_bytes,
                is_estimate=estimate,
                gives_way=not call.was_too_tight(),
            )
            if not guided:
                return advice
            way = key.ways.get(signature.numbers)
            latest = key.latest
            if way is None and key.ways and not (isinstance(latest, Ran) and latest.lost()):
                way = key.ways[next(reversed(key.ways))]
            if way is None or (same_numbers and call.lost()):
                why = _LOST if key.ways else "no record is at hand"
                return dataclasses.replace(advice, why=why, record=outermost, is_estimate=True)
            _ways.move_to_end(id(way))
            return dataclasses.replace(advice, kind="guided", way=way)

    def _advise_new(self, signature: Signature, outermost: bool) -> Advice:
        if not self._keys:
            return Advice("first", "nothing is known of the function yet", outermost)
        alike = [key for key in self._keys.values() if key.around == signature.around]
        nearest = min(
            alike or self._keys.values(), key=lambda key: _ratio(key.nbytes, signature.nbytes)
        )
        scale = max(signature.nbytes, 1) / max(nearest.nbytes, 1)
        known = nearest.latest
        peak = known if isinstance(known, int) else known.peak_bytes
        why = f"{scale:.3g} times the peak of the call whose arguments are the nearest in size"
        return Advice("estimated", why, outermost, int(peak * scale))

    def like(self, signature: Signature) -> _C.Program | None:
        """Return the planned program of the key that is the nearest in size, if there is one."""
        with _lock:
            found = [
                (_ratio(key.nbytes, signature.nbytes), program)
                for name, key in self._keys.items()
                if name != signature.key and key.around == signature.around
                for way in key.ways.values()
                if (program := way.planned) is not None
            ]
        return min(found, key=lambda pair: pair[0])[1] if found else None

    def begin(self, signature: Signature, ran: Ran) -> Callable[[], None]:
        """Note that a call begins. What is returned is to be called if it ends by an exception."""
        with _lock:
            key = self._key(signature)
            before = key.calls.pop(signature.numbers, None)
            key.calls[signature.numbers] = ran
            while len(key.calls) > _MOST_WAYS:
                key.calls.popitem(last=False)
            if ran.advice.record:
                key.recorded.append((signature.numbers, ran))

        def fail() -> None:  # what was seen is not the whole of it
            with _lock:
                if key.calls.get(signature.numbers) is ran:
                    del key.calls[signature.numbers]
                    if before is not None:
                        key.calls[signature.numbers] = before
                if not key.calls and self._keys.get(signature.key) is key:
                    del self._keys[signature.key]
                key.recorded = [entry for entry in key.recorded if entry[1] is not ran]

        return fail

    def know(self, signature: Signature, peak_bytes: int) -> None:
        """Note the peak that a call would have, though none has run."""
        with _lock:
            self._key(signature).calls.setdefault(signature.numbers, peak_bytes)

    def _key(self, signature: Signature) -> _Key:
        key = self._keys.get(signature.key)
        if key is None:
            key = self._keys[signature.key] = _Key(signature)
            while len(self._keys) > _MOST_KEYS:
                self._keys.popitem(last=False)
        return key

    def _harvest(self, key: _Key, guided: bool) -> None:
        """Take the records of calls that are over, or that nobody waits for any longer."""
        for entry in list(key.recorded):
            numbers, ran = entry
            if not (ran.is_over() or not guided or len(key.recorded) > _MOST_PENDING):
                continue
            key.recorded.remove(entry)
            trace = ran.take_trace()
            if guided and trace is not None:
                key.ways.pop(numbers, None)
                key.ways[numbers] = Way(trace)
                while len(key.ways) > _MOST_WAYS:
                    key.ways.popitem(last=False)
                self._forget_old(key)
        for numbers in [n for n, way in key.ways.items() if way.operators == 0]:
            del key.ways[numbers]

    def _forget_old(self, latest: _Key) -> None:
        mine = [w for k in self._keys.values() if k is not latest for w in k.ways.values()]
        left = _MOST_OPERATORS - sum(way.operators for way in latest.ways.values())
        for way in reversed(mine):
            left -= way.operators
            if left < 0:
                way.forget()


_MEASURED = "its peak was measured on shapes alone"
_SAME = "as the last call with the same numbers"
_OTHER_NUMBERS = "as the last call with other numbers"
_LOST = "the last such call took another way than the one that was recorded"


def _ratio(a: int, b: int) -> float:
    return max(a, b, 1) / max(min(a, b), 1)


def finish_searches() -> None:
    """Wait until all searches that have begun are over; later calls follow what they have found.

    For tests and measurements of calls that have been warmed up.
    """
    with _lock:
        ways = [way for reference in _ways.values() if (way := reference()) is not None]
    for way in ways:
        way.finish()


# --- what all functions remember together ---------------------------------------------------------

_ways: OrderedDict[int, weakref.ref[Way]] = OrderedDict()  # by id; what was used last comes last


def _remember(way: Way) -> None:
    """Note that there is ``way``. What was used longest ago loses its record, if it is too much."""
    name = id(way)
    _ways[name] = weakref.ref(way, lambda _: _ways.pop(name, None))
    left = _MOST_OPERATORS_IN_ALL
    for reference in reversed(list(_ways.values())):
        known = reference()
        if known is None:
            continue
        left -= known.operators
        if left < 0 and known is not way:
            known.forget()
