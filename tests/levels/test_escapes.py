# SPDX-License-Identifier: Apache-2.0
"""What leaves a level through side effects: caches, hidden states, optimisers' moments.

It is used, written, differentiated or captured later, when the level is gone or another one runs.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import EVERYTHING, Transform, same_as_eager
from torch import Tensor, nn

from rematfn import _C

# --- one tensor that was stored away ------------------------------------------------------------

Later = Callable[[Tensor, Tensor, Tensor, Transform], Any]


def together(kept: Tensor, out: Tensor, x: Tensor, transform: Transform) -> None:
    ((kept * 3).cos().sum() + out.sum()).backward()


def one_after_the_other(kept: Tensor, out: Tensor, x: Tensor, transform: Transform) -> None:
    out.sum().backward(retain_graph=True)
    (kept * 3).cos().sum().backward()


def written_after_the_backward(kept: Tensor, out: Tensor, x: Tensor, transform: Transform) -> Any:
    out.sum().backward()
    return kept.detach().mul_(2) * 1


def given_to_another(kept: Tensor, out: Tensor, x: Tensor, transform: Transform) -> None:
    transform(lambda y: (y.sin() * y).exp())(kept).sum().backward()


def captured_by_another(kept: Tensor, out: Tensor, x: Tensor, transform: Transform) -> None:
    transform(lambda x: (x * kept).exp().cos())(x).sum().backward()


def written_by_another(kept: Tensor, out: Tensor, x: Tensor, transform: Transform) -> Any:
    return transform(lambda y: y.detach().mul_(2).sin())(kept), kept.detach() * 1


def hooked(kept: Tensor, out: Tensor, x: Tensor, transform: Transform) -> None:
    kept.register_hook(lambda gradient: gradient * 2)
    out.sum().backward()


def detached_in_place(kept: Tensor, out: Tensor, x: Tensor, transform: Transform) -> Any:
    kept.detach_()
    out.sum().backward()
    return kept * 1


def written_by_an_out_variant(kept: Tensor, out: Tensor, x: Tensor, transform: Transform) -> Any:
    torch.add(x.detach(), 1, out=kept.detach())
    return kept.detach() * 1


LATER: dict[str, Later] = {
    "used": lambda kept, out, x, transform: (kept * 2, out),
    "differentiated": lambda kept, out, x, transform: kept.sum().backward(),
    "differentiated twice": lambda kept, out, x, transform: torch.autograd.grad(
        torch.autograd.grad(out.sum(), kept, create_graph=True)[0].sum(), x
    ),
    **{f.__name__: f for f in (together, one_after_the_other, written_after_the_backward)},
    **{f.__name__: f for f in (given_to_another, captured_by_another, written_by_another)},
    **{f.__name__: f for f in (hooked, detached_in_place, written_by_an_out_variant)},
}


@pytest.mark.parametrize("later", LATER.values(), ids=LATER.keys())
@same_as_eager
def test_a_tensor_that_was_stored_away_is(transform: Transform, later: Later) -> Any:
    torch.manual_seed(3)
    x, box = torch.randn(4, 6, requires_grad=True), []

    def f(x: Tensor) -> Tensor:
        y = x.sin()
        box.append(y)
        z = (y.exp() * x).cos()
        return (z @ z.t()).tanh()

    out = transform(f)(x)
    return later(box[0], out, x, transform), out.detach(), x.grad


# --- whole training steps ------------------------------------------------------------------------


@same_as_eager
def test_gradients_are_accumulated_read_and_written_inside(transform: Transform) -> Any:
    torch.manual_seed(3)
    layer = nn.Linear(4, 4)

    def f(x: Tensor) -> Any:
        for k in range(3):
            (layer(x) * k).sin().sum().backward()
        assert layer.weight.grad is not None
        seen = layer.weight.grad.clone()
        layer.weight.grad.mul_(0.5)[0] = 1
        return seen, layer.weight.grad.sum()

    g = transform(f)
    return [g(torch.randn(2, 4)) for _ in range(2)], [p.grad for p in layer.parameters()]


@pytest.mark.parametrize("graph", [False, True], ids=["no-graph", "a-graph"])
def test_a_gradient_of_a_weight_that_is_read_through_a_view_is_sealed(graph: bool) -> None:
    """`linear` reads the transpose; the leaf itself is an argument of no recorded operator."""
    layer = nn.Linear(4, 4, bias=False)

    def f(x: Tensor) -> Tensor:
        y = layer(x.sin())
        y.cos().sum().backward(retain_graph=True)
        return y if graph else y.detach()

    out = EVERYTHING(f)(torch.ones(2, 4))
    assert layer.weight.grad is not None
    assert not _C.has_key(layer.weight.grad)
    assert layer.weight.grad.data_ptr() != 0
    assert out.requires_grad == graph
