# SPDX-License-Identifier: Apache-2.0
"""Hooks, and backwards of autograd.Functions, that run forward and backward anew.

See Note [The operators of a node are its level's].
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import (
    EVERYTHING,
    assert_bitwise_equal,
    assert_nothing_keyed,
    assert_nothing_left,
    kept,
    remains,
)
from torch import Tensor, nn

import rematfn
from rematfn.testing import MemoryTimeline

WIDTH, ROWS, PARTS = 64, 256, 4
UNIT = 4 * WIDTH * ROWS  # bytes of an activation
SMALL = 4096  # bytes: numbers


def network(layers: int = 8) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[m for _ in range(layers) for m in (nn.Linear(WIDTH, WIDTH), nn.GELU())])


def batches() -> list[Tensor]:
    return [
        torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(i)) for i in range(PARTS)
    ]


def again(net: nn.Module, xs: list[Tensor], cached: list[Tensor]) -> Callable[[Tensor], None]:
    """Return a hook that runs the network anew, part by part, as GradCache does."""

    def hook(gradient: Tensor) -> None:
        for x, r in zip(xs, cached, strict=True):
            with torch.enable_grad():
                surrogate = (net(x) * r).sum() * gradient.sum()
            surrogate.backward()

    return hook


def cached_gradients(net: nn.Module, xs: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    with torch.no_grad():
        parts = [net(x) for x in xs]
    parts = [part.detach().requires_grad_() for part in parts]
    loss = torch.cat(parts).square().mean()
    return loss, list(torch.autograd.grad(loss, parts))


def leaf_hook(net: nn.Module, xs: list[Tensor]) -> Tensor:
    """The result is a leaf, with the hook on it."""
    loss, cached = cached_gradients(net, xs)
    loss = loss.detach().requires_grad_()
    loss.register_hook(again(net, xs, cached))
    return loss


def post_accumulate_hook(net: nn.Module, xs: list[Tensor]) -> Tensor:
    loss, cached = cached_gradients(net, xs)
    loss = loss.detach().requires_grad_()
    hook = again(net, xs, cached)
    loss.register_post_accumulate_grad_hook(lambda leaf: hook(leaf.grad))
    return loss


def inner_leaf_hook(net: nn.Module, xs: list[Tensor]) -> Tensor:
    """The leaf is within the graph of the result."""
    with torch.no_grad():
        part = net(xs[0])
    part = part.detach().requires_grad_()
    part.register_hook(lambda gradient: again(net, xs[:1], [gradient])(torch.ones(())))
    return part.square().mean()


def node_hook(net: nn.Module, xs: list[Tensor]) -> Tensor:
    hook = again(net, xs, xs)
    scale = torch.ones((), requires_grad=True) * 2
    scale.grad_fn.register_prehook(lambda gradients: hook(gradients[0]))
    return scale.sin().exp()


def multi_grad_hook(net: nn.Module, xs: list[Tensor]) -> Tensor:
    hook = again(net, xs, xs)
    scale = torch.ones((), requires_grad=True) * 2
    other = scale.sin()
    torch.autograd.graph.register_multi_grad_hook([scale, other], lambda gs: hook(gs[0]))
    return (scale * other).exp()


def module_hook(net: nn.Module, xs: list[Tensor]) -> Tensor:
    hook = again(net, xs, xs)
    layer = nn.Linear(1, 1)
    nn.init.ones_(layer.weight)
    nn.init.ones_(layer.bias)
    layer.register_full_backward_hook(lambda module, ins, outs: hook(outs[0]))
    return layer(torch.ones(1, 1, requires_grad=True)).sum()


class Adjoint(torch.autograd.Function):
    """Its backward steps backwards, each step a forward and a backward of its own."""

    @staticmethod
    def forward(ctx: Any, net: nn.Module, x: Tensor, *parameters: Tensor) -> Tensor:
        ctx.net, ctx.save = net, ctx.save_for_backward(x, *parameters)
        return net(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, *parameters = ctx.saved_tensors
        state = torch.cat([gradients[0].flatten(), *(torch.zeros(p.numel()) for p in parameters)])
        for step in range(12):
            with torch.enable_grad():
                y = (x * (1 + step)).detach().requires_grad_()
                found = torch.autograd.grad(ctx.net(y), [y, *parameters], gradients[0])
            state = state + torch.cat([g.flatten() for g in found]) * 0.1
        sizes = [x.numel(), *(p.numel() for p in parameters)]
        parts = state.split(sizes)
        found = [part.view(like.shape) for part, like in zip(parts, [x, *parameters], strict=True)]
        return None, *found


def adjoint(net: nn.Module, xs: list[Tensor]) -> Tensor:
    return Adjoint.apply(net, xs[0], *net.parameters()).square().mean()


PROGRAMS: dict[str, Callable[[nn.Module, list[Tensor]], Tensor]] = {
    f.__name__: f
    for f in (
        *(leaf_hook, post_accumulate_hook, inner_leaf_hook, node_hook),
        *(multi_grad_hook, module_hook, adjoint),
    )
}


def trained(
    program: Any, transform: Callable[[Any], Any], calls: int = 1, small: bool = False
) -> tuple[Any, int]:
    """Return losses and gradients, and the peak of the last call but for the gradients."""
    net, xs = network(), batches()
    if small:
        net, xs = network(layers=3), [x[:8].clone() for x in xs[:2]]
    g = transform(lambda: program(net, xs))
    losses = []
    for _ in range(calls):
        net.zero_grad()
        with MemoryTimeline() as timeline:
            loss = g()
            loss.backward()
        losses.append(loss.detach())
    found = losses, [p.grad for p in net.parameters()]
    return found, timeline.peak_excluding_survivors


@pytest.mark.parametrize("name", PROGRAMS)
def test_what_they_compute_is_within_the_budget(name: str) -> None:
    expected, eager = trained(PROGRAMS[name], lambda f: f)
    budget = int(0.7 * eager)
    transform, made = kept(lambda f: rematfn.remat(f, budget))
    (losses, gradients), peak = trained(PROGRAMS[name], transform, calls=3)
    assert_nothing_keyed(gradients)
    assert_bitwise_equal((losses[-1:], gradients), expected)
    assert peak <= budget + SMALL
    assert rematfn.stats(made[0]).resident_bytes == 0


@pytest.mark.parametrize("name", PROGRAMS)
def test_everything_evicted(name: str) -> None:
    before = remains()
    expected, _ = trained(PROGRAMS[name], lambda f: f, small=True)
    actual, _ = trained(PROGRAMS[name], EVERYTHING, small=True)
    assert_nothing_keyed(actual)
    assert_bitwise_equal(actual, expected)
    assert_nothing_left(before)


def test_what_a_hook_stores_away_is_the_programs_after_the_backward() -> None:
    net, (x, *_) = network(), batches()
    stored: list[Tensor] = []

    def f() -> Tensor:
        loss = x.sin().mean().requires_grad_()
        loss.register_hook(lambda gradient: stored.append(net(x).detach()))
        return loss

    rematfn.remat(f, 6 * UNIT)().backward()
    with torch.no_grad():
        expected = net(x)
        for p in net.parameters():
            p.zero_()
    assert_bitwise_equal([t * 1 for t in stored], [expected])


def test_a_hook_that_fails_leaves_nothing() -> None:
    before = remains()
    net, (x, *_) = network(), batches()

    def f() -> Tensor:
        def hook(gradient: Tensor) -> None:
            with torch.enable_grad():
                net(x).sum().backward()
            raise KeyError("as it must")

        loss = x.sin().mean().requires_grad_()
        loss.register_hook(hook)
        return loss

    for _ in range(2):
        with pytest.raises(KeyError, match="as it must"):
            rematfn.remat(f, 12 * UNIT)().backward()
    assert_nothing_left(before)
    assert not rematfn._C.has_key(x.sin())
