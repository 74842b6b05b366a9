# SPDX-License-Identifier: Apache-2.0
"""Warnings of calls that are costlier than they need to be, and of what to do."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

import rematfn


@contextmanager
def caught_of(kind: type[Warning]) -> Iterator[list[str]]:
    found: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield found
    found += [str(w.message) for w in caught if w.category is kind]


def wandering() -> Callable[[Tensor], Tensor]:
    """Return a function that runs other operators at each call."""
    operators = itertools.cycle((torch.sin, torch.cos, torch.tanh, torch.atan, torch.erf))

    def f(x: Tensor) -> Tensor:
        operator = next(operators)
        for _ in range(40):
            x = operator(x)
        return x.sum()

    return f


def test_calls_that_never_follow_their_record() -> None:
    g = rematfn.remat(wandering(), "1MiB")
    with caught_of(rematfn.errors.NotGuidedWarning) as found:
        for _ in range(20):
            g(torch.ones(4))
    (message,) = found
    assert "3 calls in a row" in message
    assert "are in no record" in message
    assert "policy=rematfn.policies.ON()" in message


def wide(x: Tensor) -> Tensor:
    for _ in range(12):
        x = (x[:, None] * x).sin().mean(0)
    return x.sum()


WIDE = 64 * 64 * 4


def test_an_operator_that_needs_all_of_the_budget() -> None:
    step, x = torch.func.grad(wide), torch.linspace(0, 1, 64)
    g = rematfn.remat(step, 3 * WIDE + 1024)
    with caught_of(rematfn.errors.FloorWarning) as found:
        for _ in range(3):
            assert torch.equal(g(x), step(x))
    (message,) = found
    assert "`aten::mul.Tensor`" in message or "`aten::mul`" in message
    assert "work in smaller pieces" in message
    with caught_of(rematfn.errors.FloorWarning) as found:
        for budget in (6 * WIDE, None):
            rematfn.remat(step, budget)(x)
    assert found == []
