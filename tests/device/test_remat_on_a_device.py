# SPDX-License-Identifier: Apache-2.0
"""`remat(f)` and `offload(f)` are `f`, bit for bit, where kernels and copies are late."""

import contextlib
import functools
import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from fake_device import DEVICE, ONE, assert_comes_empty, big, chain, delays, room_for
from helpers import (
    EVERYTHING,
    TIGHT,
    Transform,
    assert_bitwise_equal,
    assert_nothing_keyed,
    assert_same_as_eager,
    some,
    spread,
    stepped,
    untransformed,
)
from programs import ZOO, Program
from torch import Tensor, func

import rematfn
from rematfn.testing import EvictEverything

# torch has fused cells for devices, and the CPU no kernel for them; a generator of the CPU draws
# nothing on a device.
ELSEWHERE = {"lstm", "lstm-cells", "random"}
PROGRAMS = [p for p in ZOO if p.name not in ELSEWHERE]
NAMES = [p.name for p in PROGRAMS]

HOST = rematfn.Host("256MiB")
ALL_MOVES = functools.partial(rematfn.offload, to=HOST, policy=EvictEverything())
MOVES_OR_GOES = functools.partial(rematfn.remat, offload=HOST, policy=EvictEverything())
WAYS = {"everything": EVERYTHING, "moves": ALL_MOVES, "moves or goes": MOVES_OR_GOES}


@pytest.fixture(autouse=True)
def late_kernels(costs_at_random: None) -> Iterator[None]:
    """Everything is made on the device, and each kernel may be late."""
    with torch.device(DEVICE), delays(seed=1, most=100):
        yield
    torch.accelerator.synchronize()
    assert_comes_empty(HOST)


def stepped_there(program: Program, transform: Transform) -> Any:
    return stepped(program, transform), torch.get_device_module(DEVICE).get_rng_state()


@pytest.mark.parametrize(("name", "way"), spread(NAMES, WAYS, 3))
def test_a_program_and_its_gradients_are_those_of_eager(name: str, way: str) -> None:
    program = PROGRAMS[NAMES.index(name)]
    found = stepped_there(program, WAYS[way])
    assert_nothing_keyed(found)
    assert_bitwise_equal(found, stepped_there(program, untransformed))


@pytest.mark.parametrize("program", some(PROGRAMS, 4), ids=lambda program: program.name)
def test_a_program_is_that_of_eager_in_its_least_budget(program: Program) -> None:
    assert_same_as_eager(functools.partial(stepped_there, program), TIGHT)


# --- memory --------------------------------------------------------------------------------------


def test_a_level_without_a_budget_holds_what_the_device_can_hold() -> None:
    x = big()
    expected = chain(x)
    with room_for(4):
        with pytest.raises(torch.OutOfMemoryError):
            chain(x)
        g = rematfn.remat(chain)
        found = g(x)
    assert_bitwise_equal(found, expected)
    assert rematfn.stats(g).evictions > 0
    assert rematfn.stats(g).replays > 0


def test_an_operator_that_writes_is_not_run_twice_for_want_of_memory() -> None:
    x = big()
    counter = torch.zeros(1)

    def f(x: Tensor) -> Tensor:
        kept = [x + k for k in range(3)]
        torch.ops.fake_device.count(counter, x)
        return sum(y.sum() for y in kept)

    with room_for(3):
        with contextlib.suppress(torch.OutOfMemoryError):
            rematfn.remat(f)(x)
        assert counter.tolist() in ([0.0], [1.0])


@pytest.mark.skipif(DEVICE != "fake", reason="only the fake device has an operator that fails so")
def test_an_operator_that_draws_draws_once_though_it_is_tried_again() -> None:
    x = big()

    def f(x: Tensor) -> Tensor:
        kept = [x + k for k in range(3)]
        y = torch.ops.fake_device.scale_at_random(x)
        return sum(k.sum() for k in kept) + y.sum()

    def run(transform: Transform) -> Any:
        torch.manual_seed(3)
        return transform(f)(x), torch.rand(2)

    expected = run(lambda f: f)
    with room_for(3):
        assert_bitwise_equal(run(rematfn.remat), expected)


@pytest.mark.parametrize("sources", ["device", "cpu", "both"])
def test_an_operator_that_no_tag_says_draws(sources: str) -> None:
    """See Note [Whether an untagged operator draws is observed]."""

    def scale(x: Tensor) -> Tensor:
        y = x * torch.rand(1, device=x.device) if sources != "cpu" else x
        return y * torch.rand((), device="cpu").item() if sources != "device" else y

    def f(x: Tensor) -> Tensor:
        y = torch.ops.tested.scale(x.sin())
        return y.cos() * y

    def run(transform: Transform) -> Any:
        torch.manual_seed(3)
        return transform(f)(torch.linspace(0, 1, 12)), torch.rand(2), torch.rand(2, device="cpu")

    with torch.library._scoped_library("tested", "FRAGMENT") as library:
        library.define("scale(Tensor x) -> Tensor")
        library.impl("scale", scale, "CompositeExplicitAutograd")
        assert_bitwise_equal(run(EVERYTHING), run(untransformed))


# --- autograd's thread ---------------------------------------------------------------------------


def test_the_statistics_tell_what_the_driver_sees() -> None:
    g = rematfn.remat(lambda x: (x.sin() * x.cos()).sum(), budget=4 * ONE)
    torch.accelerator.synchronize()
    torch.accelerator.empty_cache()
    torch.accelerator.reset_peak_memory_stats()
    before = torch.accelerator.max_memory_reserved()
    g(torch.randn(ONE // 4))
    stats = rematfn.stats(g)
    assert stats.reserved_bytes == torch.accelerator.max_memory_reserved()
    assert stats.reserved_bytes >= before + 2 * ONE  # the argument, and a sine
    assert "by the process, at the driver" in str(stats)


def test_a_level_with_a_backward_inside_lets_go_of_all_of_it() -> None:
    """The thread that runs backward lets go of the graph after it has said that it is done."""
    weights = [torch.randn(64, 64) / 8 for _ in range(6)]
    x = torch.randn(1024, 64)

    def net(weights: list[Tensor]) -> Tensor:
        y = x
        for w in weights:
            y = torch.tanh(y @ w)
        return y.square().mean()

    torch.accelerator.reset_peak_memory_stats()
    before = torch.accelerator.memory_allocated()
    expected = func.grad(net)(weights)
    torch.accelerator.synchronize()
    budget = (torch.accelerator.max_memory_allocated() - before) * 6 // 10
    g = rematfn.remat(func.grad(net), budget=budget)
    for _ in range(8):
        gc.collect()
        torch.accelerator.reset_peak_memory_stats()
        before = torch.accelerator.memory_allocated()
        found = g(weights)
        assert torch.accelerator.max_memory_allocated() - before <= budget
        assert_bitwise_equal(found, expected)
        del found
    assert rematfn.stats(g).replays <= 6


def test_a_graph_that_the_thread_of_autograd_made_is_the_levels_too() -> None:
    """`create_graph` inside of `f`: what its nodes saved is read within the budget."""

    def run(transform: Transform) -> tuple[Any, int]:
        x = big().requires_grad_()

        def gradient(x: Tensor) -> Tensor:
            y = x
            for _ in range(8):
                y = (y * 1.5).sin()
            (found,) = torch.autograd.grad(y.sum(), x, create_graph=True)
            return found

        with rematfn.testing.MemoryTimeline(DEVICE) as timeline:
            transform(gradient)(x).square().sum().backward()
        return x.grad, timeline.peak

    expected, eager = run(lambda f: f)
    assert eager > 24 * ONE
    found, peak = run(lambda f: rematfn.remat(f, 10 * ONE))
    assert_bitwise_equal(found, expected)
    assert peak < 12 * ONE  # the result, and what is made of it, are the caller's
