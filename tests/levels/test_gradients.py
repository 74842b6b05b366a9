# SPDX-License-Identifier: Apache-2.0
"""Gradients of every order through `remat` are eager's, and belong to no level."""

from typing import Any

import pytest
import torch
from helpers import Transform, assert_same_as_eager, loss_of, same_as_eager, scalar
from programs import ZOO, Program
from torch import Tensor

TWICE = [p for p in ZOO if p.differentiable and not p.not_twice]


def gradients(loss: Tensor, leaves: list[Tensor], **options: Any) -> list[Tensor | None]:
    return list(torch.autograd.grad(loss, leaves, allow_unused=True, **options))


def test_a_retained_graph_gives_the_same_again(differentiable: Program) -> None:
    def run(transform: Transform) -> Any:
        case = differentiable.make()
        loss = loss_of(case, transform)
        first = gradients(loss, case.leaves(), retain_graph=True)
        return first, gradients(loss, case.leaves())

    first, second = assert_same_as_eager(run)
    for a, b in zip(first, second, strict=True):
        assert (a is None and b is None) or torch.equal(a, b) or a.isnan().any()


@pytest.mark.parametrize("twice", TWICE, ids=lambda p: p.name)
@same_as_eager
def test_second_derivatives_are_those_of_eager(transform: Transform, twice: Program) -> Any:
    case = twice.make()
    first = gradients(loss_of(case, transform), case.leaves(), create_graph=True)
    second = gradients(scalar(first).sin(), case.leaves())
    return [g.detach() for g in first if g is not None], second


@same_as_eager
def test_a_gradient_from_one_output_to_another_belongs_to_no_level(transform: Transform) -> Any:
    """Such a gradient never crosses an edge that leaves the region."""

    torch.manual_seed(3)
    x = torch.randn(4, 3, requires_grad=True)

    def f(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x.sin()
        return y, (y.exp() * 2).cos()

    y, z = transform(f)(x)
    y.retain_grad()
    (between,) = torch.autograd.grad(z.sum(), y, retain_graph=True)
    z.sum().backward()
    return between, x.grad, y.grad
