# SPDX-License-Identifier: Apache-2.0
"""Each notebook is its source, executed without an error: anew by `make test-exhaustive`."""

import ast
import json
from pathlib import Path
from typing import Any

import jupytext
import pytest

FOLDER = Path(__file__).parents[2] / "tutorials"
ROOT = FOLDER.parent
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


def quotations(source: Path) -> list[list[str]]:
    """Return the arguments of each `quote` in a notebook: a path, and texts in the file."""
    tree = ast.parse(source.read_text(encoding="utf-8"))
    names = {
        target.id: node.value.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    return [
        [arg.value if isinstance(arg, ast.Constant) else names[arg.id] for arg in node.args]  # type: ignore[attr-defined]
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "quote"
    ]


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_what_a_notebook_quotes_is_there(source: Path) -> None:
    for path, *texts in quotations(source):
        lines = (ROOT / path).read_text(encoding="utf-8").splitlines()
        for text in texts:
            found = [number for number, line in enumerate(lines) if text in line]
            assert found, f"{path} has no {text!r} (any more)"
            lines = lines[found[0] :]


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_a_picture_has_alternative_text(source: Path) -> None:
    pictures = [
        cell["metadata"].get("mystnb", {}).get("image", {}).get("alt", "")
        for cell in cells_of(source.with_suffix(".ipynb"))
        for output in cell.get("outputs", ())
        if any(kind.startswith("image/") for kind in output.get("data", {}))
    ]
    assert all(len(text) > 20 for text in pictures)
