# SPDX-License-Identifier: Apache-2.0
"""The benchmark of the rules near the floor: it simulates what remat does, and sees each rule."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

import rematfn
from rematfn.policies import ON

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from floor import RULES, budgets, compared, total_cost


@pytest.fixture(scope="module")
def trace() -> rematfn.Trace:
    torch.manual_seed(0)
    ws = [torch.randn(16, 16) / 4 for _ in range(24)]

    def f(ws: list[Tensor], x: Tensor) -> Tensor:
        for w in ws:
            x = torch.tanh(x @ w)
        return x.mean(0)[:4]

    return rematfn.record(torch.func.jacrev(f), ws, torch.randn(64, 16))


def test_a_cell_costs_what_a_simulation_says(trace: rematfn.Trace) -> None:
    for budget in budgets(trace):
        stats = rematfn.simulate(trace, budget, ON())
        assert total_cost(trace, budget) == pytest.approx(1 + stats.replayed_cost)


def test_the_first_cell_is_the_least_that_fits(trace: rematfn.Trace) -> None:
    least = budgets(trace)[0]
    assert total_cost(trace, least) is not None
    assert total_cost(trace, int(least / 1.01) - 1) is None


# The others do nothing on so small a trace.
@pytest.mark.parametrize("rule", ["mirrored", "priced", "pinned"])
def test_a_rule_can_be_switched_off(trace: rematfn.Trace, rule: str) -> None:
    assert rule in RULES
    cells = budgets(trace)
    ours = [total_cost(trace, budget) for budget in cells]
    assert ours != [total_cost(trace, budget, rule) for budget in cells]


def test_rows_compare_cells_that_fit_both_ways() -> None:
    row = compared(["a", "b", "c"], [2.0, 1.0, 3.0], [1.0, None, 6.0])
    assert row["cells that fit"] == "2 of 3"
    assert row["cost"] == pytest.approx(1)
    assert row["the most"] == "2.00 (c)"
