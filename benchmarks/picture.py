# SPDX-License-Identifier: Apache-2.0
"""The benchmark's pictures: what memory costs, ours and the peers'."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

_OURS = {"online": "#7fb2e5", "guided": "#1f6fb4"}
_MARKERS = "osD^v<>PX"


_PANELS = {
    "replayed cost": "cost of replays / cost of the program",
    "time ratio": "time / eager's time",
}


def draw(path: Path, name: str, record: Mapping[str, Any]) -> None:
    """Save a picture of a network's record: overhead over measured peak, by cost and by time."""
    figure = Figure(figsize=(9, 3.6), dpi=90, layout="constrained")
    FigureCanvasAgg(figure)  # no pyplot: it would choose a window system
    rows = [*record["budgets"], *record.get("peers", ())]
    columns = [column for column in _PANELS if any(column in row for row in rows)]
    entries: dict[str, Any] = {}
    for i, column in enumerate(columns):
        axes = figure.add_subplot(1, len(columns), i + 1)
        _panel(axes, record, column, _PANELS[column])
        handles, labels = axes.get_legend_handles_labels()
        entries |= dict(zip(labels, handles, strict=True))
    figure.legend(
        list(entries.values()), list(entries), loc="outside right upper", frameon=False, fontsize=7
    )
    figure.suptitle(f"{name}: {record['about'].replace('`', '')}", fontsize=9)
    figure.savefig(path)


def draw_link(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Save a picture of time, measured and foretold, and of what is done, over bandwidth."""
    figure = Figure(figsize=(9, 3.6), dpi=90, layout="constrained")
    FigureCanvasAgg(figure)
    columns = (
        ("time / eager's time", ("time / eager", "foretold / eager")),
        ("cost of replays / cost of the program", ("replayed cost",)),
        ("MiB out", ("MiB out",)),
    )
    for i, (label, names) in enumerate(columns):
        axes = figure.add_subplot(1, len(columns), i + 1)
        for name in names:
            points = [(row["bytes per second"], row[name]) for row in rows if name in row]
            if points:
                axes.plot(*zip(*points, strict=True), ".-", label=name)
        axes.set_xscale("log")
        axes.set_xlabel("bytes per second, each way")
        axes.set_ylabel(label)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(color="#dddddd", linewidth=0.6)
        if len(names) > 1:
            axes.legend(frameon=False, fontsize=7)
    figure.savefig(path)


def _panel(axes: Axes, record: Mapping[str, Any], column: str, label: str) -> None:
    whole = record["eager"]["peak"]
    for policy, colour in _OURS.items():
        points = sorted(
            (row["peak"] / whole, row[column])
            for row in record["budgets"]
            if row["policy"] == policy and column in row
        )
        if points:
            axes.plot(*zip(*points, strict=True), ".-", color=colour, label=f"rematfn, {policy}")
    for i, row in enumerate(record.get("peers", ())):
        if column in row:
            axes.plot(
                row["of eager's"],
                row[column],
                _MARKERS[i % len(_MARKERS)],
                color=f"C{1 + i % 9}",
                markersize=5,
                label=row["peer"],
            )
    axes.set_xlabel("measured peak / eager's")
    axes.set_ylabel(label)
    axes.set_xlim(left=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="#dddddd", linewidth=0.6)
