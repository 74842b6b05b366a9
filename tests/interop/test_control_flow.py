# SPDX-License-Identifier: Apache-2.0
"""Control flow as operators, inside of `remat`."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import Transform, assert_same_as_eager
from torch import Tensor
from torch._higher_order_ops import while_loop
from torch._higher_order_ops.associative_scan import associative_scan
from torch._higher_order_ops.map import map as map_rows
from torch._higher_order_ops.scan import scan

from rematfn import _C

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
