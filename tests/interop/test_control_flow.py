# SPDX-License-Identifier: Apache-2.0
"""Control flow as operators, and TorchScript, inside of `remat` and around it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import (
    Transform,
    assert_bitwise_equal,
    assert_same_as_eager,
)
from torch import Tensor, func, nn
from torch._higher_order_ops import while_loop
from torch._higher_order_ops.associative_scan import associative_scan
from torch._higher_order_ops.map import map as map_rows
from torch._higher_order_ops.scan import scan

import rematfn
from rematfn import _C
from rematfn.testing import EvictEverything

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's compiler warns about torch

Program = Callable[[Tensor, Tensor], Tensor]


def branches(x: Tensor, w: Tensor) -> Tensor:
    def product(a: Tensor) -> Tensor:
        return (a @ w).sin()

    def difference(a: Tensor) -> Tensor:
        return (a - w[0]).cos()

    y = x
    for _ in range(3):
        y = torch.cond(y.sum() > 0, product, difference, (y.tanh(),))
    return y


def loop(x: Tensor, w: Tensor) -> Tensor:
    def step(i: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
        return i + 1, (a @ w).tanh()

    return while_loop(lambda i, a: i < 3, step, (torch.tensor(0), x.sin()))[1].cos()


def running(x: Tensor, w: Tensor) -> Tensor:
    rows = scan(lambda c, a: (c + a.sin(), c * a), w[0].clone(), x.tanh())[1]
    return associative_scan(torch.add, rows.cos(), dim=0, combine_mode="generic")


CONTROL_FLOW: dict[str, Program] = {
    "cond": branches,
    "while_loop": loop,
    "map": lambda x, w: map_rows(lambda a: (a @ w).sin(), x.tanh()).exp(),
    "scan": running,
}


def tensors() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, w = torch.randn(4, 8, generator=generator), torch.randn(8, 8, generator=generator)
    return x.requires_grad_(), w.requires_grad_()


def step(transform: Transform, program: Program) -> Any:
    x, w = tensors()
    g = transform(program)
    for _ in range(2):
        y = g(x, w)
        y.square().sum().backward()
    return y, x.grad, w.grad


@pytest.mark.parametrize("name", CONTROL_FLOW)
def test_control_flow_runs_operator_by_operator(name: str) -> None:
    torch._dynamo.reset()
    assert_same_as_eager(lambda transform: step(transform, CONTROL_FLOW[name]))
    assert _C.stack_depth() == 0


def test_torchscript_of_a_transformed_function_is_refused() -> None:
    with pytest.raises(TypeError, match=r"remat\(torch\.jit\.script\(f\), budget\)"):
        torch.jit.script(rematfn.remat(lambda x: x.sin(), "1MiB"))
    within = nn.Sequential(nn.Tanh(), rematfn.remat(nn.Linear(2, 2), "1MiB"))
    for module in within[1], within:
        with pytest.raises(TypeError, match=r"script of remat\(Linear.*\(torch\.jit\.script\(f\)"):
            torch.jit.script(module)


@torch.jit.script
def sizes_that_change(x: Tensor) -> Tensor:
    size = [2]
    p = torch.ones(size)
    size[0] = 4
    return x * torch.ones(size) + p.sum()


@torch.jit.script
def dimensions_that_change(x: Tensor) -> Tensor:
    dims = [0]
    s = x.sum(dims)
    dims[0] = 1
    return s + x.sum(dims)


@pytest.mark.parametrize("f", [sizes_that_change, dimensions_that_change])
def test_lists_of_a_script_may_change_after_an_operator(f: Any) -> None:
    x = torch.linspace(0, 1, 16).view(4, 4)
    with torch.inference_mode():
        g = rematfn.remat(lambda x: f(x), policy=EvictEverything())
        assert_bitwise_equal(g(x), f(x))
    slopes = [func.grad(lambda x, h=h: h(x).square().sum())(x) for h in (g, f)]
    batches = [func.vmap(h)(torch.stack([x, x * 2])) for h in (g, f)]
    assert_bitwise_equal(*slopes)
    assert_bitwise_equal(*batches)
