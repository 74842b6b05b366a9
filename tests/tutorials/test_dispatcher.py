# SPDX-License-Identifier: Apache-2.0
"""Notebook 1 needs torch alone, has the toy's dispatcher, and what it says of torch is so."""

import ast
import functools
import inspect
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from types import CodeType
from typing import Any

import pytest
import torch
from torch import _C

FOLDER = Path(__file__).parents[2] / "tutorials"
SOURCE = FOLDER / "01_dispatcher.py"


@pytest.fixture(scope="module")
def page() -> Iterator[dict[str, Any]]:
    """Names of the page after it has run."""
    names = runpy.run_path(str(SOURCE))
    yield names
    for library in ("everything", "aten", "library"):
        names[library]._destroy()


def test_it_needs_torch_alone() -> None:
    tree = ast.parse(SOURCE.read_text(encoding="utf-8"))
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found.update(name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            found.add(str(node.module))
    packages = {name.partition(".")[0] for name in found} - sys.stdlib_module_names
    assert packages == {"torch", "IPython"}  # a notebook has IPython


def functions_in(path: Path) -> dict[str, tuple[Any, ...]]:
    """Return what is compiled of each function and method: no annotations, no docstrings."""
    found: dict[str, tuple[Any, ...]] = {}

    def look_into(code: CodeType, inside: str = "") -> None:
        for inner in code.co_consts:
            if isinstance(inner, CodeType):
                name = inside + inner.co_name
                if inner.co_flags & inspect.CO_OPTIMIZED:  # it is no class
                    constants = [c for c in inner.co_consts if not isinstance(c, CodeType)]
                    found[name] = (inner.co_code, inner.co_names, inner.co_varnames, constants)
                look_into(inner, f"{name}.")

    look_into(compile(path.read_text(encoding="utf-8"), "a page", "exec", optimize=2))
    return found


def test_the_dispatcher_is_that_of_the_toy() -> None:
    mine, toy = functions_in(SOURCE), functions_in(FOLDER / "toy" / "dispatcher.py")
    shared = ("KeySet.", "Operator.", "fallthrough", "keys_changed")
    assert len(same := [name for name in toy if name.startswith(shared)]) > 12
    assert {name: mine.get(name) for name in same} == {name: toy[name] for name in same}


def test_the_keys_of_the_toy_are_in_the_order_of_torch(page: dict[str, Any]) -> None:
    sets = [_C.DispatchKeySet(page["key_named"](key.name)) for key in page["Key"]]
    all_of_them = functools.reduce(lambda one, other: one | other, sets)
    assert page["names_in"](all_of_them) == [key.name for key in reversed(page["Key"])]


def test_the_ways_in_the_picture(page: dict[str, Any]) -> None:
    record, note = "AutogradCPU", "ADInplaceOrView"
    assert {label: page["way"](label) for label in page["OPERATORS"]} == {
        "sin": [record, "CPU"],
        "mm": [record, "CPU"],
        "mul_": [record, note, "CPU"],
        "view": [record, note, "CPU"],
        "linear": [record],
        "zeros": ["BackendSelect", "CPU"],
        "recorded": [record, "CPU"],
    }
    assert set(page["keys_of_thread_and"](page["x"])) == {record, note, "BackendSelect", "CPU"}
    with torch.autocast("cpu"):  # mm is cast, and then recorded
        now = page["names_in"](_C._dispatch_keys(page["x"]) - _C._dispatch_tls_local_exclude_set())
    assert now[:2] == ["AutocastCPU", record]
    assert page["row_of"]("aten::mm")["AutocastCPU"] == "kernel"
