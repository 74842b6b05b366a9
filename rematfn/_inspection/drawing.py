# SPDX-License-Identifier: Apache-2.0
"""A timeline as a picture."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .._transform.budget import format_bytes
from .points import BANDS, MARKS, Over, Series
from .tables import shortened

if TYPE_CHECKING:
    from matplotlib.figure import Figure


# Those that Okabe and Ito (2008) chose for colour-blind readers.
COLOURS = {
    "forward": "#56b4e9",
    "backward": "#009e73",
    "beside": "#cc79a7",
    "running": "#e69f00",
    "moved": "#b0b0b0",
}
MARK_COLOURS = {"replay": "#000000", "moved": "#0072b2", "returned": "#cc79a7"}
BUDGET_COLOUR = "#d55e00"
UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


def unit_of(nbytes: int) -> tuple[str, int]:
    """Return the largest unit of which there are two or more, and its bytes."""
    return next(((u, s) for u, s in reversed(UNITS.items()) if nbytes >= 2 * s), ("B", 1))


def draw(shown: Series, over: Over) -> Figure:
    """Return the picture of a timeline."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    unit, size = unit_of(shown.highest)
    figure = Figure(figsize=(10, 6.2), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)  # no pyplot: it would choose a window system
    axes, rug, listed = figure.subplots(
        3, 1, sharex=False, gridspec_kw={"height_ratios": [8, 1.2, 2.2]}
    )
    x = [shown.x(over, p) for p in shown.points]
    axes.stackplot(
        x,
        [[getattr(p, band) / size for p in shown.points] for band in shown.bands],
        step="post",
        colors=[COLOURS[band] for band in shown.bands],
        labels=[BANDS[band] for band in shown.bands],
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
        rug.vlines(at, row - 0.4, row + 0.4, color=MARK_COLOURS[kind], linewidth=0.7)
    rug.set_yticks(range(len(marks)), [MARKS[kind] for kind in marks], fontsize=8)
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
