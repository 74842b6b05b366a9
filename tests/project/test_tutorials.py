# SPDX-License-Identifier: Apache-2.0
"""Each notebook is its source, executed without an error: anew by `make test-exhaustive`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jupytext
import pytest

FOLDER = Path(__file__).parents[2] / "tutorials"
SOURCES = sorted(FOLDER.glob("[0-9]*.py"))
PAGE = 60  # lines


def cells_of(path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return found


def text_of(value: str | list[str]) -> str:
    return value if isinstance(value, str) else "".join(value)


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_a_notebook_is_its_source(source: Path) -> None:
    expected = [(cell.cell_type, cell.source) for cell in jupytext.read(source).cells]
    cells = cells_of(source.with_suffix(".ipynb"))
    assert [(cell["cell_type"], text_of(cell["source"])) for cell in cells] == expected, (
        "make notebooks"
    )


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_a_notebook_was_executed_to_its_end(source: Path) -> None:
    code = [c for c in cells_of(source.with_suffix(".ipynb")) if c["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell["outputs"]]
    assert not [output for output in outputs if output["output_type"] == "error"]
    assert not [output for output in outputs if output.get("name") == "stderr"]
    assert all(text_of(o.get("text", "")).count("\n") <= PAGE for o in outputs)
