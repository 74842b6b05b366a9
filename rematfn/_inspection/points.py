# SPDX-License-Identifier: Apache-2.0
"""What a timeline shows: bytes at points, replays and transfers."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal

from .._transform.budget import format_bytes
from .journal import ARRIVES, GOES, Journal, Place

Over = Literal["operators", "time"]
_NAMED = 5  # tensors at the peak


@dataclasses.dataclass(frozen=True, kw_only=True)
class Point:
    """Bytes after something has happened, and what that was.

    Attributes:
        operator: How many operators the program had called.
        position: The same, between one operator and the next by what happens meanwhile.
        time: Seconds since the call began.
        forward: Bytes that the forward has made and that are resident.
        backward: The same of the backward.
        beside: Bytes that no operator has allocated, but for example a tensor made from a list.
        running: Bytes that the running operator has allocated on top, if it has just run.
        moved: Bytes in tiers.
        what: The operator, replay or transfer.
    """

    operator: int
    position: float
    time: float
    forward: int
    backward: int
    beside: int
    running: int
    moved: int
    what: str

    @property
    def used(self) -> int:
        """Bytes that count against the budget."""
        return self.forward + self.backward + self.beside + self.running


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mark:
    """A replay, or a transfer that begins.

    Attributes:
        kind: Which: a return is a transfer from a tier.
        operator: How many operators the program had called.
        position: The same, between one operator and the next by what happens meanwhile.
        time: Seconds since the call began.
        name: The operator that runs again, or that made what is moved, and where it is called.
        nbytes: Of what is moved; of a replay 0.
    """

    kind: Literal["replay", "move", "return"]
    operator: int
    position: float
    time: float
    name: str
    nbytes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tall:
    """A tensor that was resident when most was.

    Attributes:
        nbytes: Its bytes.
        operator: What made it.
        place: Where the program calls that.
    """

    nbytes: int
    operator: str
    place: Place


class Series:
    """What a call held, from its first operator to its last.

    Attributes:
        name: The call as it was written.
        budget: Bytes, or None.
        peak_bytes: The most that was in use.
        points: Bytes, whenever they have changed.
        marks: Replays and transfers.
        tallest: The largest tensors that were resident when most was.
        backward_at: The number of operators before the first of the backward; None: it has none.
    """

    def __init__(self, journal: Journal) -> None:
        self.name = journal.name
        self.budget = journal.stats.budget
        self.points: Sequence[Point] = _points(journal)
        self.marks: Sequence[Mark] = _marks(journal)
        at, self.peak_bytes = journal.peak
        resident = sorted(journal.resident_at(at), key=lambda i: -journal.values[i].nbytes)
        self.tallest: Sequence[Tall] = [
            Tall(
                nbytes=journal.values[i].nbytes,
                operator=journal.operator(journal.values[i].made_by),
                place=journal.made_at(i),
            )
            for i in resident[:_NAMED]
        ]
        self.backward_at = next((i for i, c in enumerate(journal.calls) if c.backward), None)

    @property
    def highest(self) -> int:
        """The most bytes that were resident or in tiers; at least the budget."""
        return max(*(p.used + p.moved for p in self.points), self.budget or 1, 1)

    def x(self, over: Over, at: Point | Mark) -> float:
        """Return where something stands over the operators or over time."""
        return at.position if over == "operators" else at.time

    def backward_from(self, over: Over) -> float | None:
        """Return where the backward begins; None if there is none."""
        begins = self.backward_at
        if begins is None:
            return None
        first = next((p for p in self.points if p.operator > begins), self.points[-1])
        return begins if over == "operators" else first.time


def _points(journal: Journal) -> list[Point]:
    nothing = dict.fromkeys(("forward", "backward", "beside", "running", "moved"), 0)
    points = [Point(operator=0, position=0, time=0, what="", **nothing)]
    held = {False: 0, True: 0}  # by whether the backward has made it
    away: set[int] = set()
    moved = 0
    resident: set[int] = set()
    names = [f"{journal.operator(i)} at {journal.place(i)}" for i in range(len(journal.calls))]
    positions = _positions(journal)
    for event, position in zip(journal.events, positions, strict=True):
        index = event.subject
        call = None if event.during is None else journal.calls[event.during]
        if index is not None and event.what != "replay":
            value = journal.values[index]
            backward = value.made_by is not None and journal.calls[value.made_by].backward
            if event.what in ARRIVES and index not in resident:
                resident.add(index)
                held[backward] += value.nbytes
            elif event.what in GOES and index in resident:
                resident.discard(index)
                held[backward] -= value.nbytes
            if event.what in ("moved", "turned back") and index not in away:
                away.add(index)
                moved += value.nbytes
            elif event.what in ("returned", "forgotten") and index in away:
                away.discard(index)
                moved -= value.nbytes
        beside = max(0, event.used - held[False] - held[True])
        number = 0 if event.during is None else event.during + 1
        # The first that an operator makes counts after it has run.
        running = 0
        first = event.what == "made" and points[-1].operator < number
        if first and call is not None and index is not None:
            running = max(0, call.peak - journal.values[index].nbytes)
        what = "" if event.during is None else names[event.during]
        if index is not None and event.what == "replay":
            what = f"replay of {names[index]}"
        elif index is not None and event.what not in ("made", "released", "left"):
            made_by = journal.values[index].made_by
            of = "a copy" if made_by is None else names[made_by]
            what = f"{event.what}: {of} ({format_bytes(journal.values[index].nbytes)})\nfor {what}"
        points.append(
            Point(
                operator=number,
                position=position,
                time=event.time,
                forward=held[False],
                backward=held[True],
                beside=beside,
                running=running,
                moved=moved,
                what=what,
            )
        )
    return points


def _positions(journal: Journal) -> list[float]:
    """Return for each event where it stands among the operators."""
    many = Counter(event.during for event in journal.events)
    seen: Counter[int | None] = Counter()
    found = []
    for event in journal.events:
        before = seen[event.during]
        seen[event.during] += 1
        found.append((event.during or 0) + before / many[event.during])
    return found


def _marks(journal: Journal) -> list[Mark]:
    marks = []
    kinds: dict[str, Any] = {"replay": "replay", "moved": "move", "returned": "return"}
    for event, position in zip(journal.events, _positions(journal), strict=True):
        if event.what not in kinds or event.subject is None:
            continue
        call: int | None = event.subject
        nbytes = 0
        if event.what != "replay":
            call = journal.values[event.subject].made_by
            nbytes = journal.values[event.subject].nbytes
        marks.append(
            Mark(
                kind=kinds[event.what],
                operator=0 if event.during is None else event.during + 1,
                position=position,
                time=event.time,
                name=f"{journal.operator(call)} at {journal.place(call)}",
                nbytes=nbytes,
            )
        )
    return marks
