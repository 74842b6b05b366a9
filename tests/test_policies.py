# SPDX-License-Identifier: Apache-2.0
"""Every policy gives the bits of eager and keeps the bound; policies are checked as values."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import (
    Transform,
    assert_bitwise_equal,
    assert_nothing_keyed,
    loss_of,
    smallest_budgets,
    untransformed,
)
from programs import Program
from torch import Tensor

import rematfn
from rematfn import Custom, Manual, Memory, Policy, Speed, Sqrt
from rematfn._memory import MemoryTimeline

X = torch.linspace(-1, 1, 100)


def by_density(c: rematfn.Candidate) -> float:
    return c.cost / c.nbytes


POLICIES: list[Policy] = [
    Sqrt(),
    Memory(),
    Speed(),
    Manual(),
    Manual(drop=("nobody",)),
    Custom(by_density),
]


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_any_program_is_bitwise_eager_and_within_the_budget(
    program: Program, policy: Policy
) -> None:
    def run(transform: Transform) -> Any:
        case = program.make()
        g = transform(case.f)
        torch.manual_seed(7)
        # A first call is recorded; the later ones have a plan.
        outcome = [g(*case.args) for _ in range(3 if isinstance(policy, (Sqrt, Memory)) else 1)]
        return outcome, case.args, case.held, torch.rand(2)

    budgets = iter(smallest_budgets(run, 0.35, policy))
    made: list[Any] = []

    def within(f: Callable[..., Any]) -> Any:
        made.append(rematfn.remat(f, next(budgets), policy=policy))
        return made[-1]

    found = run(within)
    assert_nothing_keyed(found)
    assert_bitwise_equal(found, run(untransformed))
    for g in made:
        assert g.stats.peak_bytes <= g.stats.budget


@pytest.mark.parametrize("policy", [p for p in POLICIES if p.discards], ids=repr)
def test_what_is_not_kept_goes_after_the_forward_and_the_gradients_are_those_of_eager(
    differentiable: Program, policy: Policy
) -> None:
    def run(transform: Transform) -> Any:
        case = differentiable.make()
        loss = loss_of(case, transform)
        loss.backward()
        return loss, case.args, case.held, [t.grad for t in case.leaves()], torch.rand(2)

    found = run(lambda f: rematfn.remat(f, policy=policy))
    assert_nothing_keyed(found)
    assert_bitwise_equal(found, run(untransformed))


# --- as values ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "policy",
    [Sqrt(segments=3), Memory(), Speed(), Manual(only=("a", "b")), Custom(by_density)],
    ids=repr,
)
def test_a_policy_prints_compares_and_hashes(policy: Policy) -> None:
    same = dataclasses.replace(policy)
    assert same == policy
    assert hash(same) == hash(policy)
    assert repr(policy).startswith(type(policy).__name__ + "(")
    assert policy not in [p for p in (Sqrt(), rematfn.ON(), Manual()) if p is not policy]


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Sqrt(segments=0), "segments"),
        (lambda: Sqrt(segments=True), "segments"),
        (lambda: Sqrt(first=Sqrt()), "scores"),
        (lambda: Memory(first=Speed()), "scores"),
        (lambda: Manual(only="attention"), "tuple of names"),
        (lambda: Manual(but=(1,)), "tuple of names"),
        (lambda: Manual(only=("a",), drop=("b",)), "only, drop"),
        (lambda: Custom(3), "function"),
        (lambda: rematfn.remat(torch.sin, policy=3), "policy"),
        (lambda: rematfn.remat(torch.sin, policy=rematfn.ON), "policy"),
        (lambda: rematfn.keep(3), "tensor"),
        (lambda: rematfn.keep(X, 3), "string"),
        (lambda: rematfn.keep(X, ""), "string"),
    ],
)
def test_what_means_nothing_is_refused(make: Callable[[], Any], says: str) -> None:
    with pytest.raises((TypeError, ValueError), match=says):
        make()


def unrolled(x: Tensor, w: Tensor) -> Tensor:
    h = x
    for _ in range(64):
        h = torch.tanh(h @ w) + h * 0.1
    return h.square().sum()


def on_without_detector(c: rematfn.Candidate) -> float:
    fresh = 1 if c.consumed else 4
    return fresh * (c.cost + c.ancestors / 2) / (c.nbytes * (c.age + 5e-6) ** 0.6)


@pytest.mark.parametrize(("fraction", "thrashes"), [(0.7, False), (0.3, True)])
def test_where_a_backward_thrashes_the_score_looks_ahead(fraction: float, thrashes: bool) -> None:
    """See Note [A backward reads in reverse]."""
    x, w = torch.ones(32, 64), torch.eye(64) / 2
    trace = rematfn.record(torch.func.grad(unrolled, argnums=1), x, w)
    budget = int(fraction * trace.peak_bytes)
    cost, plain = (
        rematfn.simulate(trace, budget, policy).replayed_cost
        for policy in (rematfn.ON(), rematfn.Custom(on_without_detector))
    )
    assert plain > (1 if thrashes else 0)
    assert cost < plain / 2 if thrashes else cost == plain


def test_where_looking_ahead_does_not_help_it_is_given_up() -> None:
    """At the floor of a transformer: without that, its replays cost a third more."""
    layers = [
        torch.nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True) for _ in range(4)
    ]
    net = torch.nn.Sequential(*layers)

    def step(x: Tensor) -> Any:
        return torch.autograd.grad(net(x).square().mean(), list(net.parameters()))

    trace = rematfn.record(step, torch.randn(2, 16, 32))
    cost, plain = (
        rematfn.simulate(trace, 0.24, policy).replayed_cost
        for policy in (rematfn.ON(), rematfn.Custom(on_without_detector))
    )
    assert plain > 10
    assert cost < 1.1 * plain


@pytest.mark.parametrize("per_sample", [False, True], ids=["grad", "vmap-of-grad"])
def test_what_thrashes_is_still_exact_and_bounded(per_sample: bool) -> None:
    x, w = torch.linspace(-1, 1, 32 * 64).reshape(32, 64), torch.eye(64) / 2
    f = torch.func.grad(unrolled, argnums=1)
    if per_sample:
        f, x = torch.func.vmap(f, in_dims=(0, None)), x.reshape(4, 8, 64)
    trace = rematfn.record(f, x, w)
    budget = int(0.3 * trace.peak_bytes)
    expected = f(x, w)
    g = rematfn.remat(f, budget, policy=rematfn.ON())
    with MemoryTimeline() as timeline:
        found = g(x, w)
    assert_bitwise_equal(found, expected)
    assert timeline.peak <= budget
    predicted = rematfn.simulate(trace, budget, rematfn.ON())
    plain = rematfn.simulate(trace, budget, rematfn.Custom(on_without_detector))
    assert g.stats.replays == predicted.replays
    assert g.stats.replayed_cost < plain.replayed_cost


def deep(x: Tensor) -> Tensor:
    for _ in range(300):
        x = x.sin().cos()
    return x.square().sum()


@pytest.mark.parametrize(
    "f",
    [deep, torch.func.grad(deep), torch.func.vmap(torch.func.grad(deep))],
    ids=["plain", "grad", "vmap(grad)"],
)
def test_so_many_candidates_that_victims_are_chosen_a_batch_at_a_time(
    f: Callable[[Tensor], Tensor],
) -> None:
    """See Note [Victims are chosen a batch at a time]."""
    x = torch.linspace(-1, 1, 512).view(4, 128).requires_grad_()
    peak = rematfn.record(f, x).peak_bytes
    assert peak > 2 * 128 * x.nbytes  # so more than 128 are resident in half of it
    g = rematfn.remat(f, peak // 2, policy=rematfn.ON())
    with MemoryTimeline() as timeline:
        result = g(x)
    assert_bitwise_equal(result, f(x))
    assert g.stats.evictions > 100
    assert g.stats.peak_bytes <= peak // 2
    assert timeline.peak <= peak // 2 + result.nbytes
