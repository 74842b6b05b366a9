# SPDX-License-Identifier: Apache-2.0
"""Why a call did what it did."""

from __future__ import annotations

import dataclasses
import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from .._transform.budget import format_bytes
from .journal import Event, Journal, Place, journal_of
from .stats import Stats
from .tables import Table, shortened

_NO_LINE = "(no line of the program)"
_NO_MODULE = "(in no module)"


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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Explanation:
    """What a call kept, evicted, replayed and moved, and why; :func:`explain` returns it.

    It prints as text, shows as tables in a notebook, and in colour by ``rich.print``.

    Attributes:
        name: The call as it was written.
        stats: Its figures.
        modules: By module path, what was made most of first; empty if the program has no modules.
        lines: By the line of the program.
        replayed: Operators that ran again, the dearest first.
        evicted: What went, those first of which most bytes did.
        needs: Operators by what they need at once, the largest first: it sets the floor.
        stayed: What was in use when most was, by the reason; in all, the peak.
        replayed_cost: Of all replays, in the program's cost.
    """

    name: str
    stats: Stats
    modules: Sequence[Group]
    lines: Sequence[Group]
    replayed: Sequence[Replayed]
    evicted: Sequence[Evicted]
    needs: Sequence[Need]
    stayed: Sequence[Stayed]
    replayed_cost: float
    _rows: int = 8

    def tables(self) -> list[Table]:
        """Return what there is to show."""
        rows = self._rows
        found = []
        if self.modules:
            alike = self.modules if len(self.modules) <= rows else _alike(self.modules)
            found.append(_groups("Memory by module", "module", alike, rows))
        found.append(_groups("Memory by line", "line", self.lines, rows))
        replayed = _together(self.replayed, rows, _replays_together)
        replayed = sorted(replayed, key=lambda r: -r.seconds)
        evicted = _together(self.evicted, rows, _evictions_together)
        evicted = sorted(evicted, key=lambda e: -e.nbytes)
        needs = _together(self.needs, 0, _needs_together)
        found.append(
            Table(
                _title("Dearest replays", replayed, rows),
                f"{self.replayed_cost:.1%} of the program's cost in all",
                ("operator", "calls", "times", "cost", "of the program's"),
                [
                    (
                        _at(r.operator, r.place),
                        str(r.calls),
                        str(r.replays),
                        _ms(r.seconds),
                        f"{r.share:.1%}",
                    )
                    for r in replayed[:rows]
                ],
            )
        )
        found.append(
            Table(
                _title("Evicted", evicted, rows),
                "the lowest score goes first: cost over bytes and time until it is read",
                ("made by", "bytes", "times", "unread", "moved", "cost", "score", "room for"),
                [
                    (
                        _at(e.operator, e.place),
                        format_bytes(e.nbytes),
                        str(e.times),
                        str(e.unread),
                        str(e.moved),
                        _ms(e.seconds),
                        "-" if e.score is None else f"{e.score:.2g}",
                        shortened(e.room_for, 28),
                    )
                    for e in evicted[:rows]
                ],
                names=(0, 7),
            )
        )
        found.append(
            Table(
                "What sets the floor",
                "an operator's inputs and what it allocates are there at once: no smaller budget",
                ("operator", "needs", "of it inputs"),
                [
                    (
                        _at(n.operator, n.place) + ("" if n.ran else " [did not run]"),
                        format_bytes(n.nbytes),
                        format_bytes(n.input_bytes),
                    )
                    for n in needs[: min(rows, 5)]
                ],
            )
        )
        found.append(
            Table(
                "Resident at the peak",
                "arguments, parameters and captured tensors are not counted",
                ("why", "values", "bytes", "the largest"),
                [
                    (s.reason, str(s.values or "-"), format_bytes(s.nbytes), s.largest)
                    for s in self.stayed
                ],
                names=(0, 3),
            )
        )
        return found

    def __str__(self) -> str:
        return "\n\n".join([self._head(), *(table.text() for table in self.tables())])

    def _head(self) -> str:
        return f"{self.name}\n{self.stats}"

    def _repr_html_(self) -> str:
        from html import escape

        return f"<pre>{escape(self._head())}</pre>" + "".join(t.html() for t in self.tables())

    def __rich__(self) -> Any:
        """Return what `rich` shows."""
        from rich.console import Group as RichGroup

        return RichGroup(self._head(), *(table.rich() for table in self.tables()))


def explain(g: Callable[..., Any], *, rows: int = 8) -> Explanation:
    """Say what the last call of ``g`` kept, evicted, replayed and moved, where, and why.

    The call has to have written it down: transform with ``remat(f, budget, where=True)``, or call
    inside of :func:`where`. Its backward counts as far as it has run; an operator of the backward
    stands at the line whose gradient it makes. Of functions inside each other, the outermost's call
    is what is explained, with all inside.

    Args:
        g: What :func:`remat` or :func:`offload` returned, or what wraps it, as for :func:`stats`.
        rows: How many rows of each table are printed; the attributes have all.

    Raises:
        TypeError: ``g`` is no transformed function.
        ValueError: It was not called yet, or has written nothing down.

    Example:
        >>> import torch, rematfn
        >>> def loss(x):
        ...     return x.sin().cos().exp().sum()
        >>> g = rematfn.remat(torch.func.grad(loss), 3 * 4096, where=True)
        >>> _ = g(torch.ones(1024))
        >>> why = rematfn.explain(g)
        >>> sum(group.replays for group in why.lines) == why.stats.replays
        True
        >>> why.needs[0].nbytes <= why.stats.min_budget
        True
    """
    if isinstance(rows, bool) or not isinstance(rows, int) or rows < 1:
        raise ValueError(f"explain(g, rows=...): a whole number above 0 is needed, got {rows!r}.")
    journal = journal_of(g, "explain")
    cost = sum(call.cost for call in journal.calls) or 1.0
    return Explanation(
        name=journal.name,
        stats=journal.stats,
        modules=_grouped(journal, lambda place: place.module, cost, _NO_MODULE),
        lines=_grouped(
            journal,
            lambda place: f"{place.short} in {place.function}" if place.file else "",
            cost,
            _NO_LINE,
        ),
        replayed=_replayed(journal, cost),
        evicted=_evicted(journal),
        needs=_needs(journal),
        stayed=_stayed(journal),
        replayed_cost=sum(
            journal.calls[e.subject].cost
            for e in journal.events
            if e.what == "replay" and e.subject is not None
        )
        / cost,
        _rows=rows,
    )


def _grouped(
    journal: Journal, key: Callable[[Place], str], cost: float, unnamed: str
) -> list[Group]:
    groups: dict[str, dict[str, Any]] = defaultdict(lambda: defaultdict(int))
    for i, value in enumerate(journal.values):
        groups[key(journal.made_at(i))]["made_bytes"] += value.nbytes
    for i in journal.resident_at(journal.peak[0]):
        groups[key(journal.made_at(i))]["peak_bytes"] += journal.values[i].nbytes
    for event in journal.events:
        if event.what in ("dropped", "moved") and event.subject is not None:
            group = groups[key(journal.made_at(event.subject))]
            group["evictions"] += 1
            group["moves"] += event.what == "moved"
            group["evicted_bytes"] += journal.values[event.subject].nbytes
        elif event.what == "replay":
            group = groups[key(journal.place(event.subject))]
            group["replays"] += 1
            if event.subject is not None:
                group["replayed_cost"] += journal.calls[event.subject].cost / cost
    if unnamed == _NO_MODULE and not any(groups):
        return []
    found = [Group(name=name or unnamed, **fields) for name, fields in groups.items()]
    return sorted(found, key=lambda g: (-g.made_bytes, g.name))


def _replayed(journal: Journal, cost: float) -> list[Replayed]:
    groups: dict[tuple[str, Place], list[int]] = defaultdict(list)
    for event in journal.events:
        if event.what == "replay":
            groups[journal.operator(event.subject), journal.place(event.subject)].append(
                -1 if event.subject is None else event.subject
            )
    found = []
    for (operator, place), calls in groups.items():
        seconds = sum(journal.calls[call].cost for call in calls if call >= 0)
        found.append(
            Replayed(
                operator=operator,
                place=place,
                calls=len(set(calls)),
                replays=len(calls),
                seconds=seconds,
                share=seconds / cost,
            )
        )
    return sorted(found, key=lambda r: (-r.seconds, r.operator, r.place))


def _evicted(journal: Journal) -> list[Evicted]:
    groups: dict[tuple[str, Place], list[tuple[int, Event]]] = defaultdict(list)
    for event in journal.events:
        if event.what in ("dropped", "moved") and event.subject is not None:
            maker = journal.values[event.subject].made_by
            groups[journal.operator(maker), journal.place(maker)].append((event.subject, event))
    found = []
    for (operator, place), went in groups.items():
        values = {index for index, _ in went}
        makers = [m for index in values if (m := journal.values[index].made_by) is not None]
        read = [event.score for _, event in went if event.score != -math.inf]
        found.append(
            Evicted(
                operator=operator,
                place=place,
                values=len(values),
                times=len(went),
                moved=sum(event.what == "moved" for _, event in went),
                unread=len(went) - len(read),
                nbytes=sum(journal.values[index].nbytes for index, _ in went),
                seconds=sum(journal.calls[m].cost for m in makers) / max(len(makers), 1),
                score=min(read, default=None),
                room_for=Counter(journal.operator(e.during) for _, e in went).most_common(1)[0][0],
            )
        )
    return sorted(found, key=lambda e: (-e.nbytes, e.operator, e.place))


def _needs(journal: Journal) -> list[Need]:
    found: dict[tuple[str, Place], Need] = {}
    for index, call in enumerate(journal.calls):
        counted = {read for read in call.reads}
        need = Need(
            operator=journal.operator(index),
            place=journal.place(index),
            nbytes=call.needed,
            input_bytes=sum(journal.values[read].nbytes for read in counted),
            ran=call.ended >= 0,
        )
        key = (need.operator, need.place)
        if key not in found or found[key].nbytes < need.nbytes:
            found[key] = need
    return sorted(found.values(), key=lambda n: -n.nbytes)


def _stayed(journal: Journal) -> list[Stayed]:
    event, most = journal.peak
    during = journal.events[event].during if event < len(journal.events) else None
    running = set() if during is None else set(journal.calls[during].reads)
    resident = journal.resident_at(event)
    rest = most - sum(journal.values[index].nbytes for index in resident)
    by_reason: dict[str, list[int]] = defaultdict(list)
    for index in resident:
        if journal.values[index].nbytes == 0:
            continue
        by_reason[_reason(journal, index, index in running, event)].append(index)
    found = []
    for reason, indices in by_reason.items():
        largest = max(indices, key=lambda i: journal.values[i].nbytes)
        found.append(
            Stayed(
                reason=reason,
                values=len(indices),
                nbytes=sum(journal.values[i].nbytes for i in indices),
                largest=_at(
                    journal.operator(journal.values[largest].made_by), journal.made_at(largest)
                ),
            )
        )
    call = None if during is None else journal.calls[during]
    if rest > 0 and call is not None and call.used + call.peak == most:
        allocates = min(rest, call.peak)
        rest -= allocates
        found.append(
            Stayed(
                reason="what the operator that runs allocates",
                values=sum(value.made_by == during for value in journal.values),
                nbytes=allocates,
                largest=_at(journal.operator(during), journal.place(during)),
            )
        )
    if rest > 0:
        found.append(Stayed(reason="beside operators", values=0, nbytes=rest, largest="-"))
    return sorted(found, key=lambda s: -s.nbytes)


def _reason(journal: Journal, index: int, is_read: bool, event: int) -> str:
    value = journal.values[index]
    if is_read:
        return "read by the operator that runs"
    if value.raw:
        return "cannot go: uninitialised memory that is filled where no operator is seen"
    if value.made_by is None:
        return "cannot be dropped: a copy of what the program overwrites"
    if not value.has_producer:
        return "cannot be dropped: its operator is never replayed"
    if value.cut_at is not None and value.cut_at <= event:
        return "cannot be dropped: its address was given out, or its record was too long"
    if value.held:
        return "was to go, and its storage is held from outside"
    return "goes last: marked, or its policy keeps it" if value.kept else "could go at need"


def _starred(path: str) -> str:
    """Return a module's path with a star for each number."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", path)


_Row = TypeVar("_Row", Replayed, Evicted, Need)


def _together(
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


def _replays_together(alike: Sequence[Replayed]) -> Replayed:
    return dataclasses.replace(
        alike[0],
        calls=sum(r.calls for r in alike),
        replays=sum(r.replays for r in alike),
        seconds=sum(r.seconds for r in alike),
        share=sum(r.share for r in alike),
    )


def _evictions_together(alike: Sequence[Evicted]) -> Evicted:
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


def _needs_together(alike: Sequence[Need]) -> Need:
    return alike[0]  # the largest


def _alike(groups: Sequence[Group]) -> list[Group]:
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


def _groups(title: str, what: str, groups: Sequence[Group], rows: int) -> Table:
    return Table(
        _title(title, groups, rows),
        "",
        (what, "made", "at the peak", "evicted", "times", "moved", "replays", "of the cost"),
        [
            (
                g.name,
                format_bytes(g.made_bytes),
                format_bytes(g.peak_bytes),
                format_bytes(g.evicted_bytes),
                str(g.evictions),
                str(g.moves),
                str(g.replays),
                f"{g.replayed_cost:.1%}",
            )
            for g in groups[:rows]
        ],
    )


def _title(title: str, found: Sequence[object], rows: int) -> str:
    return f"{title}, {rows} of {len(found)}" if len(found) > rows else title


def _at(operator: str, place: Place) -> str:
    operator = shortened(operator, 32)
    return f"{operator} at {place.brief}" if place.file else operator


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"
