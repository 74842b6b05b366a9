# SPDX-License-Identifier: Apache-2.0
"""Replays close to the least budget: Note [Frugal replays].

Each program runs within a budget at which replays that protect softly what they need evict each
other's inputs: the first attempt at some version fails, and the second one is frugal.
"""

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from helpers import NO_LIMIT, assert_bitwise_equal, kept, tensors_in
from torch import Tensor, nn

import rematfn
from rematfn import _C
from rematfn.policies import ON
from rematfn.testing import MemoryTimeline

Step = Callable[[], Any]


class Block(nn.Module):
    def __init__(self, n: int) -> None:
        super().__init__()
        halves = ((nn.BatchNorm1d(n), nn.ReLU(), nn.Linear(n, n)) for _ in range(2))
        self.branch = nn.Sequential(*(layer for half in halves for layer in half))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.branch(x)
        return y


def transformer() -> nn.Module:
    layer = {"d_model": 32, "nhead": 2, "dim_feedforward": 64, "dropout": 0.1}
    return nn.Sequential(
        *(nn.TransformerEncoderLayer(**layer, batch_first=True, norm_first=True) for _ in range(8))
    )


# Without convolutions: their scratch, and so what is near the least budget, is a processor's own.
def residual_backward(transform: Callable[[Any], Any]) -> Step:
    net = nn.Sequential(nn.Linear(8, 16), *(Block(16) for _ in range(10)))
    x = torch.randn(512, 8)
    g = transform(lambda x: net(x).square().mean())

    def step() -> Any:
        g(x).backward()
        return [p.grad for p in net.parameters()]

    return step


def norms(gradients: Iterable[Tensor]) -> list[Tensor]:
    """Return what takes no room, where the gradients themselves would be most of the budget."""
    return [g.square().sum() for g in gradients]


def transformer_gradients(transform: Callable[[Any], Any]) -> Step:
    net = transformer()

    def gradients(x: Tensor) -> Any:
        loss = net(x).square().mean()
        return norms(torch.autograd.grad(loss, list(net.parameters())))

    return functools.partial(transform(gradients), torch.randn(8, 32, 32))


def transformer_grad(transform: Callable[[Any], Any]) -> Step:
    net = transformer()
    parameters = {name: p.detach() for name, p in net.named_parameters()}

    def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(net, parameters, (x,)).square().mean()

    def gradients(parameters: dict[str, Tensor], x: Tensor) -> list[Tensor]:
        return norms(torch.func.grad(loss)(parameters, x).values())

    return functools.partial(transform(gradients), parameters, torch.randn(8, 32, 32))


@dataclass(frozen=True)
class Case:
    make: Callable[[Callable[[Any], Any]], Step]
    times: float  # what the largest operator needs


CASES = [
    Case(residual_backward, 1.4),
    Case(transformer_gradients, 2.52),
    Case(transformer_grad, 1.8),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.make.__name__)
def test_what_soft_replays_cannot_do(case: Case) -> None:
    def within(budget: int) -> tuple[Callable[[Any], Any], list[Any]]:
        return kept(functools.partial(rematfn.remat, budget=budget, policy=ON()))

    expected, _ = counted(case, lambda f: f)
    free, made = within(NO_LIMIT)
    counted(case, free)
    budget = int(case.times * rematfn.stats(made[0]).min_budget)
    bounded, made = within(budget)
    results, timeline = counted(case, bounded)
    assert_bitwise_equal(results, expected)
    stats = rematfn.stats(made[0])
    assert stats.replayed_cost > 3, "a budget that is no test of this"
    assert stats.peak_bytes <= budget
    assert stats.min_budget <= budget
    assert timeline.peak <= budget + sum(t.nbytes for t in tensors_in(results))
    _C.testing.check()


def counted(case: Case, transform: Callable[[Any], Any]) -> tuple[Any, MemoryTimeline]:
    torch.manual_seed(0)
    step = case.make(transform)
    with MemoryTimeline() as timeline:
        results = step()
    return results, timeline
