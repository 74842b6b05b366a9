# SPDX-License-Identifier: Apache-2.0
"""Tables as text, and what pictures begin with."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from .._transform.budget import BINARY

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_WIDEST = 72  # of a name, in characters


def table(
    title: str,
    note: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    most: int = sys.maxsize,
    names: Sequence[int] = (0,),
) -> str:
    """Return at most so many rows of text under a title and heads.

    Some columns are ``names``, which are cut in the middle if they are too long; the others are
    figures.
    """
    if not rows:
        return f"{title}: none"
    if len(rows) > most:
        title = f"{title}, {most} of {len(rows)}"
    cells = [columns]
    for row in rows[:most]:
        cells.append([shortened(x, _WIDEST) if i in names else x for i, x in enumerate(row)])
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [f"{title}  ({note})" if note else title]
    for row in cells:
        padded = [
            cell.ljust(w) if i in names else cell.rjust(w)
            for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  " + "  ".join(padded).rstrip())
    return "\n".join(lines)


def shortened(text: str, width: int) -> str:
    """Return at most `width` characters of a text, its middle left out."""
    if len(text) <= width:
        return text
    head = (width - 1) // 2
    return f"{text[:head]}…{text[len(text) - (width - 1 - head) :]}"


def unit_of(nbytes: int) -> tuple[str, int]:
    """Return the largest unit of which there are two or more, and its bytes."""
    return next(((u, s) for u, s in reversed(BINARY.items()) if nbytes >= 2 * s), ("B", 1))


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure, in inches."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)  # no pyplot: it would choose a window system
    return figure
