# SPDX-License-Identifier: Apache-2.0
"""Results count until the last of them is there: a call that hands out much stays in its budget.

Bytes are counted at the allocator.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import assert_bitwise_equal
from torch import Tensor, nn

import rematfn
from rematfn.testing import MemoryTimeline

Step = Callable[[Tensor], Any]


def net_of(width: int, activation: type[nn.Module]) -> nn.Module:
    torch.manual_seed(3)
    layers = [layer for _ in range(4) for layer in (nn.Linear(width, width), activation())]
    return nn.Sequential(*layers)


def returned(net: nn.Module) -> Step:
    def step(x: Tensor) -> Any:
        return torch.autograd.grad(net(x).square().mean(), list(net.parameters()))

    return step


def on_leaves(net: nn.Module) -> Step:
    def step(x: Tensor) -> Tensor:
        net.zero_grad()
        loss = net(x).square().mean()
        loss.backward()
        return loss.detach()

    return step


def outcome(step: Step, net: nn.Module, x: Tensor) -> Any:
    result = step(x)
    return result, [p.grad for p in net.parameters()]


@pytest.mark.parametrize("make", [returned, on_leaves])
@pytest.mark.parametrize(
    ("width", "batch", "activation"), [(64, 8, nn.Identity), (32, 256, nn.Tanh)]
)
def test_the_peak_is_in_the_budget(
    make: Callable[[nn.Module], Step], width: int, batch: int, activation: type[nn.Module]
) -> None:
    x = torch.randn(batch, width)
    net = net_of(width, activation)
    step = make(net)
    step(x)
    with MemoryTimeline() as timeline:
        result = step(x)
    eager = timeline.peak
    expected = outcome(step, net, x)
    del result
    for fraction in (1.0, 0.6):
        budget = int(fraction * eager)
        net = net_of(width, activation)
        bounded = rematfn.remat(make(net), budget)
        for _ in range(2):  # online, and guided
            net.zero_grad()
            try:
                with MemoryTimeline() as timeline:
                    result = outcome(bounded, net, x)
            except rematfn.BudgetError:
                fits = False
            else:
                fits = True
                assert_bitwise_equal(result, expected)
                del result
            assert timeline.peak <= budget
            assert fits or fraction < 1
    rematfn.testing.check()
