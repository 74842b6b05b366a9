# SPDX-License-Identifier: Apache-2.0
"""Memory over the operators of a call, and over time."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .._transform.budget import format_bytes
from ..errors import expect
from .drawing import draw
from .journal import journal_of
from .page import page
from .points import MARKS, Over, Series

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Timeline(Series):
    """What a call held, from its first operator to its last; :func:`timeline` returns it.

    It is drawn by :meth:`figure`, shown as a page by :meth:`html`, and written as a trace for
    Perfetto by :meth:`chrome_trace`; :meth:`save` does whichever the ending of a path asks for.
    """

    def figure(self, over: Over = "operators") -> Figure:
        """Return the picture, over the number of operators or over seconds.

        Raises:
            ModuleNotFoundError: matplotlib is not installed.
        """
        return draw(self, _checked(over))

    def html(self, over: Over = "operators") -> str:
        """Return a page that stands alone: to hover over, to zoom in, to search.

        Raises:
            ModuleNotFoundError: plotly is not installed.
        """
        return page(self, _checked(over))

    def chrome_trace(self, beside: str | Path | None = None) -> dict[str, Any]:
        """Return the events of a Chrome trace, which Perfetto shows.

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

    def save(self, path: str | Path, over: Over = "operators") -> None:
        """Write the picture, the page or the trace, by the ending of ``path``.

        Args:
            path: ``.png``, ``.svg`` and ``.pdf`` are pictures, ``.html`` is a page, ``.json`` and
                ``.json.gz`` are Chrome traces.
            over: Of pictures and pages: the number of operators, or seconds.
        """
        path = Path(path)
        if path.suffix == ".html":
            path.write_text(self.html(over), encoding="utf-8")
        elif path.name.endswith((".json", ".json.gz")):
            text = json.dumps(self.chrome_trace()).encode()
            path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
        elif path.suffix in (".png", ".svg", ".pdf"):
            self.figure(over).savefig(path)
        else:
            raise ValueError(
                f"save({str(path)!r}): it must end in .png, .svg, .pdf, .html, .json or .json.gz."
            )

    def __repr__(self) -> str:
        return (
            f"<Timeline of {self.name}: {len(self._journal.calls)} operators, "
            f"peak {format_bytes(self.peak_bytes)}>"
        )


def timeline(g: Callable[..., Any]) -> Timeline:
    """Return how many bytes the last call of ``g`` held, over its operators and over time.

    The call has to have written it down: transform with ``remat(f, budget, where=True)``, or call
    inside of :func:`where`. Its backward counts as far as it has run.

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


def _checked(over: Over) -> Over:
    expect(
        over in ("operators", "time"), "timeline", 'over="operators" or "time"', over, ValueError
    )
    return over


def _trace_events(shown: Timeline) -> list[dict[str, Any]]:
    journal = shown._journal
    process = "rematfn"
    rows = ["operators", "replays", "transfers"]
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": process, "args": {"name": shown.name}},
        *(
            {"ph": "M", "name": "thread_name", "pid": process, "tid": i, "args": {"name": name}}
            for i, name in enumerate(rows)
        ),
    ]
    for i, call in enumerate(journal.calls):
        ended = call.begun if call.ended < 0 else call.ended
        events.append(
            {
                "ph": "X",
                "name": journal.operator(i),
                "cat": "backward" if call.backward else "forward",
                "pid": process,
                "tid": 0,
                "ts": call.begun * 1e6,
                "dur": (ended - call.begun) * 1e6,
                "args": {"place": str(journal.place(i)), "needs": format_bytes(call.needed)},
            }
        )
    replay: dict[str, Any] = {}
    for point in shown.points:
        here = {"pid": process, "ts": point.time * 1e6}
        of_point = {"name": point.what, "cat": point.kind, **here}
        if point.kind == "replay":
            replay = {**of_point, "ph": "X", "tid": 1, "dur": 0.0}
            events.append(replay)
        elif point.kind == "replayed" and replay:  # it is over when the last that it makes is there
            replay["dur"] = here["ts"] - replay["ts"]
        elif point.kind in MARKS:
            events.append({**of_point, "ph": "i", "s": "t", "tid": 2})
        bands = {band: getattr(point, band) for band in shown.bands}
        tiers = {"moved": bands.pop("moved")} if "moved" in bands else {}
        events.append({"ph": "C", "name": "resident bytes", **here, "args": bands})
        if tiers:
            events.append({"ph": "C", "name": "bytes in tiers", **here, "args": tiers})
    return events
