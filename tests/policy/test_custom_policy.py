# SPDX-License-Identifier: Apache-2.0
"""A score written in Python: what it sees, what it decides, and what its errors do."""

from typing import Any

import pytest
import torch
from helpers import assert_bitwise_equal
from torch import Tensor

import rematfn
from rematfn.policies import Candidate, Custom
from rematfn.policies.reference import DTR, LRU, MSPS, Largest, Local

TICK = 5e-6
X = torch.linspace(-1, 1, 1024)


def chain(x: Tensor) -> Tensor:
    for k in range(10):
        x = (x.sin() * x)[: 1000 - 50 * k].exp().tanh()
    return x.square().sum()


GRAD = torch.func.grad(chain)
SEEN = Candidate(
    nbytes=8, cost=3, ancestors=4, descendants=5, age=2 - TICK, next_use=None, consumed=True,
    producer="aten::exp",
)  # fmt: skip


@pytest.mark.parametrize(
    ("policy", "score"),
    [
        (DTR(), (3 + 4 + 5) / (8 * 2)),
        (Local(), 3 / (8 * 2)),
        (MSPS(), (3 + 4) / 8),
        (LRU(), -2),
        (Largest(), -8),
    ],
    ids=repr,
)
def test_the_scores_of_the_literature(policy: Custom, score: float) -> None:
    assert policy.scorer(SEEN) == pytest.approx(score, rel=1e-5)
    g = rematfn.remat(GRAD, 60_000, policy=policy)
    assert_bitwise_equal(g(X), GRAD(X))
    assert rematfn.stats(g).peak_bytes <= 60_000
    assert rematfn.stats(g).replays > 0


def test_it_is_shown_what_is_evicted_around_a_value() -> None:
    """Of a chain, whose middle goes: to have an end back takes it, and it takes the beginning."""
    around: dict[str, set[tuple[int, int]]] = {}

    def score(c: Candidate) -> float:
        unit = c.cost  # all of the chain cost the same
        counts = (round(c.ancestors / unit), round(c.descendants / unit))
        around.setdefault(c.producer, set()).add(counts)
        return {"aten::sin": 0, "aten::neg": 1}.get(c.producer, 2)

    def f(x: Tensor) -> tuple[Tensor, ...]:
        begin = x.exp()
        first = begin.sin()
        second = first.sin()
        end = second.cos()
        return begin, first, second, end, end.neg(), end.neg(), begin.abs(), end.abs()

    g = rematfn.remat(f, 4 * X.nbytes, policy=score)
    with pytest.raises(rematfn.BudgetError):
        g(X)
    assert (0, 2) in around["aten::exp"]
    assert (2, 0) in around["aten::cos"]


def raising(_: Candidate) -> float:
    raise LookupError("no idea")


WRONG: list[tuple[Any, type[Exception], str]] = [
    (raising, LookupError, "no idea"),
    (lambda c: "costly", ValueError, "'costly'"),
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
