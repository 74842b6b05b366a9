# SPDX-License-Identifier: Apache-2.0
"""A score written in Python: what it sees, what it decides, and what its errors do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import assert_bitwise_equal
from torch import Tensor

import rematfn
from rematfn.policies import Candidate, Policy
from rematfn.policies.reference import MSPS, Largest, Local

TICK = 5e-6
X = torch.linspace(-1, 1, 1024)


def chain(x: Tensor) -> Tensor:
    for k in range(10):
        x = (x.sin() * x)[: 1000 - 50 * k].exp().tanh()
    return x.square().sum()


GRAD = torch.func.grad(chain)
ALIKE: list[tuple[Any, Policy]] = [
    (lambda c: -c.nbytes, Largest()),
    (lambda c: c.cost / (c.nbytes * (c.age + TICK)), Local()),
    (lambda c: (c.cost + c.ancestors) / c.nbytes, MSPS()),
]


@pytest.mark.parametrize(("scorer", "policy"), ALIKE, ids=[repr(p) for _, p in ALIKE])
def test_a_score_in_python_evicts_what_the_same_score_of_the_core_does(
    scorer: Any, policy: Policy
) -> None:
    counted = []
    for chosen in (scorer, policy):
        g = rematfn.remat(GRAD, 60_000, policy=chosen)
        assert_bitwise_equal(g(X), GRAD(X))
        stats = rematfn.stats(g)
        assert stats.peak_bytes <= 60_000
        counted.append((stats.evictions, stats.replays, stats.replayed_cost))
    assert counted[0] == counted[1]
    assert counted[0][1] > 0


def raising(_: Candidate) -> float:
    raise LookupError("no idea")


WRONG: list[tuple[Any, type[Exception], str]] = [
    (raising, LookupError, "no idea"),
    (lambda c: "dear", ValueError, "'dear'"),
    (lambda c: None, ValueError, "None"),
    (lambda c: float("nan"), ValueError, "NaN"),
    (lambda: 1.0, RuntimeError, "argument"),
]


@pytest.mark.parametrize(("scorer", "error", "says"), WRONG)
def test_its_errors_are_the_operators_and_lose_nothing(
    scorer: Any, error: type[Exception], says: str
) -> None:
    wrong = [True]

    def run(c: Candidate) -> Any:
        return scorer(c) if wrong[0] else -c.age

    g = rematfn.remat(GRAD, 60_000, policy=run)
    with pytest.raises(error, match=says):
        g(X)
    rematfn.testing.check()
    wrong[0] = False
    assert_bitwise_equal(g(X), GRAD(X))
