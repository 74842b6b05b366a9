# SPDX-License-Identifier: Apache-2.0
"""What a timeline shows: bytes at points, each with what has happened there."""

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Final, Literal

from .._transform.budget import format_bytes
from .journal import ARRIVES, GOES, Journal

Over = Literal["operators", "time"]
# What is resident and what is in tiers, the lowest first; and what is marked below that. The
# colours are those that Okabe and Ito (2008) chose for colour-blind readers.
BANDS: Final = {
    "forward": ("made by the forward", "#56b4e9"),
    "backward": ("made by the backward", "#009e73"),
    "beside": ("beside operators", "#cc79a7"),
    "running": ("the running operator's", "#e69f00"),
    "moved": ("in tiers", "#b0b0b0"),
}
MARKS: Final = {
    "replay": ("replays", "#000000"),
    "moved": ("moves out", "#0072b2"),
    "returned": ("returns", "#cc79a7"),
}
_NAMED = 5  # tensors at the peak


@dataclasses.dataclass(frozen=True, kw_only=True)
class Point:
    """Bytes after something has happened, and what that was.

    Attributes:
        kind: What sort of thing: a value was made, dropped, moved, ..., or an operator replayed.
        what: The operator, replay or transfer.
        operator: How many operators the program had called.
        position: The same, between one operator and the next by what happens meanwhile.
        time: Seconds since the call began.
        forward: Bytes that the forward has made and that are resident.
        backward: The same of the backward.
        beside: Bytes that no operator has allocated, but for example a tensor made from a list.
        running: Bytes that the running operator has allocated on top, if it has just run.
        moved: Bytes in tiers.
    """

    kind: str = ""
    what: str = "the call begins"
    operator: int = 0
    position: float = 0.0
    time: float = 0.0
    forward: int = 0
    backward: int = 0
    beside: int = 0
    running: int = 0
    moved: int = 0

    @property
    def used(self) -> int:
        """Bytes that count against the budget."""
        return self.forward + self.backward + self.beside + self.running


class Series:
    """What a call held, from its first operator to its last.

    Attributes:
        name: The call as it was written.
        budget: Bytes, or None.
        peak_bytes: The most that was in use.
        points: Bytes, whenever they have changed.
        bands: Of the bands which there are, the lowest first.
        marks: Replays and transfers, by kind.
        highest: The most bytes that were resident or in tiers; at least the budget.
        tallest: The largest tensors that were resident when most was: bytes, and what made them.
    """

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self.name = journal.name
        self.budget = journal.stats.budget
        self.points: Sequence[Point] = _points(journal)
        self.bands = [band for band in BANDS if any(getattr(p, band) for p in self.points)]
        marks = {kind: [p for p in self.points if p.kind == kind] for kind in MARKS}
        self.marks = {kind: points for kind, points in marks.items() if points}
        self.highest = max(*(p.used + p.moved for p in self.points), self.budget or 1, 1)
        at, self.peak_bytes = journal.peak
        resident = [journal.values[i] for i in journal.resident_at(at)]
        resident.sort(key=lambda value: -value.nbytes)
        self.tallest = [(value.nbytes, journal.named(value.made_by)) for value in resident[:_NAMED]]
        begins = next((i for i, call in enumerate(journal.calls) if call.backward), None)
        self._backward = None
        if begins is not None:
            after = (point for point in self.points if point.operator > begins)
            self._backward = next(after, self.points[-1])

    def x(self, over: Over, at: Point) -> float:
        """Return where something stands over the operators or over time."""
        return at.position if over == "operators" else at.time

    def backward_from(self, over: Over) -> float | None:
        """Return where the backward begins; None if there is none."""
        return None if self._backward is None else self.x(over, self._backward)


def _points(journal: Journal) -> list[Point]:
    points = [Point()]
    held = {False: 0, True: 0}  # by whether the backward has made it
    resident: set[int] = set()
    away: set[int] = set()
    moved = 0
    names = [journal.named(i) for i in range(len(journal.calls))]
    many = Counter(event.during for event in journal.events)
    seen: Counter[int | None] = Counter()
    for event in journal.events:
        index, during = event.subject, event.during
        number = 0 if during is None else during + 1
        what = "" if during is None else names[during]
        running = 0
        if index is not None and event.what == "replay":
            what = f"replay of {names[index]}"
        elif index is not None:
            value = journal.values[index]
            made_by = value.made_by
            backward = made_by is not None and journal.calls[made_by].backward
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
            # The first that an operator makes counts after it has run.
            if event.what == "made" and during is not None and points[-1].operator < number:
                running = max(0, journal.calls[during].peak - value.nbytes)
            if event.what not in ("made", "released", "left"):
                of = "a copy" if made_by is None else names[made_by]
                what = f"{event.what}: {of} ({format_bytes(value.nbytes)})\nfor {what}"
        points.append(
            Point(
                kind=event.what,
                what=what,
                operator=number,
                position=(during or 0) + seen[during] / many[during],
                time=event.time,
                forward=held[False],
                backward=held[True],
                beside=max(0, event.used - held[False] - held[True]),
                running=running,
                moved=moved,
            )
        )
        seen[during] += 1
    return points
