# SPDX-License-Identifier: Apache-2.0
"""An accelerator's allocator asks levels for room: for scratch, and for operators outside."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from fake_device import DEVICE, ONE, big, chain, room_for
from helpers import EVERYTHING, assert_bitwise_equal, spread
from torch import Tensor, func

import rematfn
from rematfn.testing import EvictEverything, MemoryTimeline

only_fake = pytest.mark.skipif(
    DEVICE != "fake", reason="only the fake device has this operator or limit"
)


POLICIES: dict[str, dict[str, Any]] = {"tight": {}, "everything": {"policy": EvictEverything()}}


@pytest.fixture(autouse=True)
def on_the_device() -> Iterator[None]:
    with torch.device(DEVICE):
        # From now on cuBLAS's workspaces are there, of autograd's thread, too.
        func.grad(rematfn.remat(lambda x: x.sin().sum(), "1MiB"))(torch.ones(1))
        peak_of(lambda: None)  # and that thread has freed what it has run
        yield


def peak_of(call: Callable[[], Any]) -> tuple[Any, int]:
    """Return what `call` returns, and its peak as the device's own allocator counts."""
    with MemoryTimeline(DEVICE) as timeline:
        found = call()
    return found, timeline.device_peak


def assert_within(f: Callable[[Tensor], Any], x: Tensor, less: int, **options: Any) -> Any:
    """Three calls in a budget that is `less` below eager's peak give its bits, and keep it."""
    expected, most = peak_of(lambda: f(x))
    budget = most - less
    g = rematfn.remat(f, budget, **options)
    for _ in range(3):
        found, peak = peak_of(lambda: g(x))
        assert_bitwise_equal(found, expected)
        assert peak <= budget
    return rematfn.stats(g)


# --- scratch --------------------------------------------------------------------------------------


def with_scratch(x: Tensor, times: int = 3) -> Tensor:
    """Three values are held while an operator takes `times` as much for the while."""
    kept = [(x * k).sin() for k in range(3)]
    y = torch.ops.fake_device.doubled(x.detach(), times * ONE)
    return sum(k.square().sum() for k in kept) + y.sum()


FUNCTIONS: dict[str, Callable[[Tensor], Any]] = {
    "plain": with_scratch,
    "grad": func.grad(with_scratch),
    "jvp": lambda x: func.jvp(with_scratch, (x,), (x.cos(),)),
}


@only_fake
@pytest.mark.parametrize(("policy", "name"), spread(POLICIES, FUNCTIONS, 2))
def test_room_for_scratch_is_made_at_the_first_call(policy: str, name: str) -> None:
    """Nothing tells of it in advance: the allocator asks as it is asked."""
    assert assert_within(FUNCTIONS[name], big(), 2 * ONE, **POLICIES[policy]).evictions > 0


@only_fake
def test_scratch_that_fits_nowhere_is_a_budget_error_before_it_is_taken() -> None:
    x = big()
    before = torch.accelerator.memory_allocated()
    g = rematfn.remat(with_scratch, 5 * ONE)
    torch.accelerator.reset_peak_memory_stats()
    with pytest.raises(rematfn.BudgetError, match=r"fake_device::doubled"):
        g(x, 8)
    assert torch.accelerator.max_memory_allocated() - before <= 5 * ONE
    torch.accelerator.synchronize()
    assert torch.accelerator.memory_allocated() == before
    assert_bitwise_equal(g(x, 2), with_scratch(x, 2))


@only_fake
def test_scratch_counts_while_it_is_held_alone() -> None:
    """What a kernel takes and gives back five times over is needed once."""
    x = big()

    def f(x: Tensor) -> Tensor:
        for _ in range(5):
            x = torch.ops.fake_device.doubled(x, ONE)
        return x

    g = rematfn.remat(f, 4 * ONE)
    found, peak = peak_of(lambda: g(x))
    assert_bitwise_equal(found, f(x))
    assert peak <= 4 * ONE
    assert rematfn.stats(g).min_budget <= 3 * ONE


@pytest.mark.parametrize("options", POLICIES.values(), ids=POLICIES)
def test_what_the_allocator_rounds_up_is_made_room_for(options: dict[str, Any]) -> None:
    """Each of these values takes a tenth more than it has."""
    x = torch.linspace(0, 1, 15 * ONE // 32)  # bytes: 15/8

    expected, most = peak_of(lambda: chain(x))
    budget = most * 3 // 4
    g = rematfn.remat(chain, budget, **options)
    for _ in range(4):
        found, peak = peak_of(lambda: g(x))
        assert_bitwise_equal(found, expected)
        assert rematfn.stats(g).peak_bytes <= peak <= budget


def with_storage(x: Tensor, units: int = 3) -> Tensor:
    """Hold bytes that no operator has made beside four values."""
    kept = [(x * k).sin() for k in range(4)]
    held = torch.UntypedStorage(units * ONE, device=DEVICE)
    total = sum(k.square().sum() for k in kept)
    assert held.nbytes() == units * ONE
    return total


@pytest.mark.parametrize("name", ["plain", "grad"])
def test_bytes_beside_operators_count_while_they_live(name: str) -> None:
    f = func.grad(with_storage) if name == "grad" else with_storage
    budget = assert_within(f, big(), 2 * ONE).budget
    with pytest.raises(rematfn.BudgetError, match="a tensor made beside operators"):
        rematfn.remat(with_storage, budget)(big(), 32)


# --- autograd's thread ----------------------------------------------------------------------------


class MakesMuch(torch.autograd.Function):
    """Its backward makes eight values of nothing."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None: ...

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        made = [torch.full((ONE // 4,), float(k), device=DEVICE).cos() for k in range(8)]
        return gradient * 2 + sum(y[0] for y in made)


@pytest.mark.parametrize("options", POLICIES.values(), ids=POLICIES)
@pytest.mark.parametrize("way", ["autograd", "func"])
def test_a_backward_inside_of_f_counts(way: str, options: dict[str, Any]) -> None:
    """Its nodes run on a thread that has no stack of levels, and read no level tensor."""

    def loss(x: Tensor) -> Tensor:
        return MakesMuch.apply(x).square().sum()

    def f(x: Tensor) -> Tensor:
        if way == "func":
            return func.grad(loss)(x)
        return torch.autograd.grad(loss(x), x)[0]

    assert_within(f, big().requires_grad_(way == "autograd"), 3 * ONE, **options)


def test_a_call_leaves_nothing_in_its_thread_s_state() -> None:
    x = big().requires_grad_()

    def f(x: Tensor) -> Tensor:
        rematfn.remat(lambda y: y.sin(), "8MiB")(x)
        return torch.autograd.grad(x.square().sum(), x)[0]

    for budget in ("8MiB", "1KiB", "8MiB"):
        with contextlib.suppress(rematfn.BudgetError):
            rematfn.remat(f, budget)(x)
    before = torch.accelerator.memory_allocated()
    y = x.square().sum()
    (gradient,) = torch.autograd.grad(y, x)
    gradient *= 2
    assert_bitwise_equal(gradient, 4 * x.detach())
    assert torch.accelerator.memory_allocated() - before <= 2 * ONE


# --- out of memory --------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [None, 64 * ONE], ids=["no budget", "a large one"])
def test_an_operator_outside_of_levels_has_them_evict(budget: int | None) -> None:
    """A graph that waits for its backward holds what only it needs."""
    x = big().requires_grad_()
    expected = torch.autograd.grad(chain(x).sum(), x)
    g = rematfn.remat(chain, budget)
    y = g(x).sum()
    assert rematfn.stats(g).evictions == 0
    with room_for(4):
        other = torch.ones(8 * ONE // 4)  # eight values' room
        assert rematfn.stats(g).evictions > 0
        del other
        found = torch.autograd.grad(y, x)
    assert_bitwise_equal(found, expected)
    assert rematfn.stats(g).replays > 0


def test_idle_levels_give_to_an_operator_inside_of_another() -> None:
    x = big().requires_grad_()
    expected = torch.autograd.grad(chain(x).sum(), x)
    g = rematfn.remat(chain)
    y = g(x).sum()
    with room_for(4):
        other = rematfn.remat(lambda: torch.ones(2 * ONE).sum())()  # eight values' room
    assert rematfn.stats(g).evictions > 0
    assert other.item() == 2 * ONE
    assert_bitwise_equal(torch.autograd.grad(y, x), expected)


@only_fake
def test_calls_may_end_while_other_threads_find_no_memory() -> None:
    x = big()
    expected = chain(x)
    over = threading.Event()
    failures: list[int] = []

    def ask() -> None:
        while not over.is_set():
            try:
                torch.ones(200 * ONE // 4, device=DEVICE)
            except torch.OutOfMemoryError:
                failures.append(1)

    with room_for(40):
        threads = [threading.Thread(target=ask) for _ in range(2)]
        for thread in threads:
            thread.start()
        try:
            for _ in range(60):
                assert_bitwise_equal(rematfn.remat(chain)(x), expected)
        finally:
            over.set()
            for thread in threads:
                thread.join()
    assert failures


def test_what_does_not_fit_without_any_level_is_torch_s_error() -> None:
    x = big().requires_grad_()
    expected = torch.autograd.grad(chain(x).sum(), x)
    y = rematfn.remat(chain)(x).sum()
    with room_for(4), pytest.raises(torch.OutOfMemoryError):
        torch.ones(200 * ONE // 4)
    assert_bitwise_equal(torch.autograd.grad(y, x), expected)


@only_fake
def test_what_took_another_way_for_want_of_memory_is_not_replayed() -> None:
    """With the memory that there is later it would be another value."""
    x = big()

    def f(x: Tensor) -> Tensor:
        with room_for(4):
            y = torch.ops.fake_device.falls_back(x, 16 * ONE)
        return y.sin() + y

    for transform in (rematfn.remat, EVERYTHING):
        assert_bitwise_equal(transform(f)(x), (x * 3).sin() + x * 3)


@only_fake
def test_a_replay_that_finds_no_memory_where_the_first_run_did_is_an_error() -> None:
    x = big()

    def f(x: Tensor) -> Tensor:
        y = torch.ops.fake_device.falls_back(x, 16 * ONE)
        with room_for(4):
            return y.sin() + y

    with pytest.raises(rematfn.ReplayError, match="found no memory for what it takes"):
        EVERYTHING(f)(x)


@only_fake
def test_a_level_that_another_thread_works_in_is_left_alone() -> None:
    """The domain's lock is tried: whoever holds it may read what would go."""
    x = big()
    expected = chain(x)
    inside, go_on = threading.Event(), threading.Event()
    found: list[Tensor] = []

    class Waits(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, y: Tensor) -> Tensor:
            inside.set()
            assert go_on.wait(60)
            return y * 1

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient

    def f(x: Tensor) -> Tensor:
        return chain(Waits.apply(x))

    def work() -> None:
        with torch.device(DEVICE):
            found.append(rematfn.remat(f)(x))

    thread = threading.Thread(target=work)
    thread.start()
    assert inside.wait(60)
    with room_for(2), pytest.raises(torch.OutOfMemoryError):
        torch.ones(200 * ONE // 4)
    go_on.set()
    thread.join()
    assert_bitwise_equal(found[0], expected)
