# SPDX-License-Identifier: Apache-2.0
"""A fraction means bytes: the most that it has come to, in whichever order calls come."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import assert_bitwise_equal
from torch import Tensor, nn

import rematfn
from rematfn.testing import MemoryTimeline

FRACTION = 0.4
X, Y = torch.randn(512, 64), torch.randint(0, 8, (512,))

# t: training, v: validation; f: a full batch, s: the smaller last one.
TRAINS_FIRST = ["tf", "tf", "ts", "vf", "vs", "tf", "vf", "ts", "vs"]
VALIDATES_FIRST = ["vf", "vf", "tf", "tf", "ts", "vf", "vs", "tf", "ts", "vf"]


class Classifier(nn.Module):
    """A pass under `no_grad` needs two layers' outputs at once, more than 0.4 of its own peak."""

    def __init__(self) -> None:
        super().__init__()
        layers = [m for _ in range(8) for m in (nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.1))]
        self.net = nn.Sequential(*layers, nn.Linear(64, 8))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.net(x), y)


Loss = Callable[[Tensor, Tensor], Tensor]


def of_module(net: nn.Module, **options: Any) -> tuple[Any, Loss]:
    g = rematfn.remat(net, FRACTION, **options)
    return g, g


def of_function(net: nn.Module, **options: Any) -> tuple[Any, Loss]:
    g = rematfn.remat(lambda module, x, y: module(x, y), FRACTION, **options)
    return g, lambda x, y: g(net, x, y)


def run_batch(net: nn.Module, loss: Loss, batch: str) -> tuple[Tensor, list[Tensor]]:
    kind, size = batch
    rows = {"f": 512, "s": 96}[size]
    torch.manual_seed(0)
    net.train(kind == "t")
    with torch.set_grad_enabled(kind == "t"):
        found = loss(X[:rows], Y[:rows])
    if kind == "v":
        return found, []
    return found.detach(), list(torch.autograd.grad(found, list(net.parameters())))


@pytest.mark.parametrize("transformed", [of_module, of_function])
@pytest.mark.parametrize("order", [TRAINS_FIRST, VALIDATES_FIRST], ids=["train", "validate"])
def test_training_and_validation_are_within_the_most_that_the_fraction_came_to(
    transformed: Callable[..., tuple[Any, Loss]], order: list[str]
) -> None:
    torch.manual_seed(0)
    net = Classifier()
    twin = copy.deepcopy(net)
    g, loss = transformed(net)
    largest = 0
    for i, batch in enumerate(order):
        expected = run_batch(twin, twin, batch)
        with MemoryTimeline() as timeline:
            actual = run_batch(net, loss, batch)
        assert_bitwise_equal(actual, expected)
        stats = rematfn.stats(g)
        largest = max(largest, stats.unconstrained_bytes)
        if stats.budget is None:
            assert i == 0
            continue
        assert timeline.peak_excluding_survivors <= stats.budget, batch
        if any(b[0] == "t" for b in order[: i + 1]):
            assert stats.budget == int(FRACTION * largest), batch
        if batch != "tf":
            assert stats.evictions == 0, "there is room for all of it"


def deep(x: Tensor) -> Tensor:
    for _ in range(12):
        x = (x.sin() * x).tanh()
    return x.square().sum(-1)


def test_under_transforms() -> None:
    """The forward alone, its gradient, and that of each sample are calls of one function."""
    g = rematfn.remat(deep, FRACTION)

    def per_sample(f: Callable[[Tensor], Tensor]) -> Tensor:
        return torch.func.vmap(torch.func.grad(f))(X)

    with torch.no_grad():
        for _ in range(2):
            assert_bitwise_equal(g(X), deep(X))
    for _ in range(2):
        assert_bitwise_equal(per_sample(g), per_sample(deep))
    most = rematfn.stats(g).budget
    with torch.no_grad():
        assert_bitwise_equal(g(X), deep(X))
    assert rematfn.stats(g).budget == most
    assert rematfn.stats(g).evictions == 0


def test_a_call_that_needs_more_than_the_most_is_refused() -> None:
    """What it needs itself is an estimate no more, and a larger peak is not to come."""
    g = rematfn.remat(lambda x, twice: torch.cat([x.exp()] * 4).sum() * (1 + twice), 0.3)
    g(X, False)
    with torch.no_grad():
        g(X, False)
        with pytest.raises(rematfn.BudgetError, match="aten::cat"):
            g(X, False)


def test_what_was_measured_is_no_estimate_while_a_call_is_pending() -> None:
    """Two forwards before the backward: the second is held to the fraction as the first is."""
    w = torch.randn(64, 64) / 8

    def f(x: Tensor) -> Tensor:
        for _ in range(6):
            x = (x @ w).tanh().sin() * x
        return x.sum()

    g = rematfn.remat(f, 0.2)
    x = torch.randn(64, 64, requires_grad=True)
    g(x).backward()
    budget = int(0.2 * rematfn.stats(g).unconstrained_bytes)
    for _ in range(3):
        pending = g(x)
        with MemoryTimeline() as timeline, pytest.raises(rematfn.BudgetError):
            g(x).backward()
        assert timeline.peak_excluding_survivors <= budget
        del pending


def test_a_function_that_calls_itself_is_held_to_its_fraction_as_a_whole() -> None:
    w = torch.randn(64, 64, requires_grad=True)

    def f(x: Tensor, depth: int) -> Tensor:
        return inner((x @ w).tanh(), depth - 1).sin() if depth else x

    def step(outermost: Callable[[Tensor, int], Tensor]) -> Tensor:
        outermost(torch.ones(64, 64), 12).sum().backward()
        gradient, w.grad = w.grad, None
        return gradient

    inner = f
    with MemoryTimeline() as timeline:
        expected = step(f)
    inner = rematfn.remat(f, 0.6)
    for _ in range(3):
        with MemoryTimeline() as capped:
            assert_bitwise_equal(step(inner), expected)
    assert capped.peak <= 0.6 * timeline.peak + expected.nbytes
