# SPDX-License-Identifier: Apache-2.0
"""Replays close to the least budget: Note [Frugal replays].

Each program runs within a budget at which replays that protect softly what they need evict each
other's inputs: the first attempt at some version fails, and the second one is frugal.
"""

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from helpers import NO_LIMIT, assert_bitwise_equal
from torch import Tensor, nn

import rematfn
from rematfn import _C
from rematfn.policies import ON
from rematfn.testing import MemoryTimeline

Made = tuple[Callable[..., list[Tensor]], tuple[Any, ...]]


def transformer() -> nn.Module:
    layer = {"d_model": 32, "nhead": 2, "dim_feedforward": 64, "dropout": 0.1}
    return nn.Sequential(
        *(nn.TransformerEncoderLayer(**layer, batch_first=True, norm_first=True) for _ in range(8))
    )


def norms(gradients: Iterable[Tensor]) -> list[Tensor]:
    """Return what takes no room, where the gradients themselves would be most of the budget."""
    return [g.square().sum() for g in gradients]


def autograd() -> Made:
    net = transformer()

    def gradients(x: Tensor) -> list[Tensor]:
        loss = net(x).square().mean()
        return norms(torch.autograd.grad(loss, list(net.parameters())))

    return gradients, (torch.randn(8, 32, 32),)


def func_grad() -> Made:
    net = transformer()
    parameters = {name: p.detach() for name, p in net.named_parameters()}

    def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(net, parameters, (x,)).square().mean()

    def gradients(parameters: dict[str, Tensor], x: Tensor) -> list[Tensor]:
        return norms(torch.func.grad(loss)(parameters, x).values())

    return gradients, (parameters, torch.randn(8, 32, 32))


# Each with its budget, in multiples of what the largest operator needs.
@pytest.mark.parametrize(("make", "times"), [(autograd, 2.52), (func_grad, 1.8)])
def test_what_soft_replays_cannot_do(make: Callable[[], Made], times: float) -> None:
    f, args = make()

    def run(g: Callable[..., list[Tensor]]) -> list[Tensor]:
        torch.manual_seed(0)
        return g(*args)

    free = rematfn.remat(f, NO_LIMIT, policy=ON())
    run(free)
    budget = int(times * rematfn.stats(free).min_budget)
    bounded = rematfn.remat(f, budget, policy=ON())
    with MemoryTimeline() as timeline:
        results = run(bounded)
    assert_bitwise_equal(results, run(f))
    stats = rematfn.stats(bounded)
    assert stats.replayed_cost > 3, "a budget that is no test of this"
    assert stats.peak_bytes <= budget
    assert stats.min_budget <= budget
    assert timeline.peak <= budget + sum(t.nbytes for t in results)
    _C.testing.check()
