# SPDX-License-Identifier: Apache-2.0
"""Schedules: runs of plans without the replays that hindsight spares, carried out call for call."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import assert_bitwise_equal, assert_exact_within
from processes import in_a_process
from programs_traced import forces, waves
from torch import Tensor, nn

import rematfn
from rematfn import _C
from rematfn._transform.recorded import finish_searches
from rematfn._transform.tiers import tiers_of
from rematfn.policies import ON, Guided

SEARCH = 50_000  # operators
UNIT = 64 * 64 * 4


def chained() -> Callable[[], Any]:
    x = torch.linspace(-1, 1, 4096).view(64, 64)
    return functools.partial(torch.func.grad(waves), x, steps=40)


def penalised() -> Callable[[], Any]:
    return functools.partial(forces(), torch.randn(256, 16))


def overwriting() -> Callable[[], Any]:
    """Values that are overwritten in place, before and after their replays."""
    x = torch.linspace(-1, 1, 4096)

    def chain(x: Tensor) -> Tensor:
        for i in range(12):
            y = x.sin()
            y.mul_(x).add_(i)
            x = torch.empty_like(y).copy_(y).tanh_() * x
        return x.square().sum()

    return functools.partial(torch.func.grad(chain), x)


def penalty() -> Callable[[], Any]:
    """A gradient penalty, as of a GAN's discriminator: a batch gets a gradient that nobody reads.

    What accumulates it detaches it first, which makes it resident.
    """
    torch.manual_seed(0)
    net = nn.Sequential(*[m for _ in range(6) for m in (nn.Linear(64, 64), nn.Tanh())])
    batch = torch.randn(256, 64)

    def step() -> Any:
        net.zero_grad()
        real = batch.clone().requires_grad_()
        score = net(real).sum()
        (gradient,) = torch.autograd.grad(score, real, create_graph=True)
        (gradient.square().mean() - score).backward()
        return [p.grad for p in net.parameters()]

    return step


def molecule() -> Callable[[], Any]:
    """Messages between neighbours, and a loss of forces."""
    torch.manual_seed(0)
    filters, mix = nn.Linear(8, 16), nn.Linear(16, 16)
    places = torch.rand(24, 3) * 4
    near = (torch.cdist(places, places) < 3) & ~torch.eye(24, dtype=torch.bool)
    first, second = near.nonzero().t()

    def step() -> Any:
        at = places.clone().requires_grad_()
        away = (at[first] - at[second]).norm(dim=1, keepdim=True)
        weight = filters(torch.exp(-(away - torch.linspace(0, 5, 8)).square()))
        h = torch.ones(24, 16)
        for _ in range(3):
            messages = torch.zeros_like(h).index_add(0, first, weight * mix(h)[second])
            h = h + nn.functional.silu(messages) * 0.1
        (force,) = torch.autograd.grad(h.sum(), at, create_graph=True)
        loss = force.square().sum()
        return torch.autograd.grad(loss, [*filters.parameters(), *mix.parameters()])

    return step


PROGRAMS = {
    "chain": (chained, 0.04),
    "forces": (penalised, 0.3),
    "overwriting": (overwriting, 0.09),
    "penalty": (penalty, 0.4),
    "molecule": (molecule, 0.3),
}


def searched(
    trace: rematfn.Trace, budget: int, link: _C.Link | None = None, search: int = SEARCH
) -> _C.Program:
    program = _C.Program(trace._core)
    program.search(budget, search, 10 * search, link=link, online=ON().core())
    program.finish()
    return program


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_call_that_carries_out_a_schedule_is_exact_and_costs_what_was_simulated(
    name: str,
) -> None:
    make, fraction = PROGRAMS[name]
    step = make()
    expected = step()
    budget = int(fraction * rematfn.record(step).peak_bytes)
    program = searched(rematfn.record(step), budget)
    assert _C.testing.replays_scheduled(program) > 0
    g = rematfn.remat(step, budget, policy=Guided(search=SEARCH))
    assert_bitwise_equal(g(), expected)
    assert_bitwise_equal(g(), expected)
    finish_searches()
    assert_exact_within(budget, g, step)
    stats = rematfn.stats(g)
    assert stats.replays > 0
    assert stats.peak_bytes <= budget
    assert stats.replayed_cost == pytest.approx(program.overhead() / program.cost, rel=1e-6)


def test_a_schedule_that_lacks_a_little_room_is_made_anew_in_less() -> None:
    """What the program has dropped stays for what was made from it, which no schedule expects."""
    trace = rematfn.record(molecule())
    program = _C.Program(trace._core)
    program.search(int(0.3 * trace.peak_bytes), 20_000, 200_000, online=ON().core())
    program.follow()
    assert _C.testing.replays_scheduled(program) > 0
    assert program.overhead() < 3 * program.cost
    program.finish()
    assert program.overhead() < program.cost


def test_a_schedule_is_squeezed_where_exchanges_find_no_more() -> None:
    """They end at 1.12 of the program."""
    trace = rematfn.record(penalised())
    program = searched(trace, int(0.35 * trace.peak_bytes), search=400_000)
    assert program.overhead() < program.cost


def test_what_is_stored_away_leaves_as_far_as_there_is_room() -> None:
    """In the simulation as in the call, so that a plan is found though not all of it fits."""
    stored: list[Tensor] = []

    def step(x: Tensor) -> Tensor:
        stored.clear()
        for _ in range(8):
            x = (x * 1.01).sin().exp()
            stored.append(x * 2)
        return x.sum()

    x = torch.linspace(-1, 1, UNIT)
    expected = step(x), list(stored)
    g = rematfn.remat(step, 0.5)
    for _ in range(4):
        found = g(x)
        stats = rematfn.stats(g)
        assert_bitwise_equal((found, stored), expected)
        finish_searches()
    assert stats.call == "guided"
    assert stats.why == "as the last call with the same numbers"
    assert stats.budget is not None
    assert stats.peak_bytes <= stats.budget < 8 * x.nbytes
    whole = rematfn.record(step, x)
    assert stats.replayed_cost == pytest.approx(
        rematfn.simulate(whole, stats.budget).replayed_cost, rel=1e-6
    )


@in_a_process
def test_the_first_guided_call_has_a_schedule_where_much_is_replayed() -> None:
    """It does not wait for the thread, which is not there."""
    _C.end_searches()
    trace = rematfn.record(penalised())
    tiers = tiers_of(rematfn.Disk(bandwidth=1e6), "a test")
    tiers.open()
    slow = tiers.link(drops=True)
    for fraction, link, has_one in ((0.3, None, True), (0.3, slow, True), (0.9, None, False)):
        program = _C.Program(trace._core)
        budget = int(fraction * trace.peak_bytes)
        program.search(budget, SEARCH, SEARCH, link=link, online=ON().core())
        program.follow()
        assert (_C.testing.replays_scheduled(program) > 0) == has_one
    differs = _C.Program(trace._core)  # no call that differs has run the same operators so far
    differs.search(int(0.3 * trace.peak_bytes), SEARCH, SEARCH, online=ON().core())
    differs.follow(alike=False)
    assert _C.testing.replays_scheduled(differs) == 0


@pytest.mark.parametrize("bandwidth", [1e7, 1e9])
@pytest.mark.parametrize("search", [0, SEARCH])
def test_a_link_beside_replays_makes_no_plan_worse(search: int, bandwidth: float) -> None:
    trace = rematfn.record(penalised())
    budget = int(0.3 * trace.peak_bytes)
    dropping = searched(trace, budget, search=search)
    tiers = tiers_of(rematfn.Disk(bandwidth=bandwidth), "a test")
    tiers.open()
    either = searched(trace, budget, tiers.link(drops=True), search)
    assert either.overhead() <= dropping.overhead()


def test_calls_of_other_sizes_carry_the_schedule_out() -> None:
    """Sizes that have not been seen, too, once two have run the same operators."""
    step = forces()
    inputs = [torch.randn(rows, 16) for rows in (256, 288, 240, 320, 318)]
    budget = int(0.32 * max(rematfn.record(step, x).peak_bytes for x in inputs))
    g = rematfn.remat(step, budget, policy=Guided(search=SEARCH))
    for x in inputs:
        assert_exact_within(budget, g, step, x)
        finish_searches()
    stats = rematfn.stats(g)
    assert stats.why.startswith("by the record of another call")
    trace = rematfn.record(step, x)
    own, online = searched(trace, budget), rematfn.simulate(trace, budget, ON())
    assert 1 + stats.replayed_cost <= 1.15 * (1 + own.overhead() / own.cost)
    assert stats.replayed_cost < 0.8 * online.replayed_cost


def gradient_of_each_row(x: Tensor) -> Tensor:
    return torch.func.vmap(torch.func.grad(lambda row: waves(row, steps=16)))(x)


@pytest.mark.parametrize("offload", [None, rematfn.Disk()], ids=["remat", "hybrid"])
@pytest.mark.parametrize(
    "step", [gradient_of_each_row, torch.func.grad(waves)], ids=["vmap of grad", "grad"]
)
def test_a_schedule_for_other_sizes_is_exact_under_transforms(step: Any, offload: Any) -> None:
    inputs = [torch.randn(rows, 256) for rows in (48, 56, 40, 64, 52, 60)]
    budget = int(0.3 * max(rematfn.record(step, x).peak_bytes for x in inputs))
    g = rematfn.remat(step, budget, policy=Guided(search=SEARCH), offload=offload)
    replays = 0
    for x in (*inputs, *inputs):
        assert_exact_within(budget, g, step, x)
        replays += rematfn.stats(g).replays
        finish_searches()
    assert replays > 0 or offload is not None


def test_a_schedule_that_does_not_fit_other_sizes_is_left() -> None:
    """Two tensors that grow apart: what was simulated of one proportion is wrong for the other."""

    def chain(x: Tensor, y: Tensor) -> Tensor:
        for _ in range(16):
            x, y = (x.sin() * x).exp().tanh(), (y.sin() * y).exp().tanh()
        return x.square().sum() * y.square().sum()

    step = torch.func.grad(chain, argnums=(0, 1))

    def sized(a: int, b: int) -> tuple[Tensor, Tensor]:
        return torch.linspace(-1, 1, a), torch.linspace(-1, 1, b)

    calls = [sized(4096, 4096), sized(4096, 4000), sized(4096, 1024), sized(1024, 4096)]
    budget = int(0.2 * max(rematfn.record(step, *call).peak_bytes for call in calls))
    g = rematfn.remat(step, budget, policy=Guided(search=SEARCH))
    for call in (*calls, *calls):
        assert_exact_within(budget, g, step, *call)
        online = rematfn.simulate(rematfn.record(step, *call), budget, ON()).replayed_cost
        assert rematfn.stats(g).replayed_cost <= 1.02 * (1 + online) - 1
        finish_searches()


def test_a_search_that_begins_with_a_schedule_is_shorter() -> None:
    step = forces()
    trace, other = [rematfn.record(step, torch.randn(rows, 16)) for rows in (256, 272)]
    known = searched(trace, int(0.4 * trace.peak_bytes))
    alone, after = _C.Program(other._core), _C.Program(other._core)
    assert after.note_same(known)
    budget = int(0.41 * other.peak_bytes)
    alone.search(budget, SEARCH, 10 * SEARCH)
    after.search(budget, SEARCH, 10 * SEARCH, like=known)
    alone.finish()
    after.finish()
    assert other.cost + after.overhead() <= 1.01 * (other.cost + alone.overhead())
    assert _C.testing.simulated(after) < _C.testing.simulated(alone) / 4


def test_a_level_that_begins_inside_ends_the_schedule() -> None:
    x = torch.linspace(-1, 1, 4096)
    nested = [False]

    def block(x: Tensor) -> Tensor:
        return (x.sin() * x).exp().tanh()

    def chain(x: Tensor) -> Tensor:
        for i in range(40):
            is_inside = nested[0] and i == 20
            x = (rematfn.remat(block, 6 * UNIT) if is_inside else block)(x)
        return x.square().sum()

    step = torch.func.grad(chain)
    g = rematfn.remat(step, 7 * UNIT + 1500, policy=Guided(search=SEARCH))
    expected = step(x)
    g(x), g(x)
    finish_searches()
    nested[0] = True
    assert_bitwise_equal(g(x), expected)
    assert rematfn.stats(g).peak_bytes <= 7 * UNIT + 1500
