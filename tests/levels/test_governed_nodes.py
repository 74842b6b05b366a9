# SPDX-License-Identifier: Apache-2.0
"""Operators of a backward that read no level tensor.

See Note [The operators of a node are its level's].
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import Transform, assert_nothing_keyed, same_as_eager
from torch import Tensor

import rematfn
from rematfn.testing import MemoryTimeline

N = 64
UNIT = 4 * N * N  # bytes of a matrix
SINES = 8
ONE = torch.ones(())
NUMBERS = 64  # bytes at most: a loss and its gradient are the caller's


def leaf() -> Tensor:
    return torch.linspace(-1, 1, N * N).view(N, N).requires_grad_()


def add_sines(total: Tensor, x: Tensor) -> Tensor:
    """Compute eight matrices of ``x``, and read each of them in the end."""
    sines = [(k * x).sin() for k in range(1, SINES + 1)]
    for sine in reversed(sines):
        total = total + sine * sine
    return total


class OfTheArgument(torch.autograd.Function):
    """Its backward is of the argument alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sum()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradients[0] * add_sines(torch.zeros_like(x), x)


class OfAnotherBackward(OfTheArgument):
    """Its backward runs another one, and goes on with operators on the argument alone."""

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            y = x.detach().requires_grad_()
            (slope,) = torch.autograd.grad(y.sin().exp().sum(), y)
        return gradients[0] * add_sines(torch.ones(N, N), x) * slope


FUNCTIONS = [OfTheArgument, OfAnotherBackward]


@pytest.mark.parametrize("function", FUNCTIONS)
@same_as_eager
def test_values(transform: Transform, function: Any) -> Any:
    x = leaf()
    transform(lambda x: function.apply(x.sin()) + function.apply(x))(x).backward(ONE)
    return x.grad


@pytest.mark.parametrize("function", FUNCTIONS)
def test_what_a_formula_makes_of_arguments_is_evicted(function: Any) -> None:
    x = leaf()
    function.apply(x).backward(ONE)
    expected, x.grad = x.grad, None
    g = rematfn.remat(function.apply, 5 * UNIT)
    with MemoryTimeline() as timeline:
        g(x).backward(ONE)
    assert x.grad is not None
    assert expected is not None
    assert torch.equal(x.grad, expected)
    assert timeline.peak <= 5 * UNIT + NUMBERS
    assert rematfn.stats(g).evictions > 0
    assert rematfn.stats(g).resident_bytes == 0
    assert_nothing_keyed(x.grad)


def test_the_gradient_that_enters_may_be_recorded() -> None:
    """The zeros and ones that a mean's backward makes are as large as the mean's input."""
    x = leaf()
    g = rematfn.remat(lambda x: x.sin().mean(), 5 * UNIT)
    entering = torch.ones((), requires_grad=True)
    with MemoryTimeline() as timeline:
        (gradient,) = torch.autograd.grad(g(x), x, entering, create_graph=True)
    assert timeline.peak <= rematfn.stats(g).peak_bytes + NUMBERS
    assert torch.equal(gradient, torch.autograd.grad(x.sin().mean(), x)[0])
    (second,) = torch.autograd.grad(gradient.sum(), x)
    (expected,) = torch.autograd.grad(
        torch.autograd.grad(x.sin().mean(), x, create_graph=True)[0].sum(), x
    )
    assert torch.equal(second, expected)


def test_a_node_after_the_level_is_nobodys() -> None:
    """What is made behind the level's region is the caller's."""
    x = leaf()
    g = rematfn.remat(OfTheArgument.apply, 1 << 30)
    made: list[Tensor] = []
    before = x * 1
    before.register_hook(lambda gradient: made.append(x.detach().cos()))
    loss = g(before)
    loss.backward(ONE)
    assert_nothing_keyed(made)
    assert rematfn.stats(g).resident_bytes == 0
