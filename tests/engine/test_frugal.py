# SPDX-License-Identifier: Apache-2.0
"""Replays close to the least budget: Note [Frugal replays].

A program runs within a budget at which replays that protect softly what they need evict each
other's inputs: the first attempt at some version fails, and the second one is frugal.
"""

from collections.abc import Callable

import torch
from helpers import NO_LIMIT, assert_bitwise_equal
from torch import Tensor, nn

import rematfn
from rematfn import _C
from rematfn.policies import ON
from rematfn.testing import MemoryTimeline


def step_of_a_transformer() -> Callable[[Tensor], list[Tensor]]:
    layer = {"d_model": 32, "nhead": 2, "dim_feedforward": 64, "dropout": 0.1}
    net = nn.Sequential(
        *(nn.TransformerEncoderLayer(**layer, batch_first=True, norm_first=True) for _ in range(5))
    )

    def norms(x: Tensor) -> list[Tensor]:
        """Return what takes no room: the gradients themselves would be most of the budget."""
        loss = net(x).square().mean()
        return [g.square().sum() for g in torch.autograd.grad(loss, list(net.parameters()))]

    return norms


TIMES = 2.52  # what the largest operator needs: the budget


def test_what_soft_replays_cannot_do() -> None:
    f, x = step_of_a_transformer(), torch.randn(8, 32, 32)

    def run(g: Callable[..., list[Tensor]]) -> list[Tensor]:
        torch.manual_seed(0)
        return g(x)

    free = rematfn.remat(f, NO_LIMIT, policy=ON())
    run(free)
    budget = int(TIMES * rematfn.stats(free).min_budget)
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
