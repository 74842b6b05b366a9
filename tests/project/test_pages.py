# SPDX-License-Identifier: Apache-2.0
"""Every Python block of README and of the pages in `docs/` runs.

A page is one program: its ``python`` blocks, in one namespace. What a block needs, and what is
checked after it, is in comments, which no reader sees::

    <!-- run
    x = torch.ones(4)
    -->

A comment before a block says more of it. ``<!-- inside -->``: it runs under `remat`, with
everything evicted after every operator, and each replay is compared.
``<!-- raises ReplayError -->``: it ends with that. ``<!-- not run: the reason -->``: none can run
it. `test_how_to.py` has the pages whose blocks print.
"""

import builtins
import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import rematfn
from rematfn.testing import EvictEverything

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
ELSEWHERE = {"how-to", "comparison.md", "migration.md"}  # test_how_to.py runs these
PAGES = [
    ROOT / "README.md",
    *(p for p in sorted(DOCS.rglob("*.md")) if p.relative_to(DOCS).parts[0] not in ELSEWHERE),
]
PIECE = re.compile(
    r"^<!-- run\n(?P<hidden>.*?)^-->$"
    r"|^(?:<!-- (?:(?P<inside>inside)|raises (?P<error>\w+)|not run: (?P<why>.+?)) -->\n\n)?"
    r"```python\n(?P<code>.*?)^```$(?:\n\n```text\n(?P<printed>.*?)^```$)?",
    re.M | re.S,
)
MARK = re.compile(r"^<!-- (?:run|inside|raises|not run)\b", re.M)
MOST_NOT_RUN = 3


class Piece(NamedTuple):
    """Code of a page, with empty lines before it: its lines have the numbers of the page's."""

    code: str
    is_hidden: bool
    is_inside: bool
    error: str | None
    why_not: str | None
    printed: str | None  # in a block of text right after it


def pieces(text: str) -> Iterator[Piece]:
    for found in PIECE.finditer(text):
        name = "code" if found["hidden"] is None else "hidden"
        above = "\n" * text.count("\n", 0, found.start(name))
        inside = found["inside"] is not None
        rest = found["error"], found["why"], found["printed"]
        yield Piece(above + found[name], name == "hidden", inside, *rest)


def error_named(name: str) -> type[BaseException]:
    found = getattr(rematfn, name, None) or getattr(builtins, name)
    assert issubclass(found, BaseException)
    return found


def error_of(f: Any, *args: Any) -> Exception | None:
    """Return what the call raises, for pages to look at."""
    try:
        f(*args)
    except Exception as error:
        return error.with_traceback(None)
    return None


def run(text: str, name: str) -> None:
    namespace: dict[str, Any] = {"__name__": "page", "error_of": error_of}
    for piece in pieces(text):
        if piece.why_not is not None:
            continue
        execute = functools.partial(exec, compile(piece.code, name, "exec"), namespace)
        if piece.is_inside:
            rematfn.remat(execute, policy=EvictEverything(), verify=True)()
        elif piece.error is None:
            execute()
        else:
            with pytest.raises(error_named(piece.error)):
                execute()


@pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")  # torch 2.12
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run(page.read_text(encoding="utf-8"), str(page))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_marks_are_where_they_are_read(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    used = sum(bool(p.is_hidden or p.is_inside or p.error or p.why_not) for p in pieces(text))
    assert len(MARK.findall(text)) == used
    assert text.count("```python\n") == sum(not p.is_hidden for p in pieces(text))


def test_few_blocks_are_not_run() -> None:
    skipped = [p for page in PAGES for p in pieces(page.read_text()) if p.why_not is not None]
    assert len(skipped) <= MOST_NOT_RUN


def test_a_block_that_fails_is_found() -> None:
    run("```python\nx = 1\n```\n\n<!-- run\nassert x == 1\n-->\n", "page")
    run("<!-- raises ValueError -->\n\n```python\nint('x')\n```\n", "page")
    with pytest.raises(AssertionError):
        run("<!-- inside -->\n\n```python\nassert False\n```\n", "page")
    run("<!-- not run: no such thing -->\n\n```python\nabsent()\n```\n", "page")
    with pytest.raises(pytest.fail.Exception):
        run("<!-- raises ValueError -->\n\n```python\nint('1')\n```\n", "page")
