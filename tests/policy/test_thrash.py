# SPDX-License-Identifier: Apache-2.0
"""Replays that cost more than the program, and what the engine then does otherwise."""

from typing import Any

import pytest
import torch
from helpers import assert_bitwise_equal
from torch import Tensor, nn

import rematfn
from rematfn.demo.task import Count
from rematfn.policies import ON
from rematfn.testing import MemoryTimeline


def unrolled(x: Tensor, w: Tensor) -> Tensor:
    h = x
    for _ in range(64):
        h = torch.tanh(h @ w) + h * 0.1
    return h.square().sum()


def on_without_detector(c: rematfn.policies.Candidate) -> float:
    fresh = 1 if c.consumed else 4
    return fresh * (c.cost + c.ancestors / 2) / (c.nbytes * (c.age + 5e-6) ** 0.6)


@pytest.mark.parametrize("per_sample", [False, True], ids=["grad", "vmap-of-grad"])
def test_what_thrashes_is_still_exact_and_bounded(per_sample: bool) -> None:
    x, w = torch.linspace(-1, 1, 32 * 64).reshape(32, 64), torch.eye(64) / 2
    f = torch.func.grad(unrolled, argnums=1)
    if per_sample:
        f, x = torch.func.vmap(f, in_dims=(0, None)), x.reshape(4, 8, 64)
    trace = rematfn.record(f, x, w)
    budget = int(0.3 * trace.peak_bytes)
    expected = f(x, w)
    g = rematfn.remat(f, budget, policy=rematfn.policies.ON())
    with MemoryTimeline() as timeline:
        found = g(x, w)
    assert_bitwise_equal(found, expected)
    assert timeline.peak <= budget
    predicted = rematfn.simulate(trace, budget, rematfn.policies.ON())
    plain = rematfn.simulate(trace, budget, rematfn.policies.Custom(on_without_detector))
    assert rematfn.stats(g).replays == predicted.replays
    assert rematfn.stats(g).replayed_cost < plain.replayed_cost


def curvature(x: Tensor, layers: int = 8, channels: int = 8) -> tuple[Any, tuple[Any, Any]]:
    """Return a Hessian-vector product of a convolutional network, and its arguments."""
    torch.manual_seed(0)
    net = torch.nn.Sequential()
    for _ in range(layers):
        net.append(torch.nn.Conv2d(channels, channels, 3, padding=1)).append(torch.nn.Tanh())
    parameters = {name: p.detach() for name, p in net.named_parameters()}
    direction = {name: torch.randn_like(p) for name, p in parameters.items()}

    def loss(p: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(net, p, (x,)).square().mean()

    def product(p: dict[str, Tensor], v: dict[str, Tensor]) -> Any:
        return torch.func.jvp(torch.func.grad(loss), (p,), (v,))[1]

    return product, (parameters, direction)


def test_where_replays_run_away_gradients_are_not_given_for_what_a_replay_reads() -> None:
    """See Note [Near the floor], Rule 2."""
    f, arguments = curvature(torch.randn(4, 8, 16, 16))
    trace = rematfn.record(f, *arguments)
    budget = int(0.18 * trace.peak_bytes)
    plain = rematfn.simulate(trace, budget, rematfn.policies.Custom(on_without_detector))
    online = rematfn.simulate(trace, budget, rematfn.policies.ON())
    guided = rematfn.simulate(trace, budget, rematfn.policies.Guided())
    assert plain.replayed_cost > 4  # from 6.6 on, as each processor's convolutions need scratch
    assert online.replayed_cost < plain.replayed_cost / 2
    assert guided.replayed_cost < online.replayed_cost

    expected = f(*arguments)
    g = rematfn.remat(f, budget, policy=rematfn.policies.ON())
    with MemoryTimeline() as timeline:
        found = g(*arguments)
    assert_bitwise_equal(found, expected)
    assert Count.of(timeline, found).peak <= budget
    stats = rematfn.stats(g)
    assert (stats.replays, stats.evictions) == (online.replays, online.evictions)


def test_a_gradient_that_went_for_a_replay_is_made_again_from_the_one_before() -> None:
    """See Note [What is away is made again from what is here]: else 12.8 of the program's cost."""
    torch.manual_seed(0)
    layers = [layer for _ in range(8) for layer in (nn.Linear(64, 64), nn.Tanh())]
    net, x = nn.Sequential(*layers), torch.randn(128, 64)
    bounded = rematfn.remat(net, int(3.5 * x.nbytes), policy=ON())
    parameters = list(net.parameters())
    expected, found = (
        torch.autograd.grad(f(x).square().mean(), parameters) for f in (net, bounded)
    )
    assert_bitwise_equal(found, expected)
    assert rematfn.stats(bounded).replayed_cost < 3
