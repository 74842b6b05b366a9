# SPDX-License-Identifier: Apache-2.0
"""Tables as text."""

import shutil
import sys
from collections.abc import Sequence

_WIDEST = 72  # of a name, in characters
_WIDEST_APART = 120  # of names that are not told apart in less


def table(
    title: str,
    note: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    most: int = sys.maxsize,
    names: Sequence[int] = (0,),
) -> str:
    """Return at most so many rows of text under a title and heads, for a terminal.

    Some columns are ``names``, which are cut in the middle if they are too long; the others are
    figures.
    """
    if not rows:
        return f"{title}: none"
    if len(rows) > most:
        title = f"{title}, {most} of {len(rows)}"
    rows = rows[:most]
    widest = min(_WIDEST, max(24, shutil.get_terminal_size((120, 24)).columns - 48))
    cells = [list(column) for column in zip(*rows, strict=True)]
    for i in names:
        cells[i] = _apart(cells[i], widest if i == 0 else _WIDEST)
    cut = list(zip(*cells, strict=True))
    widths = [max(map(len, column)) for column in zip(columns, *cut, strict=True)]
    lines = [f"{title}  ({note})" if note else title]
    for row in [columns, *cut]:
        padded = [
            cell.ljust(w) if i in names else cell.rjust(w)
            for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  " + "  ".join(padded).rstrip())
    return "\n".join(lines)


def _apart(names: Sequence[str], width: int) -> list[str]:
    """Return names cut to a width, or to more where different ones would become the same."""
    cut = [shortened(name, width) for name in names]
    while len(set(cut)) < len(set(names)) and width < _WIDEST_APART:
        width += 8
        cut = [shortened(name, width) for name in names]
    return cut


def shortened(text: str, width: int) -> str:
    """Return at most `width` characters of a text, its middle left out."""
    if len(text) <= width:
        return text
    head = (width - 1) // 2
    return f"{text[:head]}…{text[len(text) - (width - 1 - head) :]}"
