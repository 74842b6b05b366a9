# SPDX-License-Identifier: Apache-2.0
"""Rows of what a call is found to have done, and how those of layers that are alike become one."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import TypeVar

from .journal import Place


@dataclasses.dataclass(frozen=True, kw_only=True)
class Group:
    """What became of the values that one module, or one line, has made.

    Attributes:
        name: The module's path, or the line.
        made_bytes: Bytes of all that it made, evicted or not.
        peak_bytes: Bytes of it that were resident when most was.
        evictions: How often a value of it was dropped or moved.
        evicted_bytes: Their bytes.
        moves: How many of them were moved.
        replays: How often an operator of it ran again.
        replayed_cost: What that cost, as a fraction of the program's cost.
    """

    name: str
    made_bytes: int = 0
    peak_bytes: int = 0
    evictions: int = 0
    evicted_bytes: int = 0
    moves: int = 0
    replays: int = 0
    replayed_cost: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Replayed:
    """An operator at one place of the program that ran again.

    Attributes:
        operator: Its name.
        place: Where the program calls it.
        calls: How many of its calls ran again; in a loop there are many.
        replays: How often they did.
        seconds: What that cost, as the level counts it.
        share: The same, in the program's cost.
    """

    operator: str
    place: Place
    calls: int
    replays: int
    seconds: float
    share: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evicted:
    """Values of an operator at one place of the program that were evicted.

    Attributes:
        operator: What made them.
        place: Where.
        values: How many.
        times: How often they went.
        moved: How many times of these they were moved, not dropped.
        unread: How many times of these nothing was to read them again, as far as was known: these
            cost nothing.
        nbytes: Bytes that went, counted each time.
        seconds: What the operator costs, on the average.
        score: What spoke against it where it was to be read again, the least of all times: the
            lowest score goes first. None: it never was. NaN: a function of the user's said so.
        room_for: The operator that most of them made room for.
    """

    operator: str
    place: Place
    values: int
    times: int
    moved: int
    unread: int
    nbytes: int
    seconds: float
    score: float | None
    room_for: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Need:
    """What an operator needs at once.

    Attributes:
        operator: Its name.
        place: Where the program calls it.
        nbytes: Its inputs that count and what it allocates: no budget below does.
        input_bytes: The inputs.
        ran: Whether it came to its end; one that did not fit has not.
    """

    operator: str
    place: Place
    nbytes: int
    input_bytes: int
    ran: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stayed:
    """Bytes that were in use when most were, and why.

    Attributes:
        reason: Why they were.
        values: How many tensors; 0: it is not known.
        nbytes: Their bytes.
        largest: What made the largest of them, and where.
    """

    reason: str
    values: int
    nbytes: int
    largest: str


def _starred(path: str) -> str:
    """Return a module's path with a star for each number."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", path)


_Row = TypeVar("_Row", Replayed, Evicted, Need)


def together(
    found: Sequence[_Row], rows: int, joined: Callable[[Sequence[_Row]], _Row]
) -> Sequence[_Row]:
    """Return rows with those joined whose modules' paths differ in numbers alone, if many."""
    if len(found) <= rows:
        return found
    groups: dict[tuple[str, Place], list[_Row]] = defaultdict(list)
    for row in found:
        place = row.place._replace(module=_starred(row.place.module))
        groups[row.operator, place].append(row)
    return [
        alike[0] if len(alike) == 1 else dataclasses.replace(joined(alike), place=place)
        for (_, place), alike in groups.items()
    ]


def replays_together(alike: Sequence[Replayed]) -> Replayed:
    """Return one row for several."""
    return dataclasses.replace(
        alike[0],
        calls=sum(r.calls for r in alike),
        replays=sum(r.replays for r in alike),
        seconds=sum(r.seconds for r in alike),
        share=sum(r.share for r in alike),
    )


def evictions_together(alike: Sequence[Evicted]) -> Evicted:
    """Return one row for several."""
    values = sum(e.values for e in alike)
    rooms: Counter[str] = Counter()
    for each in alike:
        rooms[each.room_for] += each.times
    return dataclasses.replace(
        alike[0],
        values=values,
        times=sum(e.times for e in alike),
        moved=sum(e.moved for e in alike),
        unread=sum(e.unread for e in alike),
        nbytes=sum(e.nbytes for e in alike),
        seconds=sum(e.seconds * e.values for e in alike) / values,
        score=min((e.score for e in alike if e.score is not None), default=None),
        room_for=rooms.most_common(1)[0][0],
    )


def needs_together(alike: Sequence[Need]) -> Need:
    """Return one row for several."""
    return alike[0]  # the largest


def alike_groups(groups: Sequence[Group]) -> list[Group]:
    """Return the groups with those together whose paths differ in numbers alone."""
    together: dict[str, Group] = {}
    for group in groups:
        name = _starred(group.name)
        before = together.get(name, Group(name=name))
        sums = {
            field.name: getattr(before, field.name) + getattr(group, field.name)
            for field in dataclasses.fields(Group)
            if field.name != "name"
        }
        together[name] = Group(name=name, **sums)
    return sorted(together.values(), key=lambda g: (-g.made_bytes, g.name))
