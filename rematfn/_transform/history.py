# SPDX-License-Identifier: Apache-2.0
"""What is known of the calls of a function: those before it teach a call what to expect.

The two phases are those of Peng et al., *Capuchin* (ASPLOS 2020): one call is watched, those after
it know what is next.
"""

import dataclasses
import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any, Literal

from .. import _C
from .budget import Limit
from .recorded import RecordedProgram, lock
from .signature import Signature

_MOST_KEYS = 1024  # of one function; without a record a key is some numbers
_MOST_PROGRAMS = 8  # of one key, by the numbers of the calls that ran them
_MOST_PENDING = 4  # recorded calls, of one key, whose end is waited for
_MOST_RUNNING = 16  # calls of one function whose peaks may still rise
_SOME_PROGRAMS = 4  # of one function: enough for sizes that are new
MOST_LOST = 3  # calls in a row that left their records: later ones are not written down

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
# count: by the first one's record it must not be refused. So where the first record
# of a key is of a call that has stored something away, the next call is recorded again; that record
# is good, whatever it stores. From the third call on, one that does not fit is refused before it
# has written anything.
#
# Note [A record guides calls that are not like it]
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
# Batches of other sizes run the same operators, and a call that goes another way runs most of them.
# So a call for which there is no record, or none that is good, follows the nearest in size, which
# finds its place where the two differ: Note [A guide finds its place again]. Records whose
# operators a call of another size has run come before those of nearer sizes: a first call may have
# run others, while TorchScript compiled. Such a call is written down beside, if a record of it is
# likely to be used: for the first few sizes, and when a size comes again. Sizes that never come
# again are not recorded. Nor are calls of a function that have left what they followed time after
# time.
#
# Note [Calls in turn]
# ~~~~~~~~~~~~~~~~~~~~
# A GAN's generator runs without a backward, for the discriminator, and then with one. Both calls
# have one signature. The record of the shorter one ends where the longer one goes on. If only a
# call after one that has left its record were written down, that would be the shorter one each
# time. So after such a call, guided ones are written down, too, and of two records the longer one
# stays: a call that ends before its record does has left nothing.

Kind = Literal["first", "estimated", "online", "guided"]


@dataclasses.dataclass(eq=False)
class Call:
    """A call: what is known of it before it runs, and what it does, its backward included.

    See Note [Nothing of a call outlives it but numbers].
    """

    kind: Kind
    why: str  # it is that
    record: bool = False  # write it down
    expected_bytes: int | None = None  # the unconstrained peak, if there is reason to expect one
    largest_bytes: int = 0  # the largest that is known of calls of the function
    of_bytes: int = 0  # the peak that its budget is a fraction of, if it is one
    settled: bool | None = None  # calls like it go on by its plan; None: it follows none
    is_estimate: bool = True  # the peak that a fraction is of may be still to come
    gives_way: bool = True  # a budget that is only estimated gives way to what an operator needs
    program: RecordedProgram | None = None  # that it follows
    as_recorded: bool = True  # it is expected to run just that
    known: _C.Trace | None = None  # where nothing is planned, for the figure of a BudgetError
    signature: Signature | None = None  # if what it does is to be known
    limit: Limit = dataclasses.field(default_factory=Limit)
    report: _C.Report = dataclasses.field(init=False, repr=False)  # once it has begun
    to_judge: bool = False  # See Note [What the replays of a call are compared with]
    stored_bytes: int = 0  # that it has stored away, beside results and gradients
    thread: int = dataclasses.field(default_factory=threading.get_ident)

    def read(self) -> dict[str, Any]:
        kind, why, settled = self.kind, self.why, self.settled
        if self.report.guide_lost:
            kind, settled = "online", None
            why = "it took another way than the call that was recorded"
        return {**self.report.read(), "call": kind, "why": why, "settled": settled}

    @property
    def peak_bytes(self) -> int:
        """The unconstrained peak; until the call is over, at least what was expected."""
        peak = self.report.unconstrained_bytes
        return peak if self.report.is_over() else max(peak, self.expected_bytes or 0)

    def was_too_tight(self) -> bool:
        """Whether the budget had to give way, and no peak that was worth it came after.

        While another thread is in the call, that peak may be still to come.
        """
        budget = self.report.budget
        if self.limit.fraction is None or budget is None:
            return False
        if self.thread != threading.get_ident() and not self.report.is_over():
            return False
        meant = self.limit.of(max(self.peak_bytes, self.largest_bytes))
        return meant is not None and budget > meant


class _Key:
    """What is known of the calls with one key."""

    def __init__(self, signature: Signature) -> None:
        self.signature = signature  # of the first
        # By numbers, the latest last: calls, or the peaks that they would have; and programs.
        self.calls: OrderedDict[int, Call | int] = OrderedDict()
        self.programs: OrderedDict[int, RecordedProgram] = OrderedDict()
        self.has_turns = False  # a call has left the record, and perhaps does so each time
        self.on_shapes: RecordedProgram | None = None  # until a call of it was recorded
        self.pending: list[tuple[int, Call]] = []  # whose traces are still to be taken
        self.known: _C.Trace | None = None  # where nothing is planned, till a call has fitted

    @property
    def latest(self) -> Call | int:
        """The last call, or the peak that it would have."""
        return self.calls[next(reversed(self.calls))]


class History:
    """What is known of the calls of one function."""

    def __init__(self) -> None:
        self._keys: OrderedDict[tuple[object, ...], _Key] = OrderedDict()
        self._running: deque[Call] = deque()  # or over, and not looked at since
        self._largest_bytes = 0  # of calls that are over
        self.threads: set[int] = set()  # that are in a call
        self.warned_of: set[type[Warning]] = set()
        self.result_seen = False  # and looked at for what computes later
        self.lost_in_a_row = 0  # guided calls that took another way than their record

    def forecast(self, signature: Signature, *, guided: bool, outermost: bool) -> Call:
        """Return what is known of a call.

        If it is ``outermost`` it can be recorded: what runs inside is in the record of the level
        around. A record guides later calls, or else serves the figure of a BudgetError.
        """
        with lock:
            call = self._forecast(signature, guided, outermost)
            if call.kind != "guided":
                self._guide_by_nearest(call, signature, guided)
            # See Note [A fraction means bytes]
            known = (key.signature for key in self._keys.values())
            trains = signature.builds_graphs or any(other.builds_graphs for other in known)
            call.largest_bytes = self._largest_peak()
            call.is_estimate |= not trains
            call.gives_way |= not trains
            call.signature = signature
            return call

    def _forecast(self, signature: Signature, guided: bool, outermost: bool) -> Call:
        key = self._keys.get(signature.key)
        if key is None:
            return self._forecast_new(signature, outermost)
        self._keys.move_to_end(signature.key)
        self._harvest(key, guided)
        before = key.calls.get(signature.numbers, key.latest)
        if isinstance(before, int):
            return Call("estimated", "its peak was measured on shapes alone", outermost, before)
        same_numbers = signature.numbers in key.calls
        call = Call(
            kind="online",
            why=f"as the last call with {'the same' if same_numbers else 'other'} numbers",
            expected_bytes=before.peak_bytes,
            # A peak that some call has measured stays known while the last one is pending.
            is_estimate=not same_numbers or (before.is_estimate and not before.report.is_over()),
            gives_way=not before.was_too_tight(),
        )
        if not guided:
            call.known = key.known
            call.record = key.known is not None and outermost
            return call
        program = key.programs.get(signature.numbers)
        lost = same_numbers and before.report.guide_lost
        if program is None and key.programs:
            latest = key.latest
            lost |= isinstance(latest, Call) and latest.report.guide_lost
            program = key.programs[next(reversed(key.programs))]
        key.has_turns |= lost
        if program is not None and not lost and not program.makes_state:
            program.note_use()
            call.kind = "guided"
            call.program = program
            call.record = key.has_turns and self.lost_in_a_row < MOST_LOST
            return call
        if program is None:
            call.why = "no record is at hand"
        elif lost:
            call.why = "the last such call took another way than the one that was recorded"
        else:
            call.why = "the call that was recorded has stored away what later ones find"
        call.record = self.lost_in_a_row < MOST_LOST
        call.is_estimate = True
        call.program = program
        return call

    # See Note [A record guides calls that are not like it]
    def _guide_by_nearest(self, call: Call, signature: Signature, guided: bool) -> None:
        if call.program is None and guided:
            for key in [key for key in self._keys.values() if key.pending]:
                self._harvest(key, guided)
            near = self._nearest_first(signature)
            call.program = near[0] if near else None
            call.record &= len(near) < _SOME_PROGRAMS or signature.key in self._keys
        if call.program is not None:
            call.program.note_use()
            call.as_recorded = False

    def _nearest_first(self, signature: Signature) -> list[RecordedProgram]:
        """Return the programs of calls in the same surroundings.

        Those come first that calls of other sizes have run; then the nearest in size.
        """
        near = [key for key in self._nearest(signature) if key.signature.around == signature.around]
        programs = (program for key in near for program in (*key.programs.values(), key.on_shapes))
        found = [known for known in programs if known is not None and known.program is not None]
        return sorted(found, key=lambda known: not known.suits_others)

    def _nearest(self, signature: Signature) -> list[_Key]:
        """Return all keys: those in the same surroundings first, then the nearest in size."""

        def distance(key: _Key) -> tuple[bool, float]:
            a, b = key.signature.nbytes, signature.nbytes
            return key.signature.around != signature.around, max(a, b, 1) / max(min(a, b), 1)

        return sorted(self._keys.values(), key=distance)

    def _forecast_new(self, signature: Signature, outermost: bool) -> Call:
        if not self._keys:
            return Call("first", "nothing is known of the function yet", outermost)
        nearest = self._nearest(signature)[0]
        scale = max(signature.nbytes, 1) / max(nearest.signature.nbytes, 1)
        known = nearest.latest
        peak = known if isinstance(known, int) else known.peak_bytes
        why = f"{scale:.3g} times the peak of the call whose arguments are the nearest in size"
        return Call("estimated", why, outermost, int(peak * scale))

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

    def record_of(self, ran: Call, guided: bool) -> _C.Program | None:
        """Return the program that a call which is over has run, if it was recorded."""
        with lock:
            key = self._keys.get(ran.signature.key) if ran.signature is not None else None
            if ran.signature is None or key is None:
                return None
            if not guided:
                trace = ran.report.take_trace(waits=False)
                return None if trace is None else _C.Program(trace)
            self._harvest(key, guided)
            found = key.programs.get(ran.signature.numbers)
            return None if found is None else found.program

    def is_alike(self, signature: Signature) -> bool:
        """Return whether calls with other numbers ran as many operators each, two at the least.

        The numbers are those of steps then, and tell nothing of what a call needs.
        """
        with lock:
            key = self._keys.get(signature.key)
            calls = key.calls if key is not None else {}
            if signature.numbers in calls:
                return False
            over = [ran for ran in calls.values() if isinstance(ran, Call) and ran.report.is_over()]
            return len(over) > 1 and len({ran.read()["operators"] for ran in over}) == 1

    def like(self, signature: Signature) -> _C.Program | None:
        """Return the planned program of a call that is the nearest in size, if there is one."""
        with lock:
            near = self._nearest_first(signature)
        return next((planned for known in near if (planned := known.planned) is not None), None)

    def begin(self, signature: Signature, ran: Call) -> Callable[[], None]:
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
            if ran.record:
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

    def know(self, signature: Signature, peak_bytes: int, trace: _C.Trace) -> None:
        """Note what a call would do, though none has run."""
        with lock:
            key = self._keys.get(signature.key) or _Key(signature)
            key.calls.setdefault(signature.numbers, peak_bytes)
            if not key.programs:
                key.on_shapes = RecordedProgram(trace, peak_bytes, peak_bytes, makes_state=False)
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
            trace = ran.report.take_trace(waits=False)  # or none, while another thread is in it
            if trace is None and ran.report.has_trace:
                continue
            key.pending.remove(entry)
            if not guided:
                # A call that was there to learn the peak which the budget is a fraction of.
                measured = ran.kind == "first" and ran.limit.fraction is not None
                key.known = trace if measured and ran.report.is_over() else None
            elif trace is not None:
                makes_state = ran.stored_bytes > 0 and not key.programs
                key.on_shapes = None
                # See Note [Calls in turn]
                known = key.programs.get(numbers)
                if key.has_turns and known is not None and known.operators > trace.operators:
                    key.has_turns = False
                    continue
                key.has_turns &= known is not None and known.operators == trace.operators
                key.programs.pop(numbers, None)
                near = self._nearest_first(key.signature)
                key.programs[numbers] = RecordedProgram(
                    trace, ran.read()["peak_bytes"], ran.peak_bytes, makes_state, *near[:1]
                )
                while len(key.programs) > _MOST_PROGRAMS:
                    key.programs.popitem(last=False)
        for numbers in [n for n, p in key.programs.items() if p.program is None]:
            del key.programs[numbers]
