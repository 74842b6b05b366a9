# SPDX-License-Identifier: Apache-2.0
"""`remat(f)` computes what `f` computes, bit for bit, and leaves the same world behind."""

from typing import Any

import torch
from helpers import Transform, assert_same_as_eager, same_as_eager, world
from programs import Program
from torch import Tensor


def test_later_calls_are_as_good_as_the_first(program: Program) -> None:
    """In the tight mode they are guided."""
    assert_same_as_eager(lambda transform: world(program, transform, calls=3))


@same_as_eager
def test_a_view_of_an_argument_comes_back_as_a_view_of_it(transform: Transform) -> Any:
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(1))
    g = transform(lambda x: (x, x.t(), x[1:], x.sin(), x.detach()))
    outputs = g(x)
    outputs[1].mul_(2)  # writes into x, seen by its other views
    return x, outputs, outputs[0] is x


@same_as_eager
def test_outputs_may_be_written_after_they_left(transform: Transform) -> Any:
    """A result is the caller's: to write into it changes nothing that a replay reads."""

    torch.manual_seed(3)
    x = torch.randn(4, 3, requires_grad=True)

    def f(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x.sin()
        z = y.detach() * 2
        return (y * z).cos(), z.clone()

    out, copy = transform(f)(x)
    copy.fill_(100.0)
    out.sum().backward()
    return out, copy, x.grad
