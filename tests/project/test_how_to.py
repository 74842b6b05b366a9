# SPDX-License-Identifier: Apache-2.0
"""Every Python block of the how-tos, and of pages like them, runs and prints what stands below it.

A page is one program: its ``python`` blocks, in one namespace. A ``text`` block right after one is
what that block prints. The figures in it are compared: bytes within a fiftieth and percentages
within five, since what kernels take for the while differs between machines. A page with ``<!--
needs library, another -->`` above its block is skipped where one of these is not installed; ``make
test-frameworks`` installs them all. Run as a script, this file writes the figures anew:
``PYTHONPATH=tests .venv/bin/python tests/project/test_how_to.py``.
"""

import importlib.util
import re
import socket
import sys
from pathlib import Path

import pytest
import torch
from helpers import EXHAUSTIVE
from processes import Ended, forked, once
from test_pages import PIECE, pieces

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [*sorted((DOCS / "how-to").glob("*.md")), DOCS / "comparison.md", DOCS / "migration.md"]
LONG = {"meta-learning", "rollouts"}  # two fifths of the time of all; make test-exhaustive
NUMBER = re.compile(r"(\d[\d,]*(?:\.\d+)?)(%?)")
END = "\x1e"  # printed after each block
RANKS = re.compile(r"torchrun --nproc-per-node (\d+)")
NEEDS = re.compile(r"^<!-- needs (.+) -->$", re.M)


def program(page: Path, text: str) -> str:
    """Return a script that runs a page's blocks. A traceback in it has the page's lines."""
    return "".join(
        f"exec(compile({piece.code!r}, {str(page)!r}, 'exec'))\nprint({END!r}, end='')\n"
        for piece in pieces(text)
    )


def absent(text: str) -> list[str]:
    """Return the libraries that a page needs and that are not installed."""
    needed = NEEDS.search(text)
    names = needed[1].split(", ") if needed else []
    return [name for name in names if importlib.util.find_spec(name) is None]


def program_in(folder: Path, page: Path, text: str) -> str:
    """Return the page's program, run in a folder: nothing there can be imported for a library."""
    return f"import os\nos.chdir({str(folder)!r})\n{program(page, text)}"


def run_in_ranks(page: Path, text: str, folder: Path, ranks: int) -> list[str]:
    """Run a page's program in a process for each rank; return what the first one prints."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
    script = f"import os, sys\nos.environ.update({meeting}, RANK=sys.argv[1])\n"
    script += program_in(folder, page, text)
    jobs = {str(rank): (script, str(rank)) for rank in range(ranks)}
    ended = forked(folder, jobs)
    for one in ended.values():
        assert one.code == 0, one.out + one.err
    return ended["0"].out.split(END)[:-1]


def run_pages(pages: list[Path], folder: Path) -> dict[Path, Ended]:
    """Run the programs of pages that ask for no ranks."""
    jobs = {}
    for page in pages:
        own = folder / page.stem
        own.mkdir()
        jobs[str(page)] = (program_in(own, page, page.read_text(encoding="utf-8")), "")
    ended = forked(folder, jobs)
    return {page: ended[str(page)] for page in pages}


def ranks_of(text: str) -> int:
    asked = RANKS.search(text)
    return int(asked[1]) if asked else 0


def numbers(text: str, unit: str) -> list[float]:
    found = NUMBER.findall(text)
    return [float(number.replace(",", "")) for number, after in found if after == unit]


def words(text: str) -> list[str]:
    return NUMBER.sub(r"#\2", text).split()


def assert_as_told(printed: str, told: str, of_this_torch: bool = True) -> None:
    """Assert that words are the same, and figures nearly, if those of this torch are told."""
    assert words(printed) == words(told), printed
    if not of_this_torch:
        return
    assert numbers(printed, "") == pytest.approx(numbers(told, ""), rel=0.02, abs=0.11), printed
    assert numbers(printed, "%") == pytest.approx(numbers(told, "%"), abs=5.1), printed


def can_run(page: Path) -> bool:
    text = page.read_text(encoding="utf-8")
    return not absent(text) and (
        EXHAUSTIVE or ("torch.compile(" not in text and page.stem not in LONG)
    )


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[Path, Ended]:
    pages = [p for p in PAGES if can_run(p) and not ranks_of(p.read_text(encoding="utf-8"))]
    return once(tmp_path_factory, "pages", lambda folder: run_pages(pages, folder))


@pytest.mark.forking
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_prints_what_it_says(page: Path, ended: dict[Path, Ended], tmp_path: Path) -> None:
    text = page.read_text(encoding="utf-8")
    if not can_run(page):
        pytest.skip("needs a library, make test-frameworks; or is long, make test-exhaustive")
    if ranks := ranks_of(text):
        printed = run_in_ranks(page, text, tmp_path, ranks)
    else:
        assert ended[page].code == 0, ended[page].out + ended[page].err
        printed = ended[page].out.split(END)[:-1]
    # What is compiled takes 0.5 MiB more on torch 2.12.
    of_this_torch = "torch.compile(" not in text or torch.__version__ >= "2.13"
    for piece, out in zip(pieces(text), printed, strict=True):
        assert_as_told(out, piece.printed or "", of_this_torch)


def test_figures_that_differ_are_told() -> None:
    assert_as_told("eager 12.0 MiB, 3%\n", "eager  12.1 MiB, 3%\n")
    with pytest.raises(AssertionError):
        assert_as_told("eager 12.0 MiB\n", "eager 13.0 MiB\n")
    with pytest.raises(AssertionError):
        assert_as_told("eager 12.0 MiB, 3%\n", "eager 12.0 MiB, 9%\n")
    with pytest.raises(AssertionError):
        assert_as_told("eager 12.0 MiB\n", "budget 12.0 MiB\n")
    page = "```python\na = 1\n```\n\nwords\n\n```python\nprint(a)\n```\n\n```text\n1\n```\n"
    assert [piece.printed for piece in pieces(page)] == [None, "1\n"]
    assert [piece.code.count("\n") for piece in pieces(page)] == [2, 8]  # the page's lines
    assert absent("<!-- needs torch, no_such_library -->\n") == ["no_such_library"]
    assert absent(page) == []


def write_anew(page: Path) -> None:
    """Put what a page's blocks print below them, where something stands already."""
    import tempfile

    text = page.read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as folder:
        if ranks := ranks_of(text):
            printed = iter(run_in_ranks(page, text, Path(folder), ranks))
        else:
            printed = iter(run_pages([page], Path(folder))[page].out.split(END)[:-1])

    def renewed(found: re.Match[str]) -> str:
        output = next(printed)
        if found["printed"] is None:
            return found[0]
        start, end = (at - found.start() for at in found.span("printed"))
        return found[0][:start] + output + found[0][end:]

    page.write_text(PIECE.sub(renewed, text), encoding="utf-8")


if __name__ == "__main__":
    for name in sys.argv[1:] or PAGES:
        write_anew(Path(name).resolve())
