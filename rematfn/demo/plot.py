# SPDX-License-Identifier: Apache-2.0
"""The demo's picture: memory over one step, eager and rematted, with the budget."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

MIB = 2**20


class Curve(Protocol):
    """Bytes after each allocator event of a step, and the seconds since its start."""

    @property
    def seconds(self) -> list[float]: ...  # noqa: D102

    @property
    def bytes(self) -> list[int]: ...  # noqa: D102

    @property
    def peak(self) -> int: ...  # noqa: D102


def plot_step(
    path: Path, eager: Curve, rematted: Curve, budget: int | None, held: Curve | None = None
) -> None:
    """Save a PNG of both curves, the budget line and what the disk ``held`` at ``path``."""
    figure = Figure(figsize=(9, 4.5), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)  # no pyplot: it would choose a window system
    axes = figure.add_subplot()
    for curve, name, colour in ((eager, "eager", "#8c8c8c"), (rematted, "rematted", "#1f6fb4")):
        seconds, mib = [0.0, *curve.seconds], [0.0, *(b / MIB for b in curve.bytes)]
        label = f"{name}, peak {curve.peak / MIB:.0f} MiB"
        axes.fill_between(seconds, mib, step="post", color=colour, alpha=0.2, linewidth=0)
        axes.step(seconds, mib, where="post", color=colour, linewidth=1.2, label=label)
    if held is not None and held.bytes:
        label = f"on the disk, peak {held.peak / MIB:.0f} MiB"
        mib = [nbytes / MIB for nbytes in held.bytes]
        axes.step(held.seconds, mib, where="post", color="#2e8b57", linewidth=1.2, label=label)
    if budget is not None:
        label = f"budget, {budget / MIB:.0f} MiB"
        axes.axhline(budget / MIB, color="#c43c39", linestyle="--", linewidth=1.2, label=label)
    axes.set_title("Memory of intermediates over one step (loss and gradients)")
    axes.set_xlabel("seconds since the step began")
    axes.set_ylabel("MiB live, parameters and results aside")
    axes.set_xlim(left=0)
    peaks = [eager.peak, rematted.peak, held.peak if held is not None else 0, budget or 0, 1]
    axes.set_ylim(bottom=0, top=1.12 * max(peaks) / MIB)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#dddddd", linewidth=0.6)
    axes.legend(frameon=False, loc="upper left")
    figure.savefig(path)
