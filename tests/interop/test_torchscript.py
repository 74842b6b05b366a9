# SPDX-License-Identifier: Apache-2.0
"""TorchScript inside of a function: its interpreter calls operators with lists of its own.

See Note [TorchScript has lists of its own].
"""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import Transform, assert_bitwise_equal
from torch import Tensor, func, nn

import rematfn
from rematfn.testing import EvictEverything

WAYS: dict[str, Transform] = {
    "everything": functools.partial(rematfn.remat, policy=EvictEverything()),
    "tight": functools.partial(rematfn.remat, budget=0.8),
    "moves": functools.partial(rematfn.offload, policy=EvictEverything()),
    "move or drop": functools.partial(rematfn.remat, offload=True, policy=EvictEverything()),
}


class Gathers(nn.Module):
    """Indices and values that are made inside, in lists that the interpreter makes."""

    def forward(self, x: Tensor) -> Tensor:
        order = x[:, 0].argsort()
        y = x[order].tanh()
        z = y.exp().clone()
        z[order] = y[order.flip(0)] * 2
        return torch.cat([z[order, (order * 0).long()], y.sum(1)[order]]).square().sum()


class Forces(nn.Module):
    """An energy and its derivative, as a potential of atoms is written."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_(True)
        order = x.detach()[:, 0].argsort()
        energy = self.layers(x[order])[order * 1].sum()
        ones: list[Tensor | None] = [torch.ones_like(energy)]
        force = torch.autograd.grad([energy], [x], ones, create_graph=True)[0]
        assert force is not None
        return energy.square() + force.square().sum()


@pytest.mark.parametrize("make", [Gathers, Forces])
@pytest.mark.parametrize("way", WAYS)
def test_gradients_are_eager_s(make: Callable[[], nn.Module], way: str) -> None:
    def run(transform: Transform) -> list[list[Tensor]]:
        torch.manual_seed(0)
        inside = make()
        x = torch.randn(16, 8, requires_grad=True)
        of = [x, *inside.parameters()]
        script = torch.jit.script(inside)
        g = transform(lambda: torch.autograd.grad(script(x) + x.sum(), of))
        return [list(g()) for _ in range(4)]  # the interpreter profiles, and then optimises

    run(lambda f: f)  # what it has learnt is known to later modules of the class
    assert_bitwise_equal(run(WAYS[way]), run(lambda f: f))


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
