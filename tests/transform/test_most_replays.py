# SPDX-License-Identifier: Apache-2.0
"""A call that replays far more than it computes says so, with a budget in which it does not."""

import re
import warnings
from typing import Any

import pytest
import torch
from helpers import assert_bitwise_equal
from programs_traced import waves
from torch import Tensor

import rematfn
from rematfn import _C
from rematfn.policies import Guided

X = torch.linspace(-1, 1, 4096)
TIGHT = 90_000  # of 1.2 MB
PLANNED = Guided(search=0)


GRADIENT = torch.func.grad(waves)


def bytes_in(message: str) -> int:
    found = re.search(r"Raise the budget to about [^(]*\((\d+) bytes\)", message)
    assert found, message
    return int(found[1])


# --- without a limit, a warning -------------------------------------------------------------------


def selective_scan() -> tuple[Any, tuple[Any, ...]]:
    """Return a Mamba's scan as its reference writes it, a loop over time, and arguments."""
    draw = torch.Generator().manual_seed(0)
    steps, channels, state = 24, 16, 8
    u = torch.randn(2, channels, steps, generator=draw)
    delta = torch.rand(2, channels, steps, generator=draw)
    a = -torch.rand(channels, state, generator=draw)
    b, c = torch.randn(2, 2, state, steps, generator=draw).unbind()

    def loss(u: Tensor, delta: Tensor, a: Tensor) -> Tensor:
        decay = torch.exp(torch.einsum("bdl,dn->bdln", delta, a))
        inputs = torch.einsum("bdl,bnl,bdl->bdln", delta, b, u)
        h = u.new_zeros(2, channels, state)
        outputs = []
        for t in range(steps):
            h = decay[:, :, t] * h + inputs[:, :, t]
            outputs.append(torch.einsum("bdn,bn->bd", h, c[:, :, t]))
        return (torch.stack(outputs, 2) * u).square().sum()

    return torch.func.grad(loss, argnums=(0, 1, 2)), (u, delta, a)


def test_a_budget_a_little_too_small_is_warned_of_with_one_that_is_not() -> None:
    f, args = selective_scan()
    expected = f(*args)
    peak = rematfn.record(f, *args).peak_bytes
    tight = rematfn.remat(f, int(0.4 * peak))
    with pytest.warns(rematfn.errors.ThrashingWarning, match="allows 4 times by default") as caught:
        assert_bitwise_equal(tight(*args), expected)
    assert len(caught) == 1
    assert rematfn.stats(tight).replayed_cost > 4
    enough = bytes_in(str(caught[0].message))
    assert 0.4 * peak < enough < peak
    ample = rematfn.remat(f, enough)
    with warnings.catch_warnings():
        warnings.simplefilter("error", rematfn.errors.ThrashingWarning)
        for _ in range(3):
            assert_bitwise_equal(ample(*args), expected)
            assert_bitwise_equal(tight(*args), expected)  # it has been said


@pytest.mark.filterwarnings("error::rematfn.errors.ThrashingWarning")
def test_who_sets_a_limit_or_evicts_everything_is_not_warned() -> None:
    for options in ({"most_replays": float("inf")}, {"policy": rematfn.testing.EvictEverything()}):
        g = rematfn.remat(GRADIENT, TIGHT, **options)
        assert_bitwise_equal(g(X), GRADIENT(X))
        assert rematfn.stats(g).replayed_cost > 4


def test_a_guided_call_is_warned_of_before_it_runs() -> None:
    f, args = selective_scan()
    fraction = 0.4
    g = rematfn.remat(f, fraction, policy=PLANNED)
    g(*args)  # has no cap yet
    with pytest.warns(rematfn.errors.ThrashingWarning, match="the call, by its plan") as caught:
        assert_bitwise_equal(g(*args), f(*args))
    found = re.search(r"about ([\d.]+) of the unconstrained peak", str(caught[0].message))
    assert found
    assert fraction < float(found[1]) <= 1


# --- with one, an error ---------------------------------------------------------------------------


def test_a_first_call_that_thrashes_is_stopped_while_it_runs() -> None:
    f, args = selective_scan()
    peak = rematfn.record(f, *args).peak_bytes
    patient = rematfn.remat(f, int(0.4 * peak), most_replays=float("inf"))
    patient(*args)
    full = rematfn.stats(patient)
    assert full.replayed_cost > 20
    g = rematfn.remat(f, int(0.4 * peak), most_replays=4)
    said = r"(?s)remat\(loss, budget=.*by now the call has replayed.*most_replays"
    with pytest.raises(rematfn.BudgetError, match=said) as error:
        g(*args)
    assert _C.stack_depth() == 0
    assert rematfn.stats(g).replays < full.replays / 2
    enough = bytes_in(str(error.value))
    assert 0.4 * peak < enough <= peak
    again = rematfn.remat(f, enough, most_replays=4)
    for _ in range(3):
        assert_bitwise_equal(again(*args), f(*args))
        assert rematfn.stats(again).replayed_cost <= 4


def test_a_call_that_might_never_end_is_stopped() -> None:
    f, args = selective_scan()
    budget = int(0.33 * rematfn.record(f, *args).peak_bytes)
    g = rematfn.remat(f, budget)
    with pytest.raises(rematfn.BudgetError, match="is stopped at 100 times") as error:
        g(*args)
    assert _C.stack_depth() == 0
    assert_bitwise_equal(rematfn.remat(f, bytes_in(str(error.value)))(*args), f(*args))


def test_a_plan_that_would_be_stopped_is_refused_before_it_begins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rematfn._transform.options.ENDLESS", 6.0)
    f, args = selective_scan()
    g = rematfn.remat(f, 0.4, policy=PLANNED)
    g(*args)  # has no cap yet
    before = rematfn.stats(g)
    with pytest.raises(rematfn.BudgetError, match=r"by its plan.* and is stopped at 6 times"):
        g(*args)
    assert rematfn.stats(g) == before


@pytest.mark.parametrize("wrong", [0, -1.0, float("nan")])
def test_a_limit_that_means_nothing_is_refused(wrong: Any) -> None:
    with pytest.raises(ValueError, match="above 0"):
        rematfn.remat(waves, TIGHT, most_replays=wrong)
