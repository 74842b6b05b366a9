# SPDX-License-Identifier: Apache-2.0
"""Why a call did what it did."""

from __future__ import annotations

import dataclasses
import math
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

from .._C import format_bytes
from ..errors import expect
from .journal import NOWHERE, Journal, Place, journal_of
from .tables import shortened, table

_By = Literal["module", "line", "operator"]


@dataclasses.dataclass(kw_only=True)
class Part:
    """What became of a part of the program: a module, a line, or an operator at one place.

    Attributes:
        operator: The operator's name; of a module and of a line, which have several, empty.
        place: Where: of a module its path alone, of a line all but that.
        made_bytes: Bytes of all that it made, evicted or not.
        peak_bytes: Bytes of it that were resident when most was.
        evictions: How often a value of it was dropped or moved.
        evicted_bytes: Their bytes, counted each time.
        moves: How many of them were moved.
        unread: How many of them nothing was to read again, as far as was known: these cost nothing.
        score: The lowest score of the others at their eviction; the lowest is evicted first. None:
            there were no others. NaN: the user's function returned that.
        replays: How often an operator of it ran again.
        replayed_cost: What that cost, as a fraction of the program's cost.
        needed_bytes: The most that an operator of it needs at once, its inputs that count and what
            it allocates: no smaller budget is enough.
        input_bytes: The inputs of that one.
        ran: Whether that one ran to its end; one that did not fit has not.
    """

    operator: str
    place: Place
    made_bytes: int = 0
    peak_bytes: int = 0
    evictions: int = 0
    evicted_bytes: int = 0
    moves: int = 0
    unread: int = 0
    score: float | None = None
    replays: int = 0
    replayed_cost: float = 0.0
    needed_bytes: int = 0
    input_bytes: int = 0
    ran: bool = True

    @property
    def name(self) -> str:
        """The operator and its place, the line, or the module's path."""
        if self.operator:
            return _at(self.operator, self.place)
        return str(self.place) if self.place.file else self.place.module or "(elsewhere)"


class Stayed(NamedTuple):
    """Bytes that were in use when most were: why, how many values, and what made the largest."""

    reason: str
    values: int
    nbytes: int
    largest: str


class Explanation:
    """What a call kept, evicted, replayed and moved, and why; :func:`explain` returns it.

    Attributes:
        name: The call as it was written.
        stats: Its figures.
        modules: By module path, what was made most of first; empty if the program has no modules.
        lines: By the line of the program.
        operators: By the operator and where it is called.
        stayed: What was in use when most was, by the reason; in all, the peak.
    """

    def __init__(self, journal: Journal, rows: int) -> None:
        self._journal = journal
        self._rows = rows
        self.name = journal.name
        self.stats = journal.stats
        self.modules = _parts(journal, "module")
        if all(part.place == NOWHERE for part in self.modules):
            self.modules = []
        self.lines = _parts(journal, "line")
        self.operators = _parts(journal, "operator")
        self.stayed = _stayed(journal)

    def __str__(self) -> str:
        rows = self._rows
        modules = self._alike(self.modules, "module")
        operators = self._alike(self.operators, "operator")
        tables = [
            *([_memory("Memory by module", "module", modules, rows)] if modules else []),
            _memory("Memory by line", "line", self.lines, rows),
            _table_of(
                "Evicted and replayed",
                "the lowest score is evicted first: cost over bytes and time until it is read",
                ("made by", "evicted", "times", "unread", "moved", "score", *_REPLAYED),
                sorted(
                    (p for p in operators if p.evictions or p.replays),
                    key=lambda p: (-p.replayed_cost, -p.evicted_bytes),
                ),
                rows,
            ),
            _table_of(
                "What sets the floor",
                "an operator's inputs and what it allocates are resident together",
                ("operator", "needs", "of it inputs"),
                sorted(operators, key=lambda p: -p.needed_bytes),
                min(rows, 5),
            ),
            table(
                "Resident at the peak",
                "arguments, parameters and captured tensors are not counted",
                ("why", "values", "bytes", "the largest"),
                [(s.reason, str(s.values), format_bytes(s.nbytes), s.largest) for s in self.stayed],
                names=(0, 3),
            ),
        ]
        return "\n\n".join([f"{self.name}\n{self.stats}", *tables])

    __repr__ = __str__  # a notebook shows it

    def _alike(self, parts: list[Part], by: _By) -> list[Part]:
        """Return the parts, or if many, with those as one whose paths differ in numbers alone."""
        return parts if len(parts) <= self._rows else _parts(self._journal, by, starred=True)


def explain(g: Callable[..., object], *, rows: int = 8) -> Explanation:
    """Say what the last call of ``g`` kept, evicted, replayed and moved, where, and why.

    The call has to have written it down: transform with ``remat(f, budget, where=True)``, or call
    inside of :func:`where`. Its backward counts as far as it has run. An operator of the backward
    is listed at the line whose gradient it computes. Of nested functions, the call of the outermost
    one is explained, with all inside.

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
        >>> sum(line.replays for line in why.lines) == why.stats.replays
        True
        >>> max(operator.needed_bytes for operator in why.operators) == why.stats.min_budget
        True
    """
    is_number = type(rows) is int and rows >= 1
    expect(is_number, "explain(g, rows=...)", "a whole number above 0", rows, ValueError)
    return Explanation(journal_of(g, "explain"), rows)


def _parts(journal: Journal, by: _By, *, starred: bool = False) -> list[Part]:
    """Return what became of each part of the program, what was made most of first.

    ``starred``: modules whose paths differ in numbers alone are one.
    """
    found: dict[tuple[str, Place], Part] = {}

    def part_of(call: int | None) -> Part:
        operator = journal.operator(call) if by == "operator" else ""
        place = journal.place(call)
        if starred:
            path = re.sub(r"(?<=\.)\d+(?=\.|$)", "*", place.module)
            place = place._replace(module=path)
        if by == "module":
            place = NOWHERE._replace(module=place.module)
        elif by == "line":
            place = place._replace(module="")
        if (operator, place) not in found:
            found[operator, place] = Part(operator=operator, place=place)
        return found[operator, place]

    cost = sum(call.cost for call in journal.calls) or 1.0
    for value in journal.values:
        part_of(value.made_by).made_bytes += value.nbytes
    for i in journal.resident_at(journal.peak[0]):
        part_of(journal.values[i].made_by).peak_bytes += journal.values[i].nbytes
    for event in journal.events:
        if event.what == "replay":
            part = part_of(event.subject)
            part.replays += 1
            if event.subject is not None:
                part.replayed_cost += journal.calls[event.subject].cost / cost
        elif event.what in ("dropped", "moved") and event.subject is not None:
            value = journal.values[event.subject]
            part = part_of(value.made_by)
            part.evictions += 1
            part.evicted_bytes += value.nbytes
            part.moves += event.what == "moved"
            if event.score == -math.inf:
                part.unread += 1
            else:
                part.score = event.score if part.score is None else min(event.score, part.score)
    for i, call in enumerate(journal.calls):
        part = part_of(i)
        if call.needed > part.needed_bytes:
            part.needed_bytes = call.needed
            part.input_bytes = sum(journal.values[read].nbytes for read in set(call.reads))
            part.ran = call.ended >= 0
    return sorted(found.values(), key=lambda part: (-part.made_bytes, part.name))


def _stayed(journal: Journal) -> list[Stayed]:
    event, most = journal.peak
    during = journal.events[event].during if event < len(journal.events) else None
    call = None if during is None else journal.calls[during]
    held: dict[str, list[tuple[int, str]]] = defaultdict(list)  # by reason: bytes, and their maker
    for index in journal.resident_at(event):
        value = journal.values[index]
        if value.nbytes > 0:
            maker = _at(journal.operator(value.made_by), journal.place(value.made_by))
            is_read = call is not None and index in call.reads
            held[_reason(journal, index, is_read, event)].append((value.nbytes, maker))
    rest = most - sum(nbytes for reason in held.values() for nbytes, _ in reason)
    if rest > 0 and call is not None and call.used + call.peak == most:
        allocates = min(rest, call.peak)
        rest -= allocates
        maker = _at(journal.operator(during), journal.place(during))
        held["what the operator that runs allocates"].append((allocates, maker))
    if rest > 0:
        held["beside operators"].append((rest, "-"))
    found = [
        Stayed(reason, len(of), sum(nbytes for nbytes, _ in of), max(of)[1])
        for reason, of in held.items()
    ]
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


_REPLAYED = ("replays", "of the cost")
_COLUMNS: dict[str, Callable[[Part], str]] = {
    "made": lambda part: format_bytes(part.made_bytes),
    "at the peak": lambda part: format_bytes(part.peak_bytes),
    "evicted": lambda part: format_bytes(part.evicted_bytes),
    "times": lambda part: str(part.evictions),
    "unread": lambda part: str(part.unread),
    "moved": lambda part: str(part.moves),
    "score": lambda part: "-" if part.score is None else f"{part.score:.2g}",
    "replays": lambda part: str(part.replays),
    "of the cost": lambda part: f"{part.replayed_cost:.1%}",
    "needs": lambda part: format_bytes(part.needed_bytes),
    "of it inputs": lambda part: format_bytes(part.input_bytes),
}


def _table_of(
    title: str, note: str, columns: Sequence[str], parts: Sequence[Part], rows: int
) -> str:
    """Return a table of parts: the first column is their names."""
    refused = " [did not run]" if "needs" in columns else ""
    cells = [
        [part.name + ("" if part.ran else refused), *(_COLUMNS[c](part) for c in columns[1:])]
        for part in parts
    ]
    return table(title, note, columns, cells, most=rows)


def _memory(title: str, what: str, parts: Sequence[Part], rows: int) -> str:
    columns = ("made", "at the peak", "evicted", "times", "moved", *_REPLAYED)
    return _table_of(title, "", (what, *columns), parts, rows)


def _at(operator: str, place: Place) -> str:
    operator = shortened(operator, 32)
    return f"{operator} at {place.brief}" if place.file else operator
