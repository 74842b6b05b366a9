# SPDX-License-Identifier: Apache-2.0
"""`offload`, and `remat` with a tier: what moves comes back bit for bit."""

import functools
import gc
import os
import re
import resource
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import (
    UNIT,
    Transform,
    assert_bitwise_equal,
    assert_nothing_keyed,
    drawn,
    inner,
    kept,
    leaf,
    stepped,
    untransformed,
)
from programs import Program
from torch import Tensor, func

import rematfn
from rematfn._transform.recorded import finish_searches
from rematfn.testing import EvictEverything, MemoryTimeline

EVERYTHING = functools.partial(rematfn.offload, policy=EvictEverything())
EITHER = functools.partial(rematfn.remat, offload=True, policy=EvictEverything())
HOW: dict[str, Transform] = {
    "what is not in use": rematfn.offload,
    "everything": EVERYTHING,
    "move or drop": EITHER,
    "packed": functools.partial(rematfn.offload, to="packed", policy=EvictEverything()),
    "pack or drop": functools.partial(
        rematfn.remat, offload=rematfn.Packed(verify=True), policy=EvictEverything()
    ),
}


# --- exact ----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("costs_at_random")
def test_a_program_and_its_gradients_are_eager_s(program: Program) -> None:
    expected = stepped(program, untransformed)
    for how in HOW.values():
        found = stepped(program, how)
        assert_nothing_keyed(found)
        assert_bitwise_equal(found, expected)


def chain(x: Tensor) -> Tensor:
    return inner(inner(x * 1.0)).sum()


@pytest.mark.parametrize("units", [5, 6, 8])
def test_a_tight_budget_holds_without_a_replay(units: int) -> None:
    budget = units * UNIT + 64
    x, z = leaf(), leaf()
    g = rematfn.offload(chain, budget)
    for _ in range(4):  # online, then guided
        x.grad = None
        one = torch.ones(())
        with MemoryTimeline() as timeline:
            loss = g(x)
            loss.backward(one)
            del loss
        stats = rematfn.stats(g)
        assert stats.moves > 0
        assert stats.returns > 0
        assert stats.replays == 0
        assert timeline.peak_excluding_survivors <= budget
        rematfn.testing.check()
    chain(z).backward()
    assert_bitwise_equal(x.grad, z.grad)


@torch.library.custom_op("rematfn_tests::slow", mutates_args=())
def slow(x: Tensor) -> Tensor:
    time.sleep(0.05)
    return x.clone()


slow.register_fake(torch.empty_like)
slow.register_autograd(lambda ctx, grad: grad)


def deep(layers: list[Tensor], x: Tensor) -> Tensor:
    for weights in layers:
        x = torch.tanh(x @ weights)
    return x.square().mean()


def test_each_plan_of_a_hybrid_is_exact() -> None:
    layers = [torch.randn(256, 256) / 16 for _ in range(10)]
    x, batches = torch.randn(512, 256), torch.randn(2, 256, 256)
    nestings: list[tuple[Callable[[Transform], Any], Tensor]] = [
        (lambda t: func.grad(t(deep)), x),
        (lambda t: t(func.grad(deep)), x),
        (lambda t: func.vmap(func.grad(t(deep)), in_dims=(None, 0)), batches),
        (lambda t: t(func.vmap(func.grad(deep), in_dims=(None, 0))), batches),
    ]
    calls = 8  # one that is recorded, a few that are timed, and some by the plan that follows
    hybrid, made = kept(functools.partial(rematfn.remat, budget=0.35, offload=True))
    for nesting, inputs in nestings:
        expected = nesting(untransformed)(layers, inputs)
        step = nesting(hybrid)
        for call in range(calls):
            with MemoryTimeline() as timeline:
                found = step(layers, inputs)
            assert_bitwise_equal(found, expected)
            del found
            finish_searches()
            stats = rematfn.stats(made[-1])
            assert call == 0 or timeline.peak_excluding_survivors <= stats.budget


def deep_and_slow(layers: list[Tensor], x: Tensor) -> Tensor:
    for weights in layers:
        x = slow(x @ weights)
    return x.square().mean()


def moves_and_replays(
    f: Callable[[list[Tensor], Tensor], Tensor], disk: rematfn.Disk
) -> list[tuple[int, int]]:
    """Return how much each of a few calls moved and replayed."""
    layers = [(torch.randn(64, 64) / 8).requires_grad_() for _ in range(6)]
    x = torch.randn(512, 64)

    def step(layers: list[Tensor], x: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(f(layers, x), layers)

    g = rematfn.remat(step, 0.5, offload=disk)
    expected = step(layers, x)
    did = []
    for _ in range(5):
        assert_bitwise_equal(g(layers, x), expected)
        stats = rematfn.stats(g)
        did.append((stats.moves, stats.replays))
    return did


def test_what_takes_long_to_compute_moves() -> None:
    did = moves_and_replays(deep_and_slow, rematfn.Disk())
    assert any(moves > 0 == replays for moves, replays in did)


def test_what_takes_long_to_move_is_computed_again() -> None:
    did = moves_and_replays(deep, rematfn.Disk(bandwidth=3e6))
    assert any(replays > 0 for _, replays in did)


# --- what cannot be replayed ----------------------------------------------------------------------


def test_a_tier_makes_room_where_nothing_can_be_replayed() -> None:
    def values(x: Tensor) -> Tensor:
        made = [drawn(x + i) for i in range(8)]
        total = made[0]
        for value in made[1:]:
            total = total + value
        return total

    budget = 5 * UNIT
    x = leaf().detach()
    with pytest.raises(rematfn.BudgetError, match="not replayable"):
        rematfn.remat(values, budget)(x)
    g = rematfn.remat(values, budget, offload=True)
    for _ in range(3):
        assert_bitwise_equal(g(x), values(x))
        assert rematfn.stats(g).moves > 0


# --- the tier -------------------------------------------------------------------------------------


def test_a_full_tier_is_a_hard_cap() -> None:
    disk = rematfn.Disk(budget=4 * UNIT)
    x, z = leaf(), leaf()
    chain(z).backward()
    hybrid = rematfn.remat(chain, 6 * UNIT + 64, offload=disk)
    for _ in range(3):
        x.grad = None
        hybrid(x).backward()
        assert_bitwise_equal(x.grad, z.grad)
    with pytest.raises(rematfn.BudgetError, match="on the disk 16 KiB of 16 KiB"):
        rematfn.offload(chain, 5 * UNIT + 64, to=disk)(x).backward()
    assert disk.peak_bytes <= 4 * UNIT
    assert disk.held_bytes == 0


def test_a_disk_that_was_full_is_tried_again_by_the_next_call(tmp_path: Path) -> None:
    g = rematfn.offload(chain, 6 * UNIT + 64, to=rematfn.Disk(tmp_path))
    x = leaf()
    g(x).backward()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (UNIT, limits[1]))
        with pytest.raises(rematfn.BudgetError, match="could not write"):
            g(x).backward()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    g(x).backward()
    assert rematfn.stats(g).moved_bytes > 0


def test_what_finds_no_room_in_one_tier_goes_to_the_next() -> None:
    small, large = rematfn.Disk(budget=2 * UNIT), rematfn.Disk()
    g = rematfn.offload(chain, 5 * UNIT + 64, to=[small, large])
    assert f"to=[Disk(budget={2 * UNIT}), Disk()]" in repr(g)
    x, z = leaf(), leaf()
    chain(z).backward()
    for _ in range(3):
        x.grad = None
        g(x).backward()
        assert_bitwise_equal(x.grad, z.grad)
        assert rematfn.stats(g).replays == 0
    assert small.peak_bytes == 2 * UNIT
    assert large.peak_bytes > 0
    assert small.held_bytes == large.held_bytes == 0


@pytest.mark.parametrize("beside", [[], ["packed"]])
def test_a_call_is_planned_for_the_room_in_all_tiers(beside: list[str]) -> None:
    """So one that updates a buffer is not refused, where its first call went to the second tier."""
    seen = torch.zeros(())

    def counted(x: Tensor) -> Tensor:
        seen.add_(1)
        return chain(x)

    small, large = rematfn.Disk(budget=2 * UNIT), rematfn.Disk()
    g = rematfn.offload(counted, 5 * UNIT + 64, to=[*beside, small, large])
    x = leaf()
    for _ in range(3):
        g(x).backward()
    assert seen == 3
    assert rematfn.stats(g).call == "guided"
    assert rematfn.stats(g).replays == 0


@pytest.mark.parametrize(
    ("to", "error"),
    [
        *((to, TypeError) for to in (3, [3], [], b"/tmp")),
        *((to, ValueError) for to in ("/no/such/folder", "")),
    ],
)
def test_what_is_no_tier_is_refused(to: Any, error: type[Exception]) -> None:
    with pytest.raises(
        error, match=r"(?s)offload\(f, to=...\).*A tier is one of\n  None  .*host's"
    ):
        rematfn.offload(chain, to=to)
    with pytest.raises(error, match=r"(?s)offload=.*False, None  .*nowhere.*\n  True  .*host's"):
        rematfn.remat(chain, 0.5, offload=to)


@pytest.mark.parametrize(
    ("make", "call"),
    [
        (rematfn.Disk, "Disk(budget='8 gigs')"),
        (rematfn.Host, "Host(budget='8 gigs')"),
        (lambda budget: rematfn.Budget(budget), "Budget('8 gigs')"),
        (lambda budget: rematfn.offload(chain, budget), "offload(f, budget='8 gigs')"),
    ],
)
def test_a_budget_that_means_nothing_is_told_of_as_it_was_written(make: Any, call: str) -> None:
    with pytest.raises(ValueError, match=re.escape(call)) as caught:
        make(budget="8 gigs")
    assert ("fraction" in str(caught.value)) == call.startswith("offload")


@pytest.mark.parametrize("folder", ["/proc", "/sys", "/dev/fd"])
@pytest.mark.parametrize("budget", [None, "64MiB"])
def test_a_folder_that_holds_no_files_is_refused(folder: str, budget: str | None) -> None:
    g = rematfn.offload(chain, to=rematfn.Disk(folder, budget))
    with pytest.raises(rematfn.errors.OffloadError, match=f'"{folder}": .*Name another directory'):
        g(leaf())


def test_a_folder_may_have_any_name(tmp_path: Path) -> None:
    name = os.fsdecode(os.fsencode(tmp_path) + "/gr\u00f6\u00dfe-".encode() + b"\xff\xed\xa0\x80")
    os.mkdir(name)
    for to in (name, Path(name), rematfn.Disk(name)):
        g = rematfn.offload(chain, to=to, policy=EvictEverything())
        g(leaf()).backward()
        assert rematfn.stats(g).moves > 0
    os.rmdir(name)
    with pytest.raises(rematfn.errors.OffloadError) as caught:
        rematfn.offload(chain, to=rematfn.Disk(name, "1MiB"))(leaf())
    assert "/gr\u00f6\u00dfe-\\xff\\xed\\xa0\\x80" in str(caught.value)


@pytest.mark.parametrize("transform", [rematfn.offload, EITHER], ids=["offload", "either"])
def test_what_the_caller_drops_is_freed_at_once(transform: Transform) -> None:
    """The tiers that this machine lacks leave no cycle that holds arguments, in any call."""
    g, dropped = transform(chain, budget="1MiB"), []
    gc.disable()
    try:
        for _ in range(3):
            x = leaf()
            dropped.append(weakref.ref(x))
            torch.autograd.grad(g(x), x)
            del x
            finish_searches()
        assert [ref() for ref in dropped] == [None] * 3
    finally:
        gc.enable()
