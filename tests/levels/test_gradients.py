# SPDX-License-Identifier: Apache-2.0
"""Gradients of every order through `remat` are eager's, and belong to no level."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import (
    EVERY,
    PLAIN,
    SNUG,
    Mode,
    Transform,
    assert_same_as_eager,
    loss_of,
    scalar,
)
from programs import ZOO, Program
from torch import Tensor

from rematfn import _C

TWICE = [p for p in ZOO if p.differentiable and not p.not_twice]


def gradients(loss: Tensor, leaves: list[Tensor], **options: Any) -> list[Tensor | None]:
    return list(torch.autograd.grad(loss, leaves, allow_unused=True, **options))


def test_backward_fills_grad_with_the_bits_of_eager(differentiable: Program, mode: Mode) -> None:
    def run(transform: Transform) -> Any:
        case = differentiable.make()
        loss = loss_of(case, transform)
        loss.backward()
        return loss.detach(), [t.grad for t in case.leaves()], case.held, torch.rand(2)

    assert_same_as_eager(run, mode)


def test_autograd_grad_gives_the_bits_of_eager(differentiable: Program, mode: Mode) -> None:
    def run(transform: Transform) -> Any:
        case = differentiable.make()
        return gradients(loss_of(case, transform), case.leaves())

    assert_same_as_eager(run, mode)


def test_a_retained_graph_gives_the_same_again(differentiable: Program, mode: Mode) -> None:
    def run(transform: Transform) -> Any:
        case = differentiable.make()
        loss = loss_of(case, transform)
        first = gradients(loss, case.leaves(), retain_graph=True)
        return first, gradients(loss, case.leaves())

    first, second = assert_same_as_eager(run, mode)
    for a, b in zip(first, second, strict=True):
        assert (a is None and b is None) or torch.equal(a, b) or a.isnan().any()


@pytest.mark.parametrize("twice", TWICE, ids=lambda p: p.name)
def test_second_derivatives_are_those_of_eager(twice: Program, mode: Mode) -> None:
    def run(transform: Transform) -> Any:
        case = twice.make()
        first = gradients(loss_of(case, transform), case.leaves(), create_graph=True)
        second = gradients(scalar(first).sin(), case.leaves())
        return [g.detach() for g in first if g is not None], second

    assert_same_as_eager(run, mode)


@pytest.mark.parametrize("program", [p for p in ZOO if p.not_twice], ids=lambda p: p.name)
def test_torch_itself_refuses_the_second_derivative(program: Program) -> None:
    case = program.make()
    first = gradients(loss_of(case, lambda f: f), case.leaves(), create_graph=True)
    with pytest.raises(RuntimeError):
        gradients(scalar(first), case.leaves())


@pytest.mark.parametrize("mode", [PLAIN, SNUG, EVERY], ids=lambda mode: mode.name)
@pytest.mark.parametrize("inside", [False, True], ids=["grads-outside", "grads-inside"])
def test_fourth_derivatives_are_those_of_eager(inside: bool, mode: Mode) -> None:
    def run(transform: Transform) -> Any:
        x = torch.linspace(0.1, 1.0, 6, requires_grad=True)

        def f(x: Tensor) -> Tensor:
            return (x.sin() * x.exp()).cumsum(0).tanh().prod()

        def derivative(x: Tensor) -> list[Tensor]:
            found = [(f if inside else transform(f))(x)]
            for _ in range(4):
                found.append(torch.autograd.grad(found[-1].sum(), x, create_graph=True)[0])
            return found

        return (transform(derivative) if inside else derivative)(x)

    assert_same_as_eager(run, mode)


def test_backward_with_create_graph_leaves_grads_that_can_be_differentiated(mode: Mode) -> None:
    def run(transform: Transform) -> Any:
        torch.manual_seed(3)
        x, w = torch.randn(4, 3, requires_grad=True), torch.randn(3, 3, requires_grad=True)
        loss = transform(lambda x: (x @ w).tanh().square().sum())(x)
        first = torch.autograd.grad(loss, [x, w], create_graph=True)
        penalty = sum(g.square().sum() for g in first)
        penalty.backward()
        return loss, first, penalty, x.grad, w.grad

    assert_same_as_eager(run, mode)


def test_gradients_accumulate_over_calls(mode: Mode) -> None:
    def run(transform: Transform) -> Any:
        torch.manual_seed(3)
        w = torch.randn(3, 3, requires_grad=True)
        g = transform(lambda x: (x @ w).tanh().sum())
        losses = [g(torch.randn(4, 3)) for _ in range(3)]
        for loss in reversed(losses):
            loss.backward()
        return w.grad, losses

    assert_same_as_eager(run, mode)


def test_gradients_reach_what_was_made_before_the_call(mode: Mode) -> None:
    """The argument is no leaf: its gradient leaves the level, and goes on through eager code."""

    def run(transform: Transform) -> Any:
        torch.manual_seed(3)
        leaf = torch.randn(4, 3, requires_grad=True)
        x, captured = leaf.exp(), leaf.sin()
        for t in (x, captured):
            t.retain_grad()
        seen: list[Tensor] = []
        x.register_hook(lambda grad: seen.append(grad))
        out = transform(lambda x: (x * captured).cos() + x[:1])(x)
        out.retain_grad()
        out.square().sum().backward()
        return leaf.grad, x.grad, captured.grad, out.grad, seen

    assert_same_as_eager(run, mode)


def test_a_gradient_from_one_output_to_another_belongs_to_no_level(mode: Mode) -> None:
    """Such a gradient never crosses an edge that leaves the region."""

    def run(transform: Transform) -> Any:
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

    assert_same_as_eager(run, mode)


def test_functions_compose_after_they_returned(mode: Mode) -> None:
    def run(transform: Transform) -> Any:
        torch.manual_seed(3)
        x = torch.randn(4, 3, requires_grad=True)
        first, second = transform(lambda x: x.sin().exp()), transform(lambda x: x.cos() * x)
        y = first(x)
        z = second(second(y) + y)
        z.sum().backward()
        return y, z, x.grad

    assert_same_as_eager(run, mode)


class Cube(torch.autograd.Function):
    """Save an input, an intermediate and an output, as user code may."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        square = x * x
        out = square * x
        ctx.save_for_backward(x, square, out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        x, square, out = ctx.saved_tensors
        return grad * (square + out / x + x * x)


def test_autograd_functions_of_the_user_save_level_tensors(mode: Mode) -> None:
    def run(transform: Transform) -> Any:
        x = torch.linspace(0.5, 2.0, 6, requires_grad=True)
        y = transform(lambda x: Cube.apply(Cube.apply(x.sin()).cos()))(x)
        (first,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        first.sum().backward()
        return y, first, x.grad

    assert_same_as_eager(run, mode)


@pytest.mark.parametrize("order", ["around", "inside"])
def test_checkpoint_around_and_inside(order: str, mode: Mode) -> None:
    def run(transform: Transform) -> Any:
        torch.manual_seed(3)
        x = torch.randn(4, 3, requires_grad=True)

        def f(x: Tensor) -> Tensor:
            return torch.nn.functional.dropout(x.sin().exp(), 0.3).cos() * x

        def checkpointed(f: Any) -> Any:
            return lambda x: torch.utils.checkpoint.checkpoint(f, x, use_reentrant=False)

        g = transform(checkpointed(f)) if order == "inside" else checkpointed(transform(f))
        torch.manual_seed(7)
        out = g(x)
        out.sum().backward()
        return out, x.grad

    assert_same_as_eager(run, mode)


def test_gradcheck_is_content(mode: Mode) -> None:
    def run(transform: Transform) -> Any:
        x = torch.linspace(0.2, 1.0, 4, dtype=torch.float64, requires_grad=True)
        g = transform(lambda x: (x.sin() * x).cumsum(0).exp())
        assert torch.autograd.gradcheck(g, x, check_forward_ad=True)
        return torch.autograd.gradgradcheck(g, x)

    assert_same_as_eager(run, mode)


def test_nothing_of_the_level_is_alive_after_the_backward() -> None:
    held: list[Any] = []

    def run(transform: Transform) -> Any:
        x = torch.randn(4, 3, generator=torch.Generator().manual_seed(1)).requires_grad_()
        out = transform(lambda x: (x.sin().exp() * x).cos())(x)
        out.sum().backward()
        held.append((out, x.grad))
        return held[-1]

    assert_same_as_eager(run, EVERY)
    assert _C.testing.live_operations() == 0, "the results held keep lineage alive"
