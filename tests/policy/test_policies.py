# SPDX-License-Identifier: Apache-2.0
"""Every policy gives the bits of eager and keeps the bound; policies are checked as values."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import (
    Transform,
    assert_bitwise_equal,
    assert_nothing_keyed,
    described,
    kept,
    smallest_budgets,
    spread,
    untransformed,
)
from models import CORE, compile_model, run_model
from programs import ZOO, Program

import rematfn
from rematfn.policies import Custom, Manual, Memory, Policy, Speed, Sqrt
from rematfn.policies._planned import Planned

X = torch.linspace(-1, 1, 100)


def by_density(c: rematfn.policies.Candidate) -> float:
    return c.cost / c.nbytes


POLICIES: list[Policy] = [
    Sqrt(),
    Memory(),
    Speed(),
    Manual(),
    Manual(drop=("nobody",)),
    Custom(by_density),
]


@pytest.mark.parametrize(
    ("program", "policy"),
    spread(ZOO, POLICIES, 3),
    ids=lambda value: value.name if isinstance(value, Program) else described(value),
)
def test_any_program_is_bitwise_eager_and_within_the_budget(
    program: Program, policy: Policy
) -> None:
    def run(transform: Transform) -> Any:
        case = program.make()
        g = transform(case.f)
        torch.manual_seed(7)
        # A first call is recorded; the later ones have a plan.
        outcome = [g(*case.args) for _ in range(3 if isinstance(policy, Planned) else 1)]
        return outcome, case.args, case.held, torch.rand(2)

    budgets = iter(smallest_budgets(run, 0.35, policy))
    transform, made = kept(lambda f: rematfn.remat(f, next(budgets), policy=policy))
    found = run(transform)
    assert_nothing_keyed(found)
    assert_bitwise_equal(found, run(untransformed))
    for g in made:
        assert rematfn.stats(g).peak_bytes <= rematfn.stats(g).budget


def test_scores_and_choices_are_those_worked_out_by_hand() -> None:
    sources = [Path(__file__).with_name("scores_model.cpp"), CORE / "policy" / "eviction.cpp"]
    run_model(compile_model("scores", sources))


def test_a_plan_takes_the_whole_of_the_policy_it_begins_with() -> None:
    def loss(x: torch.Tensor) -> torch.Tensor:
        return ((x * x).sin() * x).cos().sum()

    first = rematfn.testing.EvictEverything()
    g = rematfn.remat(torch.func.grad(loss), 1 << 20, policy=rematfn.policies.Guided(first=first))
    assert_bitwise_equal(g(X), torch.func.grad(loss)(X))
    assert rematfn.stats(g).evictions > 0, "the budget is ample, but everything is to go"


# --- as values ------------------------------------------------------------------------------------


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
        (lambda: rematfn.keep(3), "tensor"),
        (lambda: rematfn.keep(X, 3), "string"),
        (lambda: rematfn.keep(X, ""), "string"),
    ],
)
def test_what_means_nothing_is_refused(make: Callable[[], Any], says: str) -> None:
    with pytest.raises((TypeError, ValueError), match=says):
        make()
