# SPDX-License-Identifier: Apache-2.0
"""Operators that an extension defines in C++, with kernels that read and write by pointer."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import (
    EVERYTHING,
    Transform,
    assert_bitwise_equal,
    same_as_eager,
    wave_backward,
    wave_setup,
)
from torch import Tensor
from torch.utils import cpp_extension

import rematfn

SOURCE = Path(__file__).with_name("cpp_operators.cpp")


@pytest.fixture(scope="module")
def operators(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Build the extension, which takes some ten seconds, and give it a derivative."""
    path = os.environ["PATH"]
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{path}"  # ninja may be there
    try:
        if not (shutil.which("ninja") and shutil.which(os.environ.get("CXX", "c++"))):
            pytest.skip("needs ninja and a C++ compiler")
        cpp_extension.load(
            "rematfn_cpp_tests",
            [str(SOURCE)],
            extra_cflags=["-O0"],
            build_directory=str(tmp_path_factory.mktemp("cpp")),
            is_python_module=False,
        )
    finally:
        os.environ["PATH"] = path
    torch.library.register_autograd(
        "rematfn_cpp_tests::wave", wave_backward, setup_context=wave_setup
    )
    return torch.ops.rematfn_cpp_tests


def line() -> Tensor:
    return torch.linspace(-1, 1, 12)


def waves(ops: Any, x: Tensor) -> Tensor:
    y = ops.wave(x.exp(), 2.0)
    return (ops.wave(y * x, 3.0) * y).cos()


def waves_of_a_view(ops: Any, x: Tensor) -> Tensor:
    y = x.exp().view(3, 4)
    return ops.wave(y.t(), 2.0) + ops.wave(y[1:], 0.5).sum() + y.t()


def views(ops: Any, x: Tensor) -> Any:
    y = x.exp()
    first, second = ops.ends(y)
    first.mul_(3)
    return first.cos(), second + 1, y.sin(), first, second


def writes_to_all(ops: Any, x: Tensor) -> Any:
    xs = [x.sin(), x.cos(), torch.ones(12) * 2]
    before = [x * 2 for x in xs]
    ops.add_to_all_(xs, x.exp())
    after = [x * 2 for x in xs]
    ops.add_to_all_([xs[0], x], xs[1])  # one of them from outside
    return xs, before, after, [x + 1 for x in xs], x


def several(ops: Any, x: Tensor) -> Any:
    first, second, third = ops.powers(x.sin(), 3)
    return third, first * second, second.cos()


def random(ops: Any, x: Tensor) -> Tensor:
    y = ops.jitter(x.sin())
    return (y * ops.jitter(y) + torch.rand(12)).cos() * y


def marks(ops: Any, x: Tensor) -> Tensor:
    without = ops.without_tf32(x.sin())
    with_it = ops.marked(without)
    return ops.without_tf32(with_it) * ops.marked(without * with_it) * with_it


PROGRAMS: list[Callable[[Any, Tensor], Any]] = [
    waves,
    waves_of_a_view,
    views,
    writes_to_all,
    several,
    random,
    marks,
]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
@same_as_eager
def test_operators_of_an_extension(transform: Transform, operators: Any, program: Any) -> Any:
    torch.manual_seed(7)
    x = line()
    return transform(lambda x: program(operators, x))(x), x, torch.rand(3)


@same_as_eager
def test_gradients_of_an_operator_of_an_extension(transform: Transform, operators: Any) -> Any:
    x = line().requires_grad_()
    out = transform(lambda x: waves(operators, x))(x)
    (first,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    return out, first, torch.autograd.grad(first.sum(), x)


def test_an_operator_of_an_extension_is_one_operator(operators: Any) -> None:
    g = rematfn.remat(lambda x: operators.wave(x.view(3, 4).t(), 2.0))
    g(line())
    assert rematfn.stats(g).operators == 1


def test_a_decomposition_that_reads_by_pointer_says_what_to_do(operators: Any) -> None:
    """Registered for no backend, it runs above a level: it is no operator, but a function."""

    def f(x: Tensor) -> Tensor:
        return operators.wave_of_wave(x.exp())

    def rewritten(x: Tensor) -> Tensor:
        return operators.wave_of_wave(rematfn.materialize(x.exp()))

    assert_bitwise_equal(rematfn.remat(f)(line()), f(line()))
    with pytest.raises(RuntimeError, match=r"rematfn\.materialize"):
        EVERYTHING(f)(line())
