# SPDX-License-Identifier: Apache-2.0
"""Tables: as plain text, for `rich`, and as HTML."""

from __future__ import annotations

import dataclasses
import html
import shutil
from collections.abc import Sequence
from typing import Any

_WIDEST = 72  # of a name, in characters
_WIDEST_APART = 120  # of names that are not told apart in less


@dataclasses.dataclass(frozen=True)
class Table:
    """Rows of text under a title.

    Attributes:
        title: What it shows.
        note: How to read it.
        columns: The heads.
        rows: As many texts each.
        names: Which columns are names; the others are figures.
    """

    title: str
    note: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    names: Sequence[int] = (0,)

    def text(self) -> str:
        """Return the table for a terminal: names are cut in the middle if too long."""
        if not self.rows:
            return f"{self.title}: none"
        widest = min(_WIDEST, max(24, shutil.get_terminal_size((120, 24)).columns - 48))
        columns = [list(column) for column in zip(*self.rows, strict=True)]
        for i in self.names:
            columns[i] = _apart(columns[i], widest if i == 0 else _WIDEST)
        cut = list(zip(*columns, strict=True))
        widths = [max(map(len, column)) for column in zip(self.columns, *cut, strict=True)]
        lines = [f"{self.title}  ({self.note})" if self.note else self.title]
        for row in [self.columns, *cut]:
            cells = [
                cell.ljust(w) if i in self.names else cell.rjust(w)
                for i, (cell, w) in enumerate(zip(row, widths, strict=True))
            ]
            lines.append("  " + "  ".join(cells).rstrip())
        return "\n".join(lines)

    def html(self) -> str:
        """Return the table for a notebook."""
        escape = html.escape
        if not self.rows:
            return f"<p><b>{escape(self.title)}</b>: none</p>"
        right = "text-align:right;padding:1px 10px;white-space:nowrap"
        left = "text-align:left;padding:1px 10px;overflow-wrap:anywhere"
        head = "".join(
            f'<th style="{left if i in self.names else right}">{escape(c)}</th>'
            for i, c in enumerate(self.columns)
        )
        body = "".join(
            "<tr>"
            + "".join(
                f'<td style="{left if i in self.names else right}">{escape(c)}</td>'
                for i, c in enumerate(row)
            )
            + "</tr>"
            for row in self.rows
        )
        note = f"<br><small>{escape(self.note)}</small>" if self.note else ""
        return (
            f"<p><b>{escape(self.title)}</b>{note}</p>"
            f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
        )

    def rich(self) -> Any:
        """Return the table as one of `rich`, which is to be installed."""
        from rich.table import Table as RichTable
        from rich.text import Text

        table = RichTable(title=self.title, caption=self.note or None, title_justify="left")
        for i, column in enumerate(self.columns):
            table.add_column(
                column, justify="left" if i in self.names else "right", overflow="fold"
            )
        for row in self.rows:
            table.add_row(*map(Text, row))
        return table


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
