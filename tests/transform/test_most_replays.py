# SPDX-License-Identifier: Apache-2.0
"""A call that replays far more than it computes says so, with a budget in which it does not."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from helpers import assert_bitwise_equal
from torch import Tensor

import rematfn
from rematfn import _C
from rematfn.policies import ON, Guided

X = torch.linspace(-1, 1, 4096)
TIGHT = 90_000  # of 1.2 MB
PLANNED = Guided(search=0)


def chain(x: Tensor) -> Tensor:
    for _ in range(12):
        x = (x.sin() * x).exp().tanh()
    return x.square().sum()


GRADIENT = torch.func.grad(chain)


def replayed(budget: Any, policy: rematfn.policies.Policy, calls: int = 1) -> float:
    """Return what the last of so many calls replays, unasked."""
    g = rematfn.remat(GRADIENT, budget, policy=policy, most_replays=float("inf"))
    for _ in range(calls):
        g(X)
    cost = rematfn.stats(g).replayed_cost
    assert cost is not None
    return cost


def bytes_in(message: str) -> int:
    found = re.search(
        r"Raise the budget to at least (?:[\d.]+ of the peak, )?([\d.]+) (\w+)", message
    )
    assert found, message
    budget = rematfn._transform.budget.parse_budget("".join(found.groups())).bytes
    assert budget is not None
    return budget


@pytest.mark.parametrize("policy", [ON(), PLANNED], ids=repr)
def test_a_first_call_that_passes_the_limit_is_refused_and_the_figure_is_enough(
    policy: rematfn.policies.Policy,
) -> None:
    most = replayed(TIGHT, policy) / 2
    assert most > 0
    g = rematfn.remat(GRADIENT, TIGHT, policy=policy, most_replays=most)
    with pytest.raises(rematfn.BudgetError, match=r"remat\(chain, budget=.*most_replays") as error:
        g(X)
    assert _C.stack_depth() == 0
    enough = bytes_in(str(error.value))
    peak = rematfn.record(GRADIENT, X).peak_bytes
    assert TIGHT < enough <= peak
    again = rematfn.remat(GRADIENT, enough, policy=policy, most_replays=most)
    for _ in range(3):
        assert_bitwise_equal(again(X), GRADIENT(X))
        assert rematfn.stats(again).replayed_cost <= most


def test_a_guided_call_is_judged_before_it_runs() -> None:
    by_plan = replayed(TIGHT, PLANNED, calls=2)
    ran = []

    def f(x: Tensor) -> Tensor:
        ran.append(x)
        return chain(x)

    g = rematfn.remat(torch.func.grad(f), TIGHT, policy=PLANNED, most_replays=0.9 * by_plan)
    with pytest.raises(rematfn.BudgetError, match="the call replays"):
        g(X)
    for _ in range(2):
        with pytest.raises(rematfn.BudgetError, match="by its plan") as error:
            g(X)
        assert bytes_in(str(error.value)) > TIGHT
    assert len(ran) == 1
    assert _C.stack_depth() == 0
    small = X[:64].clone()
    assert_bitwise_equal(g(small), GRADIENT(small))


def test_a_limit_above_is_no_limit() -> None:
    most = 1.01 * replayed(TIGHT, PLANNED)
    g = rematfn.remat(GRADIENT, TIGHT, policy=PLANNED, most_replays=most)
    for _ in range(3):
        assert_bitwise_equal(g(X), GRADIENT(X))


def test_a_backward_that_comes_after_the_call_is_judged_at_the_next_call() -> None:
    x = X.clone().requires_grad_()
    g = rematfn.remat(chain, TIGHT, policy=ON(), most_replays=0.01)
    g(x).backward()
    expected, x.grad = x.grad, None
    chain(x).backward()
    assert_bitwise_equal(x.grad, expected)
    assert rematfn.stats(g).replayed_cost > 0.01
    with pytest.warns(UserWarning, match="the last call replays") as caught:
        g(x)
    assert bytes_in(str(caught[0].message)) > TIGHT


def test_a_fraction_is_answered_by_a_fraction() -> None:
    g = rematfn.remat(GRADIENT, 0.3, policy=PLANNED, most_replays=0.01)
    g(X)  # has no cap yet
    with pytest.raises(rematfn.BudgetError, match=r"at least (0\.\d+|1) of the peak") as error:
        g(X)
    found = re.search(r"at least ([\d.]+) of the peak", str(error.value))
    assert found
    fraction = float(found[1])
    assert 0.3 < fraction <= 1
    h = rematfn.remat(GRADIENT, fraction, policy=PLANNED, most_replays=0.01)
    for _ in range(3):
        assert_bitwise_equal(h(X), GRADIENT(X))


@pytest.mark.parametrize("wrong", [True, "4", [4]])
def test_a_limit_of_the_wrong_type_is_refused(wrong: Any) -> None:
    with pytest.raises(TypeError, match=r"most_replays=.*a number is needed"):
        rematfn.remat(chain, TIGHT, most_replays=wrong)


@pytest.mark.parametrize("wrong", [0, -1.0, float("nan")])
def test_a_limit_that_means_nothing_is_refused(wrong: Any) -> None:
    with pytest.raises(ValueError, match="above 0"):
        rematfn.remat(chain, TIGHT, most_replays=wrong)
