# SPDX-License-Identifier: Apache-2.0
"""Timelines and profiles as pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from .._transform.budget import BINARY, format_bytes
from .points import BANDS, MARKS, Over, Series
from .tables import shortened

if TYPE_CHECKING:
    from matplotlib.figure import Figure


BUDGET_COLOUR = "#d55e00"


def unit_of(nbytes: int) -> tuple[str, int]:
    """Return the largest unit of which there are two or more, and its bytes."""
    return next(((u, s) for u, s in reversed(BINARY.items()) if nbytes >= 2 * s), ("B", 1))


def _figure(width: float, height: float) -> Figure:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)  # no pyplot: it would choose a window system
    return figure


def draw(shown: Series, over: Over) -> Figure:
    """Return the picture of a timeline."""
    unit, size = unit_of(shown.highest)
    figure = _figure(10, 6.2)
    axes, rug, listed = figure.subplots(
        3, 1, sharex=False, gridspec_kw={"height_ratios": [8, 1.2, 2.2]}
    )
    x = [shown.x(over, p) for p in shown.points]
    axes.stackplot(
        x,
        [[getattr(p, band) / size for p in shown.points] for band in shown.bands],
        step="post",
        colors=[BANDS[band][1] for band in shown.bands],
        labels=[BANDS[band][0] for band in shown.bands],
        linewidth=0,
        zorder=2,
    )
    if shown.budget is not None:
        axes.axhline(
            shown.budget / size,
            color=BUDGET_COLOUR,
            linestyle="--",
            linewidth=1.4,
            label=f"budget, {format_bytes(shown.budget)}",
        )
    begins = shown.backward_from(over)
    if begins is not None:
        axes.axvspan(begins, x[-1], color="#f2f2f2", linewidth=0, zorder=0)
        axes.annotate(
            "backward",
            (begins, 1),
            (4, -3),
            xycoords=("data", "axes fraction"),
            textcoords="offset points",
            va="top",
            fontsize=8,
        )
    axes.set_title(
        shortened(f"{shown.name}: peak {format_bytes(shown.peak_bytes)}", 96), fontsize=10
    )
    axes.set_ylabel(f"{unit} resident" + (", and in tiers" if "moved" in shown.bands else ""))
    axes.set_ylim(0, 1.05 * shown.highest / size)
    axes.grid(axis="y", color="#ffffff", linewidth=0.5, alpha=0.6, zorder=3)
    figure.legend(
        *axes.get_legend_handles_labels(),
        loc="outside lower center",
        ncols=4,
        frameon=False,
        fontsize=8,
    )

    marks = shown.marks
    for row, (kind, points) in enumerate(marks.items()):
        at = [shown.x(over, point) for point in points]
        rug.vlines(at, row - 0.4, row + 0.4, color=MARKS[kind][1], linewidth=0.7)
    rug.set_yticks(range(len(marks)), [MARKS[kind][0] for kind in marks], fontsize=8)
    rug.set_ylim(max(len(marks), 1) - 0.5, -0.5)
    rug.set_xlabel("operators of the program" if over == "operators" else "seconds")
    for panel in (axes, rug):
        panel.set_xlim(0, x[-1] or 1)
        panel.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelbottom=False)

    listed.axis("off")
    lines = [
        f"{format_bytes(nbytes):>12}  {shortened(made, 116)}" for nbytes, made in shown.tallest
    ]
    listed.text(
        0,
        1,
        "\n".join(["the largest tensors at the peak", *lines]),
        va="top",
        family="monospace",
        fontsize=7.5,
        transform=listed.transAxes,
    )
    return figure


def draw_costs(
    name: str, curves: Mapping[str, Sequence[tuple[int, float]]], least: int, peak: int
) -> Figure:
    """Return the curves of a profile: by policy, times over budgets in bytes."""
    figure = _figure(7.5, 4.6)
    axes = figure.add_subplot()
    colours = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9"]
    markers = "osD^vP"
    unit, size = unit_of(peak)
    labels = [shortened(policy, 48) for policy in curves]
    for i, curve in enumerate(curves.values()):
        axes.plot(
            [budget / size for budget, _ in curve],
            [time for _, time in curve],
            marker=markers[i % len(markers)],
            color=colours[i % len(colours)],
            label=labels[i],
        )
    axes.axvline(least / size, color="#888888", linestyle=":", label="smallest budget")
    axes.axvline(peak / size, color="#888888", linewidth=1, label="peak without one")
    axes.set_title(shortened(f"{name}: predicted time within budgets", 80), fontsize=10)
    axes.set_xlabel(f"budget, {unit}")
    axes.set_ylabel("time, in multiples of a call without a budget")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=min(0.95, axes.get_ylim()[0]))
    axes.grid(color="#dddddd", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    columns = 120 // (max(map(len, labels), default=0) + 10)  # of so many letters has it room
    figure.legend(
        loc="outside lower center", ncols=max(1, min(3, columns)), frameon=False, fontsize=8
    )
    return figure
