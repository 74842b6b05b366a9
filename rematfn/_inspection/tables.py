# SPDX-License-Identifier: Apache-2.0
"""Tables: as plain text, for `rich`, and as HTML."""

from __future__ import annotations

import dataclasses
import html
import shutil
from collections.abc import Sequence
from typing import Any

_WIDEST = 72  # of a first column, in characters


@dataclasses.dataclass(frozen=True)
class Table:
    """Rows of text under a title; the first column is a name, the others are figures.

    Attributes:
        title: What it shows.
        note: How to read it.
        columns: The heads.
        rows: As many texts each.
    """

    title: str
    note: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]

    def text(self) -> str:
        """Return the table for a terminal: names on the left are cut in the middle if too long."""
        if not self.rows:
            return f"{self.title}: none"
        widest = min(_WIDEST, max(24, shutil.get_terminal_size((120, 24)).columns - 48))
        cut = [[shortened(row[0], widest), *row[1:]] for row in self.rows]
        widths = [max(map(len, column)) for column in zip(self.columns, *cut, strict=True)]
        lines = [f"{self.title}  ({self.note})" if self.note else self.title]
        for row in [self.columns, *cut]:
            cells = [row[0].ljust(widths[0])]
            cells += [cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True)]
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
            f'<th style="{right if i else left}">{escape(c)}</th>'
            for i, c in enumerate(self.columns)
        )
        body = "".join(
            "<tr>"
            + "".join(
                f'<td style="{right if i else left}">{escape(c)}</td>' for i, c in enumerate(row)
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
            table.add_column(column, justify="right" if i else "left", overflow="fold")
        for row in self.rows:
            table.add_row(*map(Text, row))
        return table


def shortened(text: str, width: int) -> str:
    """Return at most `width` characters of a text, its middle left out."""
    if len(text) <= width:
        return text
    head = (width - 1) // 2
    return f"{text[:head]}…{text[len(text) - (width - 1 - head) :]}"
