# SPDX-License-Identifier: Apache-2.0
"""`profile`: what it predicts, and that calls bear it out."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from helpers import assert_bitwise_equal
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import rematfn

KIB = 1024


def chain(x: Tensor) -> Tensor:
    for _ in range(10):
        x = x.sin()
    return x.sum()


STEP = torch.func.grad(chain)
X = torch.linspace(0, 1, KIB)


def test_the_peak_is_that_of_a_call() -> None:
    found = rematfn.profile(STEP, X, budgets=[0.5])
    g = rematfn.remat(STEP)
    g(X)
    assert found.peak_bytes == rematfn.stats(g).unconstrained_bytes
    assert found.is_measured
    assert found.trace.operators == rematfn.stats(g).operators
    assert found.seconds > 0


def test_the_smallest_budget_is_one_that_calls_fit_in() -> None:
    found = rematfn.profile(STEP, X, budgets=[])
    g = rematfn.remat(STEP, found.min_budget)
    for _ in range(3):
        assert torch.equal(g(X), STEP(X))
    assert rematfn.stats(g).peak_bytes <= found.min_budget


@pytest.mark.parametrize(
    "f", [lambda: 3, lambda: X.view(32, 32), lambda: torch.ones(()), lambda: X.sum().item()]
)
def test_what_costs_next_to_nothing(f: Callable[[], object]) -> None:
    found = rematfn.profile(f)
    assert found.min_budget <= found.peak_bytes <= 4
    assert all(cost.time == 1 for cost in found.costs if cost.budget >= found.peak_bytes)


def test_budget_for() -> None:
    found = rematfn.profile(STEP, X, budgets=[])
    for time in (1.0, 1.1, 1.5):
        budget = found.budget_for(time)
        assert found.min_budget <= budget <= found.peak_bytes
        assert found.predict(budget).time <= time
    assert found.budget_for(math.inf) == found.min_budget
    with pytest.raises(ValueError, match="predicted to take 1 of its time already"):
        found.budget_for(0.9)


def test_budgets_are_several() -> None:
    found = rematfn.profile(STEP, X, budgets=np.linspace(0.5, 1, 3))
    assert [cost.fraction for cost in found.costs] == pytest.approx([0.5, 0.75, 1], abs=1e-3)
    for given in ("0.5", 0.5):
        with pytest.raises(TypeError, match="a list of budgets is needed"):
            rematfn.profile(STEP, X, budgets=given)  # type: ignore[arg-type]


def test_with_a_tier_less_is_enough() -> None:
    """What finds no room may move, so the least budget is not that of replays alone."""
    params, x = [torch.randn(128, 128) / 11 for _ in range(16)], torch.randn(512, 128)

    def loss(params: list[Tensor], x: Tensor) -> Tensor:
        for p in params:
            x = torch.tanh(x @ p)
        return x.square().mean()

    step = torch.func.grad(loss)
    alone = rematfn.profile(step, params, x, budgets=[])
    with_disk = rematfn.profile(step, params, x, budgets=[], offload=rematfn.Disk(bandwidth=1e9))
    assert with_disk.min_budget < 0.9 * alone.min_budget
    assert with_disk.predict(with_disk.min_budget).time < math.inf
    assert alone.predict(with_disk.min_budget).time == math.inf


def test_a_disk_that_nobody_has_used_is_measured() -> None:
    disk = rematfn.Disk(bandwidth=4e6)
    rematfn.profile(STEP, X, budgets=[0.5], offload=disk)
    assert disk.bandwidth_out is not None
    assert disk.bandwidth_in is not None
    assert max(disk.bandwidth_out, disk.bandwidth_in) < 8e6
    assert disk.bytes_out == 0


def test_what_fits_nowhere_is_profiled_on_fake_tensors() -> None:
    with FakeTensorMode():
        x = torch.ones(1 << 40)  # 4 TiB
        found = rematfn.profile(STEP, x, budgets=[0.5])
    assert not found.is_measured
    assert found.peak_bytes > 1 << 42
    assert 1 <= found.costs[0].time < math.inf
    assert "by the cost model" in str(found)


def test_a_cap_holds_for_the_measured_call() -> None:
    whole = rematfn.profile(STEP, X, budgets=[])
    with rematfn.testing.MemoryTimeline() as counted:
        capped = rematfn.profile(STEP, X, budgets=[0.5], cap=whole.peak_bytes // 2)
    assert counted.peak_excluding_survivors <= whole.peak_bytes // 2
    assert capped.peak_bytes == whole.peak_bytes
    with pytest.raises(rematfn.BudgetError):
        rematfn.profile(STEP, X, cap=64)
    with pytest.raises(TypeError, match="bytes are needed"):
        rematfn.profile(STEP, X, cap=0.5)


class Waves:
    @rematfn.remat(budget="64KiB")
    def method(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return chain(x * scale)


def test_what_wraps_a_transformed_function_is_profiled_too() -> None:
    g = rematfn.remat(chain, "64KiB")
    plain = rematfn.profile(STEP, X, budgets=[])
    for wrapped in (torch.func.grad(g), lambda x: torch.func.grad(g)(x)):
        found = rematfn.profile(wrapped, X, budgets=[])
        assert found.trace.operators == plain.trace.operators
        assert found.peak_bytes == plain.peak_bytes
    method = rematfn.profile(Waves().method, X, kwargs={"scale": 2.0}, budgets=[])
    assert method.trace.operators == rematfn.record(lambda x: chain(x * 2.0), X).operators


def test_a_budget_that_is_named_does_for_outputs_whose_size_depends_on_data() -> None:
    """Few elements are found; their bound is four times the argument."""

    def step(x: Tensor) -> tuple[Tensor, ...]:
        y = x.tanh()
        i = (y > 0.99).nonzero()
        loss = y[i[:, 0], i[:, 1]].sum() + y[y > 0.9].square().sum() + y.square().mean()
        return loss.detach(), *torch.autograd.grad(loss, x)

    x = torch.randn(256, 256, requires_grad=True)
    g = rematfn.remat(step, rematfn.profile(step, x).min_budget)
    for _ in range(2):
        assert_bitwise_equal(g(x), step(x))
