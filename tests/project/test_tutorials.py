# SPDX-License-Identifier: Apache-2.0
"""The tutorials run, and what they assert holds."""

import runpy
from pathlib import Path

import pytest

TUTORIALS = sorted((Path(__file__).parents[2] / "tutorials").glob("*.py"))


def test_there_are_tutorials() -> None:
    assert TUTORIALS


@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
def test_a_tutorial_runs(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(path), run_name="__main__")
    assert "replays" in capsys.readouterr().out
