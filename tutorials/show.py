# SPDX-License-Identifier: Apache-2.0
"""What the notebooks show things with: lines of the sources, tables, and one palette.

To be imported before torch, whose profiler prints to the terminal otherwise.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

os.environ.setdefault("KINETO_LOG_LEVEL", "99")

import matplotlib as mpl
from cycler import cycler
from IPython.display import Markdown, display

ROOT = Path(__file__).resolve().parents[1]
LANGUAGES = {".py": "python", ".h": "cpp", ".cpp": "cpp", ".md": "markdown"}

# Okabe and Ito's colours, which nobody takes for each other.
mpl.rcParams["axes.prop_cycle"] = cycler(
    color=["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"]
)
mpl.rcParams["axes.spines.top"] = mpl.rcParams["axes.spines.right"] = False


def quote(path: str, first: str, last: str | None = None) -> None:
    """Show a file of this repository, from the line with `first` to the next one with `last`.

    Without `last`, that line alone. What is not there raises, so that a quotation cannot go stale.
    """
    lines = (ROOT / path).read_text(encoding="utf-8").splitlines()
    begin = _find(path, lines, first, 0)
    end = begin if last is None else _find(path, lines, last, begin)
    body = "\n".join(lines[begin : end + 1])
    where = f"`{path}`, line {begin + 1}" + (f" to {end + 1}" if end > begin else "")
    language = LANGUAGES.get(Path(path).suffix, "")
    display(Markdown(f"{where}\n\n```{language}\n{body}\n```"))


def table(rows: Iterable[Sequence[object]], headers: Sequence[object]) -> None:
    """Show rows as a table; cells may hold Markdown."""
    lines = [headers, ["---"] * len(headers), *rows]
    display(Markdown("\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)))


def _find(path: str, lines: Sequence[str], text: str, begin: int) -> int:
    for number in range(begin, len(lines)):
        if text in lines[number]:
            return number
    raise ValueError(f"{path}: no line from {begin + 1} on contains {text!r}")
