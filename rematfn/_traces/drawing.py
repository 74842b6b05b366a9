# SPDX-License-Identifier: Apache-2.0
"""A profile as a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from .._inspection.drawing import unit_of
from .._inspection.tables import shortened

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw_costs(
    name: str, curves: Mapping[str, Sequence[tuple[int, float]]], least: int, peak: int
) -> Figure:
    """Return the curves of a profile: by policy, times over budgets in bytes."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 4.6), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
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
