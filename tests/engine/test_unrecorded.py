# SPDX-License-Identifier: Apache-2.0
"""Bytes that no operator has made: see Note [Bytes beside operators]."""

import copy
import functools
import pickle
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from helpers import EVERYTHING, assert_bitwise_equal
from torch import Tensor

import rematfn
from rematfn.testing import MemoryTimeline

X = torch.linspace(-1, 1, 64)
STEPS = 200


def scaled(x: Tensor) -> Tensor:
    """Autograd saves each number, and no value of the chain."""
    for i in range(STEPS):
        x = x * (1 + i / STEPS)
    return x.sum()


def mixed(x: Tensor, steps: int = STEPS) -> Tensor:
    """Autograd saves both."""
    for i in range(steps):
        x = (x * (1 + i / STEPS)).sin()
    return x.sum()


def backward(loss: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def step(x: Tensor) -> Tensor:
        leaf = x.detach().requires_grad_()
        (grad,) = torch.autograd.grad(loss(leaf), leaf)
        return grad

    return step


GRADIENTS: dict[str, Callable[[Callable[[Tensor], Tensor]], Callable[[Tensor], Tensor]]] = {
    "backward": backward,
    "grad": torch.func.grad,
    "vmap of grad": lambda loss: torch.func.vmap(torch.func.grad(lambda x: loss(x.sin()))),
    "jvp of grad": lambda loss: lambda x: torch.func.jvp(torch.func.grad(loss), (x,), (x,))[1],
    "jacrev": lambda loss: torch.func.jacrev(lambda x: loss(x) * x[:2]),
    "hvp": lambda loss: torch.func.grad(lambda x: torch.func.grad(loss)(x).square().sum()),
}


@pytest.mark.parametrize(
    ("policy", "steps"),
    [(rematfn.policies.ON(), 80), (rematfn.testing.EvictEverything(), 4)],
    ids=str,
)
@pytest.mark.parametrize("gradient", GRADIENTS)
def test_numbers_count_as_the_allocator_counts_them(
    gradient: str, policy: rematfn.policies.Policy, steps: int
) -> None:
    f = GRADIENTS[gradient](functools.partial(mixed, steps=steps))
    expected = f(X)
    trace = rematfn.record(f, X)
    for fraction in (0.6, 0.3) if policy == rematfn.policies.ON() else (1.0, 0.8):
        budget = int(fraction * trace.peak_bytes)
        g = rematfn.remat(f, budget, policy=policy)
        with MemoryTimeline() as timeline:
            found = g(X)
        assert_bitwise_equal(found, expected)
        assert rematfn.stats(g).replays > 0
        assert timeline.peak <= budget
        assert rematfn.stats(g).replays == rematfn.simulate(trace, budget, policy).replays


def test_numbers_count_while_the_graph_lives() -> None:
    x = X.clone().requires_grad_()
    g = rematfn.remat(scaled, 1 << 20)
    loss = g(x)
    assert rematfn.stats(g).resident_bytes >= 8 * STEPS
    with ThreadPoolExecutor(1) as pool:
        pool.submit(lambda: loss.backward()).result()
    assert rematfn.stats(g).resident_bytes == 0


def test_numbers_that_do_not_fit_are_an_error_before_they_are_made() -> None:
    f = torch.func.grad(scaled)
    budget = 4 * X.nbytes
    assert budget < 8 * STEPS
    g = rematfn.remat(f, budget, policy=rematfn.policies.ON())
    with MemoryTimeline() as timeline, pytest.raises(rematfn.BudgetError, match="Raise the budget"):
        g(X)
    assert timeline.peak <= budget
    assert rematfn.stats(g).peak_bytes <= budget


STATE = [torch.linspace(0, 1, 1 << 16) for _ in range(8)]
PICKLED = pickle.dumps(STATE)
STORAGES: dict[str, Callable[[], object]] = {
    "deepcopy": lambda: copy.deepcopy(STATE),
    "pickle": lambda: pickle.loads(PICKLED),
    "made": lambda: [torch.UntypedStorage(1 << 18) for _ in range(8)],
    "made for a device": lambda: [torch.UntypedStorage(1 << 18, device="cpu") for _ in range(8)],
    "cloned": lambda: [x.untyped_storage().clone() for x in STATE],
}


@pytest.mark.parametrize("gradient", GRADIENTS)
def test_storages_that_are_made_are_exact(gradient: str) -> None:
    def loss(x: Tensor) -> Tensor:
        (w, *_) = copy.deepcopy(STATE)
        (v, *_) = pickle.loads(PICKLED)
        return ((x.sin() * w[:64]).exp() + v[:64]).square().sum()

    expected = GRADIENTS[gradient](loss)(X)
    for transform in (EVERYTHING, rematfn.remat):
        assert_bitwise_equal(transform(GRADIENTS[gradient](loss))(X), expected)
        assert_bitwise_equal(GRADIENTS[gradient](transform(loss))(X), expected)


@pytest.mark.parametrize("make", STORAGES.values(), ids=STORAGES.keys())
def test_a_storage_that_is_made_counts(make: Callable[[], object]) -> None:
    """Torch's constructor asks its default allocator, which counts for nobody."""

    def f() -> Tensor:
        kept = make()
        result = X.sin().sum()
        del kept
        return result

    with MemoryTimeline() as timeline:
        expected = f()
    assert_bitwise_equal(rematfn.remat(f, timeline.peak + 4096)(), expected)
    with pytest.raises(rematfn.BudgetError):
        rematfn.remat(f, timeline.peak // 2)()


WIDTH = 256
WEIGHTS = [torch.linspace(-k, 1, WIDTH * WIDTH).view(WIDTH, WIDTH) / 16 for k in range(12)]


@pytest.mark.parametrize("budget", [None, 1.0, "eager"], ids=str)
@pytest.mark.parametrize("rows", [WIDTH // 8, 4 * WIDTH])
def test_weights_that_are_read_and_dropped_are_given_back(
    rows: int, budget: float | str | None
) -> None:
    """Lineage alone holds them. What was made from them may be smaller or larger than they are."""

    def f(x: Tensor) -> Tensor:
        for w in WEIGHTS:
            x = (x @ pickle.loads(pickle.dumps(w))).tanh()
        return x

    x = torch.linspace(0, 1, rows * WIDTH).view(rows, WIDTH)
    expected = f(x)
    with MemoryTimeline() as timeline:
        f(x)
    most = timeline.peak
    g = rematfn.remat(f, most + 4096 if budget == "eager" else budget)
    for _ in range(3):
        with MemoryTimeline() as timeline:
            found = g(x)
        assert_bitwise_equal(found, expected)
        assert timeline.peak <= most + 2 * WEIGHTS[0].nbytes


@pytest.mark.parametrize("budget", [None, "1GiB"])
def test_arrays_that_are_read_and_dropped_are_given_back(budget: str | None) -> None:
    read: list[weakref.ref[Any]] = []
    most = 0

    def f(x: Tensor) -> Tensor:
        nonlocal most
        for w in WEIGHTS:
            array = w.numpy().copy()
            read.append(weakref.ref(array))
            x = (x @ torch.from_numpy(array)).tanh()
            most = max(most, sum(r() is not None for r in read))
        return x

    x = torch.linspace(0, 1, 32 * WIDTH).view(32, WIDTH)
    assert_bitwise_equal(rematfn.remat(f, budget)(x), f(x))
    assert len(read) == 2 * len(WEIGHTS)
    assert most <= 3
