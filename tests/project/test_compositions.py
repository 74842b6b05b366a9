# SPDX-License-Identifier: Apache-2.0
"""docs/compositions.md says what its programs do: they are run again, a row in each test."""

import compositions
import pytest
from helpers import EXHAUSTIVE, untransformed
from nesting import LETTERS

TEXT = compositions.PAGE.read_text(encoding="utf-8")
WRITE = "PYTHONPATH=tests .venv/bin/python tests/compositions.py"

# linearize builds an fx graph, and fx warns of the constants that linearize puts in it.
pytestmark = pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node:UserWarning")


@pytest.mark.parametrize("outer", LETTERS)
def test_a_row_of_pairs_is_what_they_do(outer: str) -> None:
    share = 1 if EXHAUSTIVE else 6  # of the places where `remat` or `offload` can stand
    assert compositions.pair_row(outer, share) in TEXT.splitlines(), WRITE


def test_the_rest_of_the_page_is_what_it_does() -> None:
    before, after = compositions.page("PAIRS").split("PAIRS")
    assert TEXT.startswith(before + compositions.pair_head()), WRITE
    assert TEXT.endswith(after), WRITE
    assert len(TEXT[len(before) : -len(after)].splitlines()) == 2 + len(LETTERS)


def test_a_program_that_differs_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    assert compositions.verdict([("remat", "grad")]) == "yes"
    monkeypatch.setitem(compositions.WAYS, "remat", lambda f: lambda x: f(x) * 2)
    assert compositions.verdict([("remat", "grad")]) == "remat-grad no: AssertionError"
    monkeypatch.setitem(compositions.WAYS, "remat", untransformed)
    assert compositions.verdict([("remat", "grad")]) == "yes"
