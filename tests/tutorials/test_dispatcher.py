# SPDX-License-Identifier: Apache-2.0
"""Notebook 1 needs torch alone, has the toy's dispatcher, and what it says of torch is so."""

from __future__ import annotations

import ast
import functools
import re
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


def test_key_sets(page: dict[str, Any]) -> None:
    x, keys_of = page["x"], page["keys_of"]
    assert page["keys_of_x"] == [key.name for key in page["Tensor"].keys]
    assert keys_of(x) == keys_of(x.clone().requires_grad_())
    with torch.inference_mode():
        assert keys_of(torch.ones(2)) == "AutocastCPU, CPU"
    assert "SparseCPU" in keys_of(x.to_sparse())
    assert keys_of(x.to(torch.complex64).conj()).endswith("Conjugate, CPU")
    inside = []
    torch.func.vmap(lambda row: inside.append(keys_of(row)) or row)(x)
    assert inside[0].startswith("FuncTorchBatched, ")
    assert bin(_C._dispatch_keys(x).raw_repr()).count("1") == 5  # autograd, dense, CPU: three
    assert len(page["row_of"]("aten::linear")) > 100  # columns
    assert len(_C._dispatch_get_all_op_names()) > 2000


def test_a_thread_starts_as_the_toys(page: dict[str, Any]) -> None:
    thread, names_in = page["thread"], page["names_in"]
    assert names_in(page["included"]) == [key.name for key in thread.included]
    excluded = names_in(page["excluded"])
    assert "AutocastCPU" in excluded
    assert all(name.startswith("Autocast") for name in excluded)
    after = (page["Tensor"].keys | thread.included) - thread.excluded
    assert page["keys_of_thread_and"](page["x"]) == [key.name for key in after]


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


def test_fallthrough(page: dict[str, Any]) -> None:
    ran = page["ran"]
    for name, expected in {"recorded": ["AutogradCPU", "CPU"], "skipped": ["CPU"]}.items():
        ran.clear()
        getattr(torch.ops.page, name)(page["x"])
        assert ran == expected
    assert page["row_of"]("page::skipped")["AutogradCPU"] == "fallthrough"
    with pytest.raises(NotImplementedError, match="SparseCPU"):
        torch.ops.page.empty(page["x"].to_sparse())


def test_the_toys_journeys(page: dict[str, Any]) -> None:
    tensor, travelled = page["Tensor"], page["travelled"]
    assert travelled(page["sin"], tensor(1.0)) == ["sin at AutogradCPU", "sin at CPU"]
    parts = 2 * ["mul at CPU"]
    cube = page["cube"]
    assert travelled(cube, tensor(2.0)) == ["cube at AutogradCPU", "cube at CPU", *parts]
    for op in (cube, page["mul"]):
        op.kernels[page["Key"].AutogradCPU] = page["record"]
    assert travelled(cube, tensor(2.0)).count("mul at AutogradCPU") == 2
    for op in (cube, page["mul"]):
        op.kernels[page["Key"].AutogradCPU] = page["record_once"]
    assert cube(tensor(2.0)).made_by == "cube"
    with pytest.raises(NotImplementedError, match="plain has no kernel for AutogradCPU"):
        page["Operator"]("plain")(tensor(1.0))


def test_autograd_redispatches_and_excludes(page: dict[str, Any]) -> None:
    assert page["seen"] == {
        "this call, below autograd": ["FPGA", "CPU"],
        "a new call from there": ["BackendSelect", "FPGA", "CPU"],
    }


def test_what_changes_the_sets_of_a_thread(page: dict[str, Any]) -> None:
    changes = page["changes"]
    assert changes() == "-"
    with torch.no_grad():
        assert changes() == "-"
    with torch.autocast("cpu"):
        assert changes() == "no longer excludes `AutocastCPU`"
    with torch.inference_mode():
        assert "excludes all of autograd's keys" in changes()
    with page["Mode"]():
        assert changes() == "includes `PythonTLSSnapshot`, `Python`"


def test_boxes_and_fallbacks(page: dict[str, Any]) -> None:
    assert page["forms"]("aten::sin", "CPU") == "boxed and unboxed"
    assert page["forms"]("page::recorded", "CPU") == "boxed"
    assert page["counted"] == ["sin", "cube"]
    assert page["torch_counted"] == ["aten::zeros", "aten::linear", "aten::sin"]
    again = torch.library.Library("_", "IMPL")
    with pytest.raises(RuntimeError, match="multiple backend fallbacks"):
        again.fallback(page["torch_count"], "TESTING_ONLY_GenericMode")
    library = page["library"]
    library.define("later(Tensor x) -> Tensor")
    library.impl("later", lambda x: x + 1, "CPU")
    page["torch_counted"].clear()
    with _C._IncludeDispatchKeyGuard(page["GENERIC_MODE"]):
        torch.ops.page.later(page["x"])
    assert page["torch_counted"] == ["page::later"]  # registered after the fallback
    torch_key = "TESTING_ONLY_GenericMode"
    assert page["row_of"]("page::later")[torch_key] == "fallback"
    page["aten"].impl("cos", torch.library.fallthrough_kernel, torch_key)
    with _C._IncludeDispatchKeyGuard(page["GENERIC_MODE"]):
        page["x"].cos()
    assert page["torch_counted"] == ["page::later"]  # cos skips the key


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


def test_modes_and_wrappers(page: dict[str, Any]) -> None:
    assert page["found"] == {"mode": ["ones", "sin"], "wrapper": ["sin", "exp", "cos"]}
    row = page["row_of"]("aten::randn")
    assert row["FuncTorchVmapMode"] == "kernel"
    assert page["row_of"]("aten::sin")["FuncTorchVmapMode"] == "fallthrough"
    wrapper = page["key_named"]("TESTING_ONLY_GenericWrapper")
    assert not _C._dispatch_has_backend_fallback(wrapper)  # torch registers nothing there


def test_the_headers_have_what_the_page_says() -> None:
    keys = (INCLUDE / "c10/core/DispatchKey.h").read_text(encoding="utf-8")
    assert keys.index("  BackendSelect,") < keys.index("  ADInplaceOrView,")
    assert re.search(r"its only acceptable use is within a i?single\s+// process test", keys)
    rule = (INCLUDE / "ATen/core/dispatch/DispatchKeyExtractor.h").read_text(encoding="utf-8")
    assert "(((ks | local.included_) - local.excluded_) & key_mask)" in rule
    calls = (INCLUDE / "ATen/core/dispatch/Dispatcher.h").read_text(encoding="utf-8")
    assert "Dispatcher::redispatch(" in calls
