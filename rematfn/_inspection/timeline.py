# SPDX-License-Identifier: Apache-2.0
"""Memory over the operators of a call, and over time."""

from __future__ import annotations

import dataclasses
import gzip
import json
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from .._C import format_bytes
from .journal import ARRIVES, GOES, Journal, journal_of
from .tables import new_figure, shortened, unit_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# What is resident and what is in tiers, the lowest first; and what is marked below that. The
# colours are those that Okabe and Ito (2008) chose for colour-blind readers.
_BANDS: Final = {
    "forward": ("made by the forward", "#56b4e9"),
    "backward": ("made by the backward", "#009e73"),
    "beside": ("beside operators", "#cc79a7"),
    "running": ("the running operator's", "#e69f00"),
    "moved": ("in tiers", "#b0b0b0"),
}
_MARKS: Final = {
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


class Timeline:
    """What a call held, from its first operator to its last; :func:`timeline` returns it.

    It is drawn by :meth:`figure`, and written as a trace for Perfetto by :meth:`chrome_trace`;
    :meth:`save` does whichever the ending of a path asks for.

    Attributes:
        name: The call as it was written.
        budget: Bytes, or None.
        peak_bytes: The most that was in use.
        points: Bytes, whenever they have changed.
        backward_from: The position at which the backward begins; None if there is none.
    """

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self.name = journal.name
        self.budget = journal.stats.budget
        self.peak_bytes = journal.peak[1]
        self.points: Sequence[Point] = _points(journal)
        self._bands = [band for band in _BANDS if any(getattr(p, band) for p in self.points)]
        begins = next((i for i, call in enumerate(journal.calls) if call.backward), None)
        self.backward_from: float | None = None
        if begins is not None:
            after = (point for point in self.points if point.operator > begins)
            self.backward_from = next(after, self.points[-1]).position

    def figure(self) -> Figure:
        """Return the picture: bytes over the number of operators.

        Raises:
            ModuleNotFoundError: matplotlib is not installed.
        """
        highest = max(self.budget or 1, *(point.used + point.moved for point in self.points))
        unit, size = unit_of(highest)
        figure = new_figure(10, 6.2)
        axes, rug, listed = figure.subplots(3, 1, gridspec_kw={"height_ratios": [8, 1.2, 2.2]})
        x = [point.position for point in self.points]
        if self._bands:  # a call that was refused at once has held nothing
            axes.stackplot(
                x,
                [[getattr(p, band) / size for p in self.points] for band in self._bands],
                step="post",
                colors=[_BANDS[band][1] for band in self._bands],
                labels=[_BANDS[band][0] for band in self._bands],
                linewidth=0,
                zorder=2,
            )
        if self.budget is not None:
            label = f"budget, {format_bytes(self.budget)}"
            axes.axhline(self.budget / size, color="#d55e00", ls="--", lw=1.4, label=label)
        if self.backward_from is not None:
            axes.axvspan(self.backward_from, x[-1], color="#f2f2f2", linewidth=0, zorder=0)
            axes.text(
                self.backward_from,
                0.99,
                " backward",
                va="top",
                fontsize=8,
                transform=axes.get_xaxis_transform(),
            )
        title = shortened(f"{self.name}: peak {format_bytes(self.peak_bytes)}", 96)
        axes.set_title(title, fontsize=10)
        axes.set_ylabel(f"{unit} resident" + (", and in tiers" if "moved" in self._bands else ""))
        axes.set_ylim(0, 1.05 * highest / size)
        axes.grid(axis="y", color="#ffffff", linewidth=0.5, alpha=0.6, zorder=3)
        named = axes.get_legend_handles_labels()
        figure.legend(*named, loc="outside lower center", ncols=4, frameon=False, fontsize=8)

        kinds = [kind for kind in _MARKS if any(point.kind == kind for point in self.points)]
        for row, kind in enumerate(kinds):
            at = [point.position for point in self.points if point.kind == kind]
            rug.vlines(at, row - 0.4, row + 0.4, color=_MARKS[kind][1], linewidth=0.7)
        rug.set_yticks(range(len(kinds)), [_MARKS[kind][0] for kind in kinds], fontsize=8)
        rug.set_ylim(max(len(kinds), 1) - 0.5, -0.5)
        rug.set_xlabel("operators of the program")
        for panel in (axes, rug):
            panel.set_xlim(0, x[-1] or 1)
            panel.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelbottom=False)

        listed.axis("off")
        journal = self._journal
        largest = sorted(
            (journal.values[i] for i in journal.resident_at(journal.peak[0])),
            key=lambda value: -value.nbytes,
        )
        lines = [
            f"{format_bytes(value.nbytes):>12}  {shortened(journal.named(value.made_by), 116)}"
            for value in largest[:_NAMED]
        ]
        text = "\n".join(["the largest tensors at the peak", *lines])
        style = {"va": "top", "family": "monospace", "fontsize": 7.5}
        listed.text(0, 1, text, transform=listed.transAxes, **style)
        return figure

    def chrome_trace(self, beside: str | Path | None = None) -> dict[str, Any]:
        """Return the events of a Chrome trace, which Perfetto shows over time.

        Args:
            beside: A trace that :mod:`torch.profiler` has exported of the same call. What it has is
                in the result as well, on the same clock.
        """
        events = _trace_events(self)
        if beside is None:
            return {"traceEvents": events, "displayTimeUnit": "ms"}
        path = Path(beside)
        text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        found: dict[str, Any] = json.loads(text)
        if not isinstance(found, dict) or "traceEvents" not in found:
            raise ValueError(
                f"chrome_trace(beside={str(path)!r}): that is no trace of torch.profiler's."
            )
        base = found.get("baseTimeNanoseconds", 0) / 1e3
        begun = self._journal.begun / 1e3 - base
        for event in events:
            if "ts" in event:
                event["ts"] += begun
        found["traceEvents"] = [*found["traceEvents"], *events]
        return found

    def save(self, path: str | Path) -> None:
        """Write the picture or the trace, by the ending of ``path``.

        Args:
            path: ``.png``, ``.svg`` and ``.pdf`` are pictures, ``.json`` and ``.json.gz`` are
                Chrome traces.
        """
        path = Path(path)
        if path.name.endswith((".json", ".json.gz")):
            text = json.dumps(self.chrome_trace()).encode()
            path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
        elif path.suffix in (".png", ".svg", ".pdf"):
            self.figure().savefig(path)
        else:
            raise ValueError(
                f"save({str(path)!r}): it must end in .png, .svg, .pdf, .json or .json.gz."
            )

    def __repr__(self) -> str:
        return (
            f"<Timeline of {self.name}: {len(self._journal.calls)} operators, "
            f"peak {format_bytes(self.peak_bytes)}>"
        )


def timeline(g: Callable[..., Any]) -> Timeline:
    """Return how many bytes the last call of ``g`` held, over its operators and over time.

    The call has to have written it down, as for :func:`explain`.

    Args:
        g: What :func:`remat` or :func:`offload` returned, or what wraps it, as for :func:`stats`.

    Raises:
        TypeError: ``g`` is no transformed function.
        ValueError: It was not called yet, or has written nothing down.

    Example:
        >>> import torch, rematfn
        >>> def loss(x):
        ...     return x.sin().cos().exp().sum()
        >>> g = rematfn.remat(torch.func.grad(loss), 3 * 4096, where=True)
        >>> _ = g(torch.ones(1024))
        >>> shown = rematfn.timeline(g)
        >>> max(point.used for point in shown.points) <= 3 * 4096
        True
    """
    return Timeline(journal_of(g, "timeline"))


def _points(journal: Journal) -> list[Point]:
    points = [Point()]
    held = {False: 0, True: 0}  # by whether the backward has made it
    resident: set[int] = set()
    away: set[int] = set()
    moved = 0
    names = [journal.named(i) for i in range(len(journal.calls))]
    many = Counter(event.during for event in journal.events)
    seen: Counter[int | None] = Counter()
    for i, event in enumerate(journal.events):
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
            if during is not None and journal.first_made.get(during) == i:
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


def _trace_events(shown: Timeline) -> list[dict[str, Any]]:
    journal = shown._journal
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "args": {"name": shown.name}},
    ]
    for i, name in enumerate(("operators", "replays", "transfers")):
        events.append({"ph": "M", "name": "thread_name", "tid": i, "args": {"name": name}})
    for i, call in enumerate(journal.calls):
        ended = call.begun if call.ended < 0 else call.ended
        events.append(
            {
                "ph": "X",
                "name": journal.operator(i),
                "cat": "backward" if call.backward else "forward",
                "tid": 0,
                "ts": call.begun * 1e6,
                "dur": (ended - call.begun) * 1e6,
                "args": {"place": str(journal.place(i)), "needs": format_bytes(call.needed)},
            }
        )
    replay: dict[str, Any] = {}
    for point in shown.points:
        here = {"ts": point.time * 1e6}
        of_point = {"name": point.what, "cat": point.kind, **here}
        if point.kind == "replay":
            replay = {**of_point, "ph": "X", "tid": 1, "dur": 0.0}
            events.append(replay)
        elif point.kind == "replayed" and replay:  # it is over when the last that it makes is there
            replay["dur"] = here["ts"] - replay["ts"]
        elif point.kind in _MARKS:
            events.append({**of_point, "ph": "i", "s": "t", "tid": 2})
        bands = {band: getattr(point, band) for band in shown._bands}
        if "moved" in bands:
            tiers = {"moved": bands.pop("moved")}
            events.append({"ph": "C", "name": "bytes in tiers", **here, "args": tiers})
        events.append({"ph": "C", "name": "resident bytes", **here, "args": bands})
    return [{"pid": "rematfn", **event} for event in events]
