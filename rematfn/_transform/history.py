# SPDX-License-Identifier: Apache-2.0
"""What is known of the calls of a function: those before it teach a call what to expect.

The two phases are those of Peng et al., *Capuchin* (ASPLOS 2020): one call is watched, those after
it know what is next.
"""

from __future__ import annotations

import dataclasses
import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any, Literal

from .. import _C
from .recorded import RecordedProgram, lock
from .signature import Signature

_MOST_OPERATORS = 1 << 19  # of the records of one function; a longer call is not recorded
_MOST_KEYS = 1024  # of one function; without a record a key is some numbers
_MOST_PROGRAMS = 8  # of one key, by the numbers of the calls that ran them
_MOST_PENDING = 4  # recorded calls, of one key, whose end is waited for
_MOST_RUNNING = 16  # calls of one function whose peaks may still rise

# Note [A fraction means bytes]
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
# A function is called to train and to validate, with full batches and with one that is not. A
# fraction of each call's own peak would be less bytes for a call that needs less, and a pass under
# `no_grad`, whose peak is hardly more than its largest operator, would be refused where training is
# not. But memory that is there for one call is there for the next. So a fraction is of the largest
# peak that is known of the function: no call is capped by less than another has been. Where only
# calls under `no_grad` are known, that peak may be still to come, as in a trainer that validates
# before it trains. It is an estimate then: See Note [A fraction of what is not known yet].

# Note [The first step makes the state]
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
# An optimiser makes its state in its first step and finds it from the second on; so does whoever
# fills a cache. The second call is then another program than the first, with other bytes that
# count: by the first one's record it must be neither guided nor refused. So where the first record
# of a key is of a call that has stored something away, the next call is recorded again; that record
# is good, whatever it stores. From the third call on, one that does not fit is refused before it
# has written anything.

Kind = Literal["first", "estimated", "online", "guided"]


@dataclasses.dataclass(frozen=True)
class Forecast:
    """What is known of a call that is about to run.

    Attributes:
        kind: What sort of call it will be.
        why: The reason, in words.
        record: Whether to write it down.
        peak_bytes: The unconstrained peak to expect, if there is any reason to expect one.
        largest_bytes: The largest unconstrained peak that is known of calls of the function.
        settled: Whether calls like it go on by its plan; None where none is followed.
        is_estimate: Whether the peak that a fraction is of may be still to come.
        gives_way: Whether a budget that is only estimated gives way to what an operator needs.
        program: What the call is expected to run, if that was recorded.
        known: The same where nothing is planned, for the figure of a BudgetError.
    """

    kind: Kind
    why: str
    record: bool = False
    peak_bytes: int | None = None
    largest_bytes: int = 0
    settled: bool | None = None
    is_estimate: bool = True
    gives_way: bool = True
    program: RecordedProgram | None = None
    known: _C.Trace | None = None


class Ran:
    """A call that has begun: what it was, and its figures, which go on with its backward.

    See Note [Nothing of a call outlives it but numbers].
    """

    def __init__(self, report: _C.Report, forecast: Forecast, fraction: float | None) -> None:
        self.report = report
        self.forecast = forecast
        self._fraction = fraction
        self.to_judge = False  # See Note [What the replays of a call are compared with]
        self.to_advise = False
        self.signature: Signature | None = None
        self.stored_bytes = 0  # beside results and gradients
        self._thread = threading.get_ident()

    def read(self) -> dict[str, Any]:
        """Return the figures of now."""
        kind, why, settled = self.forecast.kind, self.forecast.why, self.forecast.settled
        if self.report.guide_lost:
            kind, settled = "online", None
            why = "it took another way than the call that was recorded"
        return {**self.report.read(), "call": kind, "why": why, "settled": settled}

    @property
    def peak_bytes(self) -> int:
        """The unconstrained peak; until the call is over, at least what was expected."""
        peak = self.report.unconstrained_bytes
        return peak if self.report.is_over() else max(peak, self.forecast.peak_bytes or 0)

    def only_measured(self) -> bool:
        """Whether it is over, and was there to learn the peak that the budget is a fraction of."""
        return (
            self.forecast.kind == "first" and self._fraction is not None and self.report.is_over()
        )

    def take_trace(self) -> _C.Trace | None:
        """Return what was recorded; recording ends, unless another thread is in the call."""
        return self.report.take_trace(waits=False)

    def was_too_tight(self) -> bool:
        """Whether the budget had to give way, and no peak that was worth it came after.

        While another thread is in the call, that peak may be still to come.
        """
        budget = self.report.budget
        if self._fraction is None or budget is None:
            return False
        if self._thread != threading.get_ident() and not self.report.is_over():
            return False
        peak = max(self.peak_bytes, self.forecast.largest_bytes)
        return budget > max(1, int(self._fraction * peak))


class _Key:
    """What is known of the calls with one key."""

    def __init__(self, signature: Signature) -> None:
        self.around = signature.around
        self.builds_graphs = signature.builds_graphs
        self.nbytes = signature.nbytes
        self.calls: OrderedDict[int, Ran | int] = OrderedDict()  # by numbers; latest last; or peaks
        # By numbers; the latest recorded last.
        self.programs: OrderedDict[int, RecordedProgram] = OrderedDict()
        self.pending: list[tuple[int, Ran]] = []  # whose traces are still to be taken
        self.known: _C.Trace | None = None  # where nothing is planned, till a call has fitted

    @property
    def latest(self) -> Ran | int:
        """The last call, or the peak that it would have."""
        return self.calls[next(reversed(self.calls))]


class History:
    """What is known of the calls of one function."""

    def __init__(self) -> None:
        self._keys: OrderedDict[tuple[object, ...], _Key] = OrderedDict()
        self._running: deque[Ran] = deque()  # or over, and not looked at since
        self._largest_bytes = 0  # of calls that are over
        self.has_warned = False  # of replays
        self.advised: set[type[Warning]] = set()  # what else it was warned of
        self.result_seen = False  # and whether a result was looked at for that
        self.lost_in_a_row = 0  # guided calls that took another way than their record

    def forecast(self, signature: Signature, *, guided: bool, outermost: bool) -> Forecast:
        """Return what is known of a call.

        Args:
            signature: Its signature.
            guided: Whether a record guides later calls. Else that of a first call serves the
                figure of a BudgetError.
            outermost: Whether it can be recorded: what runs inside is in the record of the level
                around.
        """
        with lock:
            forecast = self._forecast(signature, guided, outermost)
            # See Note [A fraction means bytes]
            trains = signature.builds_graphs or any(k.builds_graphs for k in self._keys.values())
            return dataclasses.replace(
                forecast,
                largest_bytes=self._largest_peak(),
                is_estimate=forecast.is_estimate or not trains,
                gives_way=forecast.gives_way or not trains,
            )

    def _forecast(self, signature: Signature, guided: bool, outermost: bool) -> Forecast:
        key = self._keys.get(signature.key)
        if key is None:
            return self._forecast_new(signature, outermost)
        self._keys.move_to_end(signature.key)
        self._harvest(key, guided)
        call = key.calls.get(signature.numbers, key.latest)
        same_numbers = signature.numbers in key.calls
        if isinstance(call, int):
            return Forecast("estimated", _MEASURED, outermost, call)
        estimate = not (same_numbers and call.report.is_over())
        forecast = Forecast(
            kind="online",
            why=_SAME if same_numbers else _OTHER_NUMBERS,
            peak_bytes=call.peak_bytes,
            is_estimate=estimate,
            gives_way=not call.was_too_tight(),
        )
        if not guided:
            return dataclasses.replace(
                forecast, known=key.known, record=key.known is not None and outermost
            )
        program = key.programs.get(signature.numbers)
        latest = key.latest
        if (
            program is None
            and key.programs
            and not (isinstance(latest, Ran) and latest.report.guide_lost)
        ):
            program = key.programs[next(reversed(key.programs))]
        if program is None or (same_numbers and call.report.guide_lost):
            why = _LOST if key.programs else "no record is at hand"
            return dataclasses.replace(forecast, why=why, record=outermost, is_estimate=True)
        if program.makes_state:
            return dataclasses.replace(forecast, why=_STATE, record=outermost, is_estimate=True)
        program.note_use()
        return dataclasses.replace(forecast, kind="guided", program=program)

    def _forecast_new(self, signature: Signature, outermost: bool) -> Forecast:
        if not self._keys:
            return Forecast("first", "nothing is known of the function yet", outermost)
        alike = [key for key in self._keys.values() if key.around == signature.around]
        nearest = min(
            alike or self._keys.values(), key=lambda key: _ratio(key.nbytes, signature.nbytes)
        )
        scale = max(signature.nbytes, 1) / max(nearest.nbytes, 1)
        known = nearest.latest
        peak = known if isinstance(known, int) else known.peak_bytes
        why = f"{scale:.3g} times the peak of the call whose arguments are the nearest in size"
        return Forecast("estimated", why, outermost, int(peak * scale))

    def _largest_peak(self) -> int:
        """Return the largest peak that is known; of calls that are not over, as far as they are."""
        largest = self._largest_bytes
        for ran in list(self._running):
            is_over = ran.report.is_over()  # before the peak is read: it does not rise any more
            largest = max(largest, ran.report.unconstrained_bytes)
            if is_over:
                self._running.remove(ran)
                self._largest_bytes = largest
        return largest

    def record_of(self, signature: Signature | None, ran: Ran, guided: bool) -> _C.Program | None:
        """Return the program that a call which is over has run, if it was recorded."""
        with lock:
            key = self._keys.get(signature.key) if signature is not None else None
            if signature is None or key is None:
                return None
            if not guided:
                trace = ran.take_trace()
                return None if trace is None else _C.Program(trace)
            self._harvest(key, guided)
            found = key.programs.get(signature.numbers)
            return None if found is None else found.program()

    def is_alike(self, signature: Signature) -> bool:
        """Return whether calls with other numbers ran as many operators each, two at the least.

        The numbers are those of steps then, and tell nothing of what a call needs.
        """
        with lock:
            key = self._keys.get(signature.key)
            calls = key.calls if key is not None else {}
            if signature.numbers in calls:
                return False
            over = [ran for ran in calls.values() if isinstance(ran, Ran) and ran.report.is_over()]
            return len(over) > 1 and len({ran.read()["operators"] for ran in over}) == 1

    def like(self, signature: Signature) -> _C.Program | None:
        """Return the planned program of the key that is the nearest in size, if there is one."""
        with lock:
            found = [
                (_ratio(key.nbytes, signature.nbytes), planned)
                for name, key in self._keys.items()
                if name != signature.key and key.around == signature.around
                for program in key.programs.values()
                if (planned := program.planned) is not None
            ]
        return min(found, key=lambda pair: pair[0])[1] if found else None

    def begin(self, signature: Signature, ran: Ran) -> Callable[[], None]:
        """Note that a call begins. What is returned is to be called if it ends by an exception."""
        with lock:
            key = self._keys.get(signature.key) or _Key(signature)
            before = key.calls.get(signature.numbers)
            key.calls[signature.numbers] = ran
            key.calls.move_to_end(signature.numbers)
            self._keep(key, signature)
            while len(key.calls) > _MOST_PROGRAMS:
                key.calls.popitem(last=False)
            self._running.append(ran)
            if len(self._running) > _MOST_RUNNING:
                self._largest_bytes = max(
                    self._largest_bytes, self._running.popleft().report.unconstrained_bytes
                )
            if ran.forecast.record:
                key.pending.append((signature.numbers, ran))

        def fail() -> None:  # what was seen is not the whole of it
            with lock:
                if key.calls.get(signature.numbers) is ran and before is not None:
                    key.calls[signature.numbers] = before
                elif key.calls.get(signature.numbers) is ran:
                    if len(key.calls) == 1 and self._keys.get(signature.key) is key:
                        del self._keys[signature.key]
                    del key.calls[signature.numbers]
                if ran in self._running:
                    self._running.remove(ran)
                key.pending = [entry for entry in key.pending if entry[1] is not ran]

        return fail

    def know(self, signature: Signature, peak_bytes: int) -> None:
        """Note the peak that a call would have, though none has run."""
        with lock:
            key = self._keys.get(signature.key) or _Key(signature)
            key.calls.setdefault(signature.numbers, peak_bytes)
            self._keep(key, signature)
            self._largest_bytes = max(self._largest_bytes, peak_bytes)

    def _keep(self, key: _Key, signature: Signature) -> None:
        """Keep what has a call: an interrupt may come between any two statements."""
        self._keys[signature.key] = key
        while len(self._keys) > _MOST_KEYS:
            self._keys.popitem(last=False)

    def _harvest(self, key: _Key, guided: bool) -> None:
        """Take the records of calls that are over, or that nobody waits for any longer."""
        for entry in list(key.pending):
            numbers, ran = entry
            if not (ran.report.is_over() or not guided or len(key.pending) > _MOST_PENDING):
                continue
            trace = ran.take_trace()
            if trace is None and ran.report.has_trace:
                continue
            key.pending.remove(entry)
            if not guided:
                key.known = trace if ran.only_measured() else None
            elif trace is not None:
                makes_state = ran.stored_bytes > 0 and not key.programs
                key.programs.pop(numbers, None)
                key.programs[numbers] = RecordedProgram(
                    trace, ran.read()["peak_bytes"], makes_state
                )
                while len(key.programs) > _MOST_PROGRAMS:
                    key.programs.popitem(last=False)
                self._forget_old(key)
        for numbers in [n for n, p in key.programs.items() if p.operators == 0]:
            del key.programs[numbers]

    def _forget_old(self, latest: _Key) -> None:
        mine = [w for k in self._keys.values() if k is not latest for w in k.programs.values()]
        left = _MOST_OPERATORS - sum(p.operators for p in latest.programs.values())
        for program in reversed(mine):
            left -= program.operators
            if left < 0:
                program.forget()


_MEASURED = "its peak was measured on shapes alone"
_SAME = "as the last call with the same numbers"
_OTHER_NUMBERS = "as the last call with other numbers"
_STATE = "the call that was recorded has stored away what later ones find"
_LOST = "the last such call took another way than the one that was recorded"


def _ratio(a: int, b: int) -> float:
    return max(a, b, 1) / max(min(a, b), 1)
