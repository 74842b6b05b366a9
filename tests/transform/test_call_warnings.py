# SPDX-License-Identifier: Apache-2.0
"""Warnings of calls that are costlier than they need to be, and of what to do."""

import contextlib
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

import rematfn


@contextmanager
def caught_of(kind: type[Warning]) -> Iterator[list[str]]:
    found: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield found
    found += [str(w.message) for w in caught if w.category is kind]


def test_plans_that_are_given_up_are_left_at_no_operator() -> None:
    """Each record is that of a backward which failed in its middle, and the next call goes on."""

    def f(x: Tensor) -> Tensor:
        for _ in range(24):
            x = (x.sin() * x).tanh()
        return x

    def fail(grads: Any) -> None:
        raise KeyError

    g = rematfn.remat(f, 8 * 4096)
    with caught_of(rematfn.errors.NotGuidedWarning) as found:
        for k in range(12):
            y = g(torch.linspace(0, 1, 1024).requires_grad_())
            if depth := (6, 30, 0)[k % 3]:
                node = y.grad_fn
                for _ in range(depth):
                    node = node.next_functions[0][0]
                node.register_prehook(fail)
            with contextlib.suppress(KeyError):
                y.sum().backward()
    (message,) = found
    assert "3 calls in a row" in message
    assert "policy=rematfn.policies.ON()" in message
    assert "``" not in message
    assert "or replays cost more than was planned" in message


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


class Flow(nn.Module):
    """Its `forward` computes nothing: what it returns does, later."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))

    def forward(self, c: Tensor) -> Callable[[Tensor], Tensor]:
        return lambda x: -self.net(x + c).square().sum(-1)

    def log_prob(self, c: Tensor, x: Tensor) -> Tensor:
        return self(c)(x)


def test_a_call_that_computes_later() -> None:
    flow, c, x = Flow(), torch.linspace(-1, 1, 64), torch.ones(256, 64)
    for g in (rematfn.remat(flow, "1MiB"), rematfn.offload(flow.forward)):
        with caught_of(rematfn.errors.DeferredWarning) as found:
            for _ in range(3):
                g(c)
        (message,) = found
        assert "has run no operator, and returned function" in message
        assert "(c).log_prob(x), budget)" in message
    with caught_of(rematfn.errors.DeferredWarning) as found:
        rematfn.remat(flow)(c)  # there is no budget
        rematfn.remat(lambda c: c, "1MiB")(c)
        expected = flow.log_prob(c, x)
        flow.log_prob = rematfn.remat(flow.log_prob, "512KiB")  # type: ignore[method-assign]
        assert torch.equal(flow.log_prob(c, x), expected)
    assert found == []
    assert rematfn.stats(flow.log_prob).peak_bytes <= 512 * 1024  # type: ignore[operator]
