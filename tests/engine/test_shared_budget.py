# SPDX-License-Identifier: Apache-2.0
"""A budget that several calls share: the sum over all that are alive is what holds."""

import copy
import pickle
import re
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from helpers import (
    address_of,
    assert_bitwise_equal,
    assert_nothing_keyed,
    inner,
    leaf,
    remains,
    untransformed,
)
from processes import forking, in_a_child, together
from torch import Tensor, func, nn

import rematfn
from rematfn import _C
from rematfn.testing import EvictEverything, MemoryTimeline

remat, Budget = rematfn.remat, rematfn.Budget
NOTHING = {"levels": 0, "operations": 0}
BYTES = 64 * 64 * 4  # of one activation


def block(x: Tensor, w: Tensor) -> Tensor:
    h = (x @ w).tanh()
    h = (h * x).sin().cos()
    return h.exp().tanh()


def weights(count: int) -> list[Tensor]:
    g = torch.Generator().manual_seed(0)
    return [torch.randn(64, 64, generator=g, requires_grad=True) for _ in range(count)]


def chained(blocks: list[Callable[..., Tensor]], ws: list[Tensor], x: Tensor) -> list[Tensor]:
    """Return the result of all blocks, one after the other, and the gradients of their weights."""
    y = x
    for f, w in zip(blocks, ws, strict=True):
        y = f(y, w)
    return [y.detach(), *torch.autograd.grad(y.sum(), ws)]


def in_eager(ws: list[Tensor], x: Tensor) -> list[Tensor]:
    return chained([block] * len(ws), ws, x)


# --- one after the other --------------------------------------------------------------------------


@pytest.mark.parametrize("units", [6, 10, 20, 60])
def test_eight_blocks_hold_together_what_one_function_might(units: int) -> None:
    """Each has some 7 residuals; arguments, results and gradients on their way are the caller's."""
    ws, x, count = weights(8), torch.ones(64, 64), 8
    expected = in_eager(ws, x)
    shared = Budget(units * BYTES)
    blocks = [remat(block, shared) for _ in ws]
    with MemoryTimeline() as timeline:
        results = chained(blocks, ws, x)
    assert_nothing_keyed(results)
    assert_bitwise_equal(results, expected)
    # The results of the blocks live as long as the graph, and two gradients are in flight.
    outside = (count + 2) * BYTES
    assert shared.peak_bytes <= shared.bytes
    assert timeline.peak_excluding_survivors <= shared.bytes + outside
    assert shared.resident_bytes == 0
    replays = sum(rematfn.stats(f).replays for f in blocks)
    assert (replays > 0) == (units < 60)
    assert remains() == NOTHING


def test_a_budget_error_gives_all_back_and_says_who_holds_what() -> None:
    x, shared = torch.ones(1024), Budget("16KiB")

    def large(x: Tensor) -> Tensor:
        return torch.cat([x, x, x, x]).sin().sum()

    with pytest.raises(rematfn.BudgetError, match="needs 32 KiB resident at once"):
        remat(large, shared)(x)
    assert shared.resident_bytes == 0
    assert remat(inner, shared)(leaf()) is not None
    held = []

    def holds(x: Tensor) -> Tensor:
        h = x.sin()
        held.append(h.untyped_storage())  # which keeps it from being evicted
        return h.cos()

    ys = [remat(holds, shared)(torch.ones(512).requires_grad_()) for _ in range(2)]
    with pytest.raises(rematfn.BudgetError) as caught:
        remat(lambda x: x.sin() + x.cos(), shared)(torch.ones(1200))
    message = str(caught.value)
    named = r"held by +remat\(holds, budget=Budget\('16 KiB'\)\): 4 KiB in 2 calls"
    assert re.search(named, message), message
    held.clear()
    del ys, caught
    assert shared.resident_bytes == 0


def test_what_is_allocated_beside_operators_is_given_back_when_it_is_freed() -> None:
    """An error ends the call: no operator comes any more that would take notice of it."""
    shared, held = Budget("16KiB"), []

    def f(x: Tensor) -> Tensor:
        for _ in range(3):
            x = x * 0.5
        held.append(shared.resident_bytes)
        return torch.cat([x] * 4).sin()

    g = remat(f, shared)  # whose statistics keep the level
    with pytest.raises(rematfn.BudgetError):
        g(torch.ones(1024).requires_grad_())
    assert held[0] > 0
    assert shared.resident_bytes == 0
    assert rematfn.stats(g).operators > 0


# --- nested ---------------------------------------------------------------------------------------


def test_a_replay_keeps_no_claim() -> None:
    """What was claimed for its scratch is free for a sibling's operator."""
    x, ones = torch.linspace(-1, 1, 512 * 512).view(512, 512), torch.ones(1, 512)

    def first(x: Tensor) -> Tensor:
        return torch.logsumexp(x, 1)

    def second(y: Tensor) -> Tensor:
        return (y[:, None] * ones).sum()

    alone = remat(lambda x: second(first(x)), "1GiB", policy=EvictEverything())
    expected = alone(x)
    shared = Budget(rematfn.stats(alone).min_budget)
    blocks = [remat(f, shared, policy=EvictEverything()) for f in (first, second)]
    found = remat(lambda x: blocks[1](blocks[0](x)), policy=EvictEverything())(x)
    assert_bitwise_equal(found, expected)
    assert rematfn.stats(blocks[0]).replays > 0


@pytest.mark.parametrize("outer", ["12KiB", 0.9, None, "same", "other"])
def test_blocks_inside_of_another_level(outer: Any) -> None:
    """Siblings in one domain, inside of a level with a budget of its own, another, or the same."""
    shared, other = Budget(7 * 1024), Budget("12KiB")
    x = torch.linspace(0, 1, 256)

    def model(transform: Any, x: Tensor) -> Tensor:
        for _ in range(4):
            x = transform(lambda t: (t.sin() * t).cos() * t)(x)
        return x.sum()

    def loss(x: Tensor) -> Tensor:
        return model(partial(remat, budget=shared), x)

    budget = {"same": shared, "other": other}.get(outer, outer)
    for _ in range(2):  # a fraction measures first
        ours = func.grad(remat(loss, budget))(x)
        assert_bitwise_equal(ours, func.grad(partial(model, untransformed))(x))
    assert shared.peak_bytes <= shared.bytes
    assert other.peak_bytes <= other.bytes
    assert shared.resident_bytes == other.resident_bytes == 0


# --- threads --------------------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [2, 4])
@pytest.mark.parametrize("units", [6, 14])
@pytest.mark.parametrize("policy", [rematfn.policies.Guided(), rematfn.testing.EvictEverything()])
def test_threads_take_from_each_other(
    threads: int, units: int, policy: rematfn.policies.Policy
) -> None:
    """Six units are what a replay of one block needs: two threads have to wait for each other."""
    xs = [torch.full((64, 64), 0.1 * (k + 1)) for k in range(threads)]
    shared = Budget(units * threads * BYTES)
    expected = [in_eager(weights(3), x) for x in xs]

    def work(k: int) -> list[list[Tensor]]:
        ws = weights(3)
        blocks = [remat(block, shared, policy=policy) for _ in ws]
        return [chained(blocks, ws, xs[k]) for _ in range(8)]

    with MemoryTimeline():
        found = together(*(partial(work, k) for k in range(threads)))
    for k in range(threads):
        for result in found[k]:
            assert_bitwise_equal(result, expected[k])
    assert shared.peak_bytes <= shared.bytes
    assert shared.resident_bytes == 0
    rematfn.testing.check()


def test_threads_that_do_not_fit_together_end_with_an_error_and_leave_nothing() -> None:
    """Whoever finds that nobody can give ends; the other goes on with what that leaves."""
    shared, x = Budget(8 * BYTES), torch.ones(64, 64)
    expected = in_eager(weights(2), x)
    outcomes: list[str] = []

    def work() -> None:
        ws = weights(2)
        blocks = [remat(block, shared) for _ in ws]
        for _ in range(20):
            try:
                assert_bitwise_equal(chained(blocks, ws, x), expected)
                outcomes.append("done")
            except rematfn.BudgetError:
                outcomes.append("refused")

    together(*[work] * 3)
    assert "done" in outcomes
    assert shared.peak_bytes <= shared.bytes
    assert shared.resident_bytes == 0


def test_dropout_on_threads_that_wait_for_room() -> None:
    """Who waits for its turn to draw lends what it holds, or who has the turn would wait for it."""
    shared = Budget(16 * BYTES)

    def f(x: Tensor) -> Tensor:
        for _ in range(3):
            x = nn.functional.dropout(x.sin() + 2, 0.5).cos() * x
        return x

    def work() -> None:
        for _ in range(10):
            x = torch.ones(64, 64, requires_grad=True)
            y = remat(f, shared)(x)
            y.sum().backward()
            assert torch.isfinite(x.grad).all()

    together(*[work] * 3)
    assert shared.peak_bytes <= shared.bytes
    assert shared.resident_bytes == 0


def test_a_level_that_waits_for_another_program_is_interrupted() -> None:
    """What a thread holds whose operator takes long is waited for, and then taken."""
    shared, x = Budget(4 * BYTES), torch.ones(64, 64)
    running, go_on = threading.Event(), threading.Event()

    @torch.library.custom_op("rematfn_tests::waits", mutates_args=())
    def waits(x: Tensor) -> Tensor:
        running.set()
        assert go_on.wait(60)
        return x.clone()

    def slow(x: Tensor) -> Tensor:
        h = x.sin()
        return waits(h).cos()

    def quick(x: Tensor) -> Tensor:
        assert running.wait(60)
        h = x.sin()
        threading.Timer(0.3, go_on.set).start()
        return ((h + 1) * h).cos()

    found = together(lambda: remat(slow, shared)(x), lambda: remat(quick, shared)(x))
    assert_bitwise_equal(found, [x.sin().cos(), ((x.sin() + 1) * x.sin()).cos()])
    assert shared.peak_bytes <= shared.bytes


def test_what_is_read_behind_the_dispatcher_is_not_taken_meanwhile() -> None:
    """An operator of another level comes between, and needs all the room there is."""
    shared, x = Budget(3 * BYTES), torch.ones(64, 64)

    def f(x: Tensor) -> tuple[int, Tensor]:
        h = x.sin()
        _C.testing.evict(h)
        address = address_of(rematfn.materialize(h))
        with pytest.raises(rematfn.BudgetError):
            together(lambda: remat(lambda t: t.cos() * t.sin(), shared)(x))
        assert address_of(h) == address
        z = h + 1  # from here on it may go
        together(lambda: remat(lambda t: t.cos(), shared)(x))
        return z

    assert_bitwise_equal(remat(f, shared)(x), x.sin() + 1)


# --- processes ------------------------------------------------------------------------------------


@forking
def test_a_forked_child_goes_on_with_its_share() -> None:
    shared, ws, x = Budget(10 * BYTES), weights(4), torch.ones(64, 64)
    expected = in_eager(ws, x)
    blocks = [remat(block, shared) for _ in ws]
    y = blocks[0](x, ws[0])  # alive across the fork

    def child() -> None:
        assert shared.resident_bytes > 0
        assert_bitwise_equal(chained(blocks, ws, x), expected)
        assert shared.peak_bytes <= shared.bytes

    assert in_a_child(child) == 0
    assert_bitwise_equal(chained(blocks, ws, x), expected)
    del y


def test_a_budget_is_what_it_is() -> None:
    shared = Budget("1.5GiB")
    assert (shared.bytes, shared.resident_bytes, shared.peak_bytes) == (3 << 29, 0, 0)
    assert repr(shared) == "Budget('1.5 GiB')"
    assert shared != Budget("1.5GiB")
    assert copy.deepcopy([shared])[0] is shared
    first, second = pickle.loads(pickle.dumps([shared, shared]))
    assert first is second is not shared
    assert first.bytes == shared.bytes
    g = remat(inner, shared)
    assert "remat(inner, budget=Budget('1.5 GiB'))" in repr(g)
    assert g.budget.shared is shared
