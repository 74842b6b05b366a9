# SPDX-License-Identifier: Apache-2.0
"""What a call has written down: its operators, its values, and what became of them."""

import functools
import os
import sysconfig
from collections.abc import Callable
from typing import Any, NamedTuple

from .. import _C
from .._transform.transformed import transformed_of
from .stats import Stats, stats

ARRIVES = frozenset({"made", "replayed", "returned"})
GOES = frozenset({"dropped", "moved", "turned back", "released", "left"})


class Event(NamedTuple):
    """Something that happened to a value (``"replay"``: to a call)."""

    what: str  # was it made, dropped, moved, ..., or "replay"
    subject: int | None  # the value, or the call
    during: int | None  # the call that ran, or was about to
    time: float  # seconds since the journal was begun
    used: int  # bytes that count against the outermost budget, afterwards
    # Of an eviction: what spoke against it. Minus infinity: it will not be read again, as far as is
    # known. NaN: a function of the user's says so.
    score: float


class Call(NamedTuple):
    """An operator that the program has called."""

    name: str
    place: int
    begun: float  # seconds since the journal was begun
    ended: float  # -1: it did not come to its end
    cost: float  # seconds, as the level counts them
    needed: int  # bytes, at the least: its inputs and what it allocates
    used: int  # bytes that counted before what it makes did
    peak: int  # bytes that it allocated at once
    backward: bool
    reads: list[int]


class Value(NamedTuple):
    """The contents of a storage between two writes."""

    nbytes: int
    made_by: int | None  # a call; None: a copy of what was about to be overwritten
    has_producer: bool  # it can be replayed
    cut_at: int | None  # the number of events by when it could no longer be; None: it still can
    raw: bool  # uninitialised memory, perhaps being filled
    kept: bool  # it goes last: a policy or a mark says so
    held: bool  # it was to go, and somebody outside held its storage


class Place(NamedTuple):
    """A line of the program, and the module whose ``forward`` ran."""

    file: str
    line: int
    function: str
    module: str

    @property
    def brief(self) -> str:
        """The file's name, the line, and the module or else the function."""
        return f"{self.file.rpartition(os.sep)[2]}:{self.line} ({self.module or self.function})"

    def __str__(self) -> str:
        if not self.file:
            return "(unknown)"
        inside = f" ({self.module})" if self.module else ""
        return f"{_short(self.file)}:{self.line} in {self.function}{inside}"


NOWHERE = Place("", 0, "", "")


class Journal:
    """What a call has written down, under ``where``."""

    def __init__(
        self, name: str, figures: Stats, columns: dict[str, list[tuple[Any, ...]]]
    ) -> None:
        self.name = name
        self.stats = figures
        self.events = [Event(*row) for row in columns["events"]]
        self.calls = [Call(*row) for row in columns["calls"]]
        self.values = [Value(*row) for row in columns["values"]]
        self.begun: int = columns["begun"][0][0]  # nanoseconds since 1970

    def place(self, call: int | None) -> Place:
        """Return where an operator was called; in a backward, what it is the gradient of."""
        return NOWHERE if call is None else _place(self.calls[call].place)

    def operator(self, call: int | None) -> str:
        """Return the operator's name, without its namespace if that is torch's."""
        if call is None:
            return "(copy)"
        name = self.calls[call].name.removeprefix("aten::")
        return f"{name}, backward" if self.calls[call].backward else name

    def named(self, call: int | None) -> str:
        return f"{self.operator(call)} at {self.place(call)}"

    @functools.cached_property
    def peak(self) -> tuple[int, int]:
        """The event before which most bytes were in use, what ran included; and how many."""
        most, at = 0, 0
        for i, event in enumerate(self.events):
            if event.used > most:
                most, at = event.used, i + 1
        for index, call in enumerate(self.calls):
            if call.used + call.peak > most:
                most, at = call.used + call.peak, self.first_made.get(index, at)
        return at, most

    @functools.cached_property
    def first_made(self) -> dict[int, int]:
        """By call: the event at which what it makes begins to count."""
        made = [(e.during, i) for i, e in enumerate(self.events) if e.what == "made"]
        return {call: i for call, i in reversed(made) if call is not None}

    def resident_at(self, event: int) -> set[int]:
        """Return the values that had their bytes before an event."""
        found: set[int] = set()
        for e in self.events[:event]:
            if e.subject is None:
                continue
            if e.what in ARRIVES:
                found.add(e.subject)
            elif e.what in GOES:
                found.discard(e.subject)
        return found


def journal_of(g: Callable[..., Any], asker: str) -> Journal:
    transformed = transformed_of(g, asker)[0]
    ran = transformed.last_call
    if ran is None:
        raise ValueError(f"{asker}(g): {transformed._described} was not called yet. Call it first.")
    columns = ran.report.journal()
    if columns is None:
        raise ValueError(
            f"{asker}(g): the last call of {transformed._described} has written nothing down. Call "
            f"it again inside of `with rematfn.where():`, or transform it with where=True."
        )
    return Journal(transformed._described, stats(g), columns)


@functools.cache
def _place(number: int) -> Place:
    return Place(*_C.place(number)) if number else NOWHERE


@functools.cache
def _short(file: str) -> str:
    """Return a path as people write it: relative to where they are, or to where packages lie."""
    for folder in (os.getcwd(), sysconfig.get_path("purelib"), sysconfig.get_path("platlib")):
        if file.startswith(folder + os.sep):
            return file[len(folder) + 1 :]
    return file
