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
    figure = Figure(figsize=(9, 4.2), dpi=90, layout="constrained")
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
        list(entries.values()),
        list(entries),
        loc="outside lower center",
        ncols=4,
        frameon=False,
        fontsize=7,
    )
    figure.suptitle(f"{name}: {record['about'].replace('`', '')}", fontsize=9)
    figure.savefig(path)


def draw_link(path: Path, record: Mapping[str, Any]) -> None:
    """Save a picture over bandwidth: time, measured and predicted, and what was done for it."""
    figure = Figure(figsize=(9, 3.6), dpi=90, layout="constrained")
    FigureCanvasAgg(figure)
    alone, *rows = record["rows"]
    bandwidths = [row["MB/s"] for row in rows]
    time, moved, replayed = (figure.add_subplot(1, 3, i) for i in (1, 2, 3))
    for axes, column in ((moved, "MiB out"), (replayed, "replays")):
        axes.plot(bandwidths, [row.get(column) for row in rows], ".-", color=_OURS["guided"])
    ratios = [row["time / eager"] for row in rows]
    errors = (
        [row["time / eager"] - row["least"] for row in rows],
        [row["most"] - row["time / eager"] for row in rows],
    )
    time.errorbar(bandwidths, ratios, errors, fmt=".-", color=_OURS["guided"], label="measured")
    told = [row["predicted, s"] / row["eager, s"] for row in rows]
    time.plot(bandwidths, told, ".--", color=_OURS["online"], label="predicted")
    time.axhline(alone["time / eager"], color="#888888", linewidth=1, label="remat alone")
    replayed.axhline(alone["replays"], color="#888888", linewidth=1, label="remat alone")
    labels = ("time / eager's time", "MiB moved out", "operators replayed")
    for axes, label in zip((time, moved, replayed), labels, strict=True):
        axes.set_xscale("log")
        axes.axvline(record["disk"] / 1e6, color="#cc8888", linewidth=1, label="this disk")
        axes.set_xlabel("MB/s, each way")
        axes.set_ylabel(label)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(color="#dddddd", linewidth=0.6)
    for axes in (moved, replayed):
        axes.set_ylim(bottom=0)
    handles, names = time.get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=4, frameon=False, fontsize=7)
    figure.savefig(path)


def draw_models(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Save a picture of models beside their libraries' checkpointing: peaks, and times."""
    figure = Figure(figsize=(9, 1.2 + 0.36 * len(rows)), dpi=90, layout="constrained")
    FigureCanvasAgg(figure)
    names = [f"{row['model']} ({row['library']})" for row in rows]
    places = range(len(rows))
    panels = {
        "peak / plain peak": [
            ("library's own", [row["of plain's"] for row in rows]),
            ("rematfn", [row["ours"] / row["plain peak, MiB"] for row in rows]),
        ],
        "processor time / plain": [
            ("library's own", [row.get("library / plain") for row in rows]),
            ("rematfn", [row.get("ours / plain") for row in rows]),
        ],
        "rise of the resident set / plain": [
            ("library's own", [_share(row, "library") for row in rows]),
            ("rematfn", [_share(row, "ours") for row in rows]),
        ],
    }
    colours = ("#b9b9b9", _OURS["guided"])
    for i, (label, series) in enumerate(panels.items()):
        axes = figure.add_subplot(1, len(panels), i + 1)
        for shift, colour, (who, values) in zip((-0.2, 0.2), colours, series, strict=True):
            at = [(y + shift, v) for y, v in zip(places, values, strict=True) if v is not None]
            axes.barh([y for y, _ in at], [v for _, v in at], 0.4, color=colour, label=who)
        axes.axvline(1, color="#888888", linewidth=1)
        axes.set_xlabel(label)
        axes.set_yticks(places, names if i == 0 else [""] * len(rows), fontsize=8)
        axes.invert_yaxis()
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="x", color="#dddddd", linewidth=0.6)
        axes.set_axisbelow(True)
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=2, frameon=False, fontsize=8)
    figure.savefig(path)


def draw_summary(path: Path, timed: Sequence[Mapping[str, Any]]) -> None:
    """Save a picture of time over peak: each tool's, and rematfn's in the same peak."""
    figure = Figure(figsize=(9, 4.8), dpi=90, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for row in timed:
        ends = (row["time, tool"], row["time, rematfn"])
        axes.plot([row["peak"]] * 2, ends, color="#cccccc", linewidth=1, zorder=1)
    tools = list(dict.fromkeys(kind(row["tool"]) for row in timed))
    for tool, marker in zip(tools, _MARKERS, strict=False):
        found = [row for row in timed if kind(row["tool"]) == tool]
        at = [row["peak"] for row in found], [row["time, tool"] for row in found]
        axes.scatter(*at, s=28, marker=marker, color="#888888", label=tool, zorder=2)
    at = [row["peak"] for row in timed], [row["time, rematfn"] for row in timed]
    axes.scatter(*at, s=20, color=_OURS["guided"], label="rematfn, in that peak", zorder=3)
    axes.axhline(1, color="#888888", linewidth=1)
    axes.set_xlabel("peak / the plain step's")
    axes.set_ylabel("time / the plain step's")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="#dddddd", linewidth=0.6)
    figure.legend(loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    figure.savefig(path)


def kind(tool: str) -> str:
    """Return a tool's name without its setting; one name for all libraries' own checkpointing."""
    return "a library's own checkpointing" if tool.endswith("'s own") else tool.rpartition(", ")[0]


def _share(row: Mapping[str, Any], who: str) -> float | None:
    plain, other = row["resident, plain"], row[f"resident, {who}"]
    return None if plain is None or other is None else other / plain


def _panel(axes: Axes, record: Mapping[str, Any], column: str, label: str) -> None:
    whole = record["eager"]["peak"]
    for policy, colour in _OURS.items():
        found = [row for row in record["budgets"] if row["policy"] == policy and column in row]
        found.sort(key=lambda row: row["peak"])
        if found:
            at, values = [row["peak"] / whole for row in found], [row[column] for row in found]
            spread = _spread(found) if column == "time ratio" else None
            axes.errorbar(
                at, values, spread, fmt=".-", color=colour, capsize=2, label=f"rematfn, {policy}"
            )
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


def _spread(rows: Sequence[Mapping[str, Any]]) -> list[list[float]] | None:
    """Return how far the rounds lie below and above their medians; None if that was not noted."""
    if any("least" not in row for row in rows):
        return None
    below = [row["time ratio"] - row["least"] for row in rows]
    return [below, [row["most"] - row["time ratio"] for row in rows]]
