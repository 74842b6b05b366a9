# SPDX-License-Identifier: Apache-2.0
"""A plan is followed where it replays less than the policy of the first call, and nowhere else."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import assert_bitwise_equal
from programs_traced import forces, waves
from torch import Tensor, nn

import rematfn
from rematfn import _C
from rematfn._transform.recorded import RecordedProgram, finish_searches
from rematfn.policies import ON, Guided


def unrolled() -> Callable[[Tensor], Any]:
    torch.manual_seed(0)
    cell = nn.LSTMCell(32, 32)

    def step(xs: Tensor) -> Any:
        h = c = xs.new_zeros(16, 32)
        for x in xs:
            h, c = cell(x, (h, c))
        return torch.autograd.grad(h.square().sum(), list(cell.parameters()))

    return step


STEPS: dict[str, Callable[[], Callable[[], Any]]] = {
    "recurrent": lambda: functools.partial(unrolled(), torch.randn(10, 16, 32)),
    "forces": lambda: functools.partial(forces(), torch.randn(256, 16)),
    "chained": lambda: functools.partial(torch.func.grad(waves), torch.linspace(-1, 1, 4096)),
}


@pytest.mark.parametrize("name", STEPS)
def test_no_later_call_replays_more_than_the_first(name: str) -> None:
    step = STEPS[name]()
    expected = step()
    peak = rematfn.record(step).peak_bytes
    for fraction in (0.6, 0.4, 0.3):
        budget = int(fraction * peak)
        g = rematfn.remat(step, budget, policy=Guided(search=20_000))
        counted = []
        for _ in range(4):
            try:
                assert_bitwise_equal(g(), expected)
            except rematfn.BudgetError:
                break
            stats = rematfn.stats(g)
            assert stats.peak_bytes <= budget
            counted.append(stats.replayed_cost)
        assert all(cost <= counted[0] for cost in counted), (fraction, counted)


def test_a_call_that_fits_replays_nothing_whatever_was_recorded() -> None:
    """A loop that runs less often than in the record, whose schedule evicts ahead of need."""
    step, xs = unrolled(), torch.randn(40, 16, 32)
    budget = int(0.3 * rematfn.record(step, xs).peak_bytes)
    few = xs[:8].clone()
    assert rematfn.record(step, few).peak_bytes <= budget
    g = rematfn.remat(step, budget, policy=Guided(search=50_000))
    g(xs), g(xs)
    finish_searches()
    g(xs)
    program = g.last_call.program.program
    assert _C.testing.replays_scheduled(program) > 0
    assert_bitwise_equal(g(few), step(few))
    stats = rematfn.stats(g)
    assert stats.call == "guided"
    assert stats.evictions == stats.replays == 0


@pytest.mark.parametrize("fraction", [0.5, 0.4])
def test_calls_of_other_sizes_cost_no_more_than_without_a_plan(fraction: float) -> None:
    step = unrolled()
    recorded, *others = [rematfn.record(step, torch.randn(n, 16, 32)) for n in (40, 60, 25)]

    def replayed(trace: rematfn.Trace, program: _C.Program | None) -> float:
        budget = int(fraction * trace.peak_bytes)
        found: Any = _C.simulate(trace._core, budget, ON().core(), program, "", 0)
        return float(found["replayed_cost"])

    program = _C.Program(recorded._core)
    Guided(search=30_000).begin(program, int(fraction * recorded.peak_bytes))
    program.finish()
    assert replayed(recorded, program) < replayed(recorded, None)  # it has a plan
    for trace in others:
        assert 1 + replayed(trace, program) <= 1.02 * (1 + replayed(trace, None))


@pytest.mark.parametrize("fraction", [0.5, 0.35])
def test_a_call_of_another_size_follows_a_plan_for_its_share_of_the_budget(fraction: float) -> None:
    """Where a plan for the record's share replays up to 1.4 times what none does."""
    step = forces()
    first, *others = [rematfn.record(step, torch.randn(n, 16)) for n in (512, 640, 768, 1024)]
    budget = int(fraction * others[-1].peak_bytes)
    recorded = RecordedProgram(first._core, budget, first.peak_bytes, makes_state=False)
    totals = []
    for trace in others:
        program = recorded.for_another(Guided(), budget, trace.peak_bytes)
        assert program is not None
        program.finish()
        online: Any = _C.simulate(trace._core, budget, ON().core(), None, "", 0)
        guided: Any = _C.simulate(trace._core, budget, ON().core(), program, "", 0)
        totals.append((1 + online["replayed_cost"], 1 + guided["replayed_cost"]))
    assert all(guided <= 1.1 * online for online, guided in totals), totals
    assert sum(guided for _, guided in totals) < 0.95 * sum(online for online, _ in totals)
