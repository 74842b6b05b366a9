# SPDX-License-Identifier: Apache-2.0
"""Notebook 1 needs torch alone, has the toy's dispatcher, and what it says of torch is so."""

import ast
import functools
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import _C

FOLDER = Path(__file__).parents[2] / "tutorials"
SOURCE = FOLDER / "01_dispatcher.py"
INCLUDE = Path(torch.__file__).parent / "include"


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


class Bare(ast.NodeTransformer):
    """Take annotations and docstrings away."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        self.generic_visit(node)
        node.returns = None
        for arg in (*node.args.args, node.args.vararg):
            if arg is not None:
                arg.annotation = None
        if ast.get_docstring(node):
            node.body = node.body[1:] or [ast.Pass()]
        return node

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        self.generic_visit(node)
        node.body = node.body[1:] if ast.get_docstring(node) else node.body
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        assert node.value is not None
        return ast.Assign([node.target], node.value, lineno=node.lineno)


def definitions(path: Path) -> dict[str, str]:
    body = ast.parse(path.read_text(encoding="utf-8")).body
    named = [node for node in body if isinstance(node, (ast.ClassDef, ast.FunctionDef))]
    return {node.name: ast.unparse(Bare().visit(node)) for node in named}


def test_the_dispatcher_is_that_of_the_toy() -> None:
    mine, toy = definitions(SOURCE), definitions(FOLDER / "toy" / "dispatcher.py")
    shared = {"KeySet", "Thread", "Operator", "fallthrough", "keys_changed"}
    assert shared <= set(toy)
    assert {name: mine[name] for name in shared} == {name: toy[name] for name in shared}


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


def by_the_rule(cells: list[str], key: str, fallback: str | None) -> str | None:
    """Which of several kernels gets a place: the page's list, in its order."""
    devices = ("CPU", "CUDA")
    device = {"AutogradCPU": "CPU", "AutogradCUDA": "CUDA"}.get(key)
    whole = device in cells or "CompositeExplicitAutograd" in cells
    if key in cells:
        return "kernel"
    if key in devices and "CompositeExplicitAutograd" in cells:
        return "default kernel"
    if (key in devices or (device and not whole)) and "CompositeImplicitAutograd" in cells:
        return "math kernel"
    if device and "Autograd" in cells:
        return "autograd kernel"
    return fallback


def test_which_kernel_gets_a_place(page: dict[str, Any]) -> None:
    fallbacks = {"AutogradCPU": "fallback", "AutogradCUDA": "fallback"}
    fallbacks["ADInplaceOrView"] = "fallthrough"
    for name, cells in page["cells"].items():
        row = page["row_of"](f"page::{name}")
        for key in page["at"]:
            assert row.get(key) == by_the_rule(cells, key, fallbacks.get(key)), (name, key)
