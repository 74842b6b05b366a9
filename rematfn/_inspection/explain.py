# SPDX-License-Identifier: Apache-2.0
"""Why a call did what it did."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from .._transform.budget import format_bytes
from .findings import (
    Evicted,
    Group,
    Need,
    Replayed,
    Stayed,
    alike_groups,
    evictions_together,
    needs_together,
    replays_together,
    together,
)
from .journal import Event, Journal, Place, journal_of
from .stats import Stats
from .tables import Table, shortened

_NO_LINE = "(no line of the program)"
_NO_MODULE = "(in no module)"


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
            alike = self.modules if len(self.modules) <= rows else alike_groups(self.modules)
            found.append(_groups("Memory by module", "module", alike, rows))
        found.append(_groups("Memory by line", "line", self.lines, rows))
        replayed = together(self.replayed, rows, replays_together)
        replayed = sorted(replayed, key=lambda r: -r.seconds)
        evicted = together(self.evicted, rows, evictions_together)
        evicted = sorted(evicted, key=lambda e: -e.nbytes)
        needs = together(self.needs, 0, needs_together)
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
