# SPDX-License-Identifier: Apache-2.0
"""`remat` of programs that use several streams, which know of no replay and no eviction.

A stream that is stopped shows what races: what was to wait for it has run, or what it is about to
read is gone.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from fake_device import DEVICE, delays, stopped
from helpers import Transform, assert_bitwise_equal, untransformed
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import rematfn
from rematfn import _C

evict = _C.testing.evict  # of an eager tensor, it does nothing
# Without verify, which waits for each result to look at it.
EVERYTHING = functools.partial(rematfn.remat, policy=rematfn.testing.EvictEverything())


@pytest.fixture(autouse=True)
def on_the_device() -> Iterator[None]:
    with torch.device(DEVICE):
        yield


def main() -> torch.Stream:
    return torch.accelerator.current_stream()


def argument() -> Tensor:
    return torch.linspace(0.1, 1.0, 600, requires_grad=True)


def assert_no_race(run: Callable[[Transform], Any], *others: Transform) -> None:
    expected = run(untransformed)
    torch.accelerator.synchronize()
    for seed, transform in enumerate([rematfn.remat, EVERYTHING, EVERYTHING, *others]):
        with delays(seed):
            actual = run(transform)
            torch.accelerator.synchronize()
        assert_bitwise_equal(actual, expected)


def test_bytes_that_a_side_stream_reads_are_not_handed_out_again() -> None:
    side = torch.Stream(DEVICE)

    def f(x: Tensor) -> Tensor:
        y = x.sin()
        side.wait_stream(main())
        with stopped(side):
            with side:
                z = y * 2
            evict(y)  # which is still to be read
            w = x.cos() + 1
        main().wait_stream(side)
        z.record_stream(main())
        return z + w + y

    assert_no_race(lambda transform: transform(f)(argument()))


def test_what_is_made_again_on_a_side_stream_is_waited_for() -> None:
    side = torch.Stream(DEVICE)

    def f(x: Tensor) -> Tensor:
        y = x.sin()
        side.wait_stream(main())
        evict(y)
        with stopped(side):
            with side:
                z = y * 2  # y is made again, on the side
            w = y + 1  # the program has nothing to wait for
        main().wait_stream(side)
        z.record_stream(main())
        return z + w

    assert_no_race(lambda transform: transform(f)(argument()))


def test_what_a_replay_reads_is_not_overwritten_by_another_stream() -> None:
    side = torch.Stream(DEVICE)

    def f(x: Tensor, buffer: Tensor) -> Tensor:
        y = x * buffer
        side.wait_stream(main())
        evict(y)
        with stopped(main()):
            z = y + 1  # y is made again from the buffer
            with side:
                buffer.mul_(3)  # which was read before the side was told to wait
        main().wait_stream(side)
        return z * buffer

    def run(transform: Transform) -> Any:
        buffer = torch.ones(600)
        return transform(f)(argument(), buffer), buffer

    assert_no_race(run)


def test_a_result_is_ready_for_whoever_waits_for_the_stream_that_made_it() -> None:
    side = torch.Stream(DEVICE)

    def f(x: Tensor) -> Tensor:
        side.wait_stream(main())
        with side:
            return x.sin().cos()

    def run(transform: Transform) -> Any:
        x = argument().detach()
        with stopped():  # where the result is made again as it leaves
            y = transform(f)(x)
            with side:
                z = y * 2
        main().wait_stream(side)
        z.record_stream(main())
        return z + 1

    assert_no_race(run)


def test_backward_runs_on_the_streams_of_forward() -> None:
    side = torch.Stream(DEVICE)

    def f(x: Tensor) -> Tensor:
        y = x.sin().exp()
        side.wait_stream(main())
        with side:
            z = (y * y).tanh() * y
        main().wait_stream(side)
        z.record_stream(main())
        return z * y

    def run(transform: Transform) -> Any:
        x = argument()
        transform(f)(x).sum().backward()
        return x.grad

    assert_no_race(run, functools.partial(rematfn.remat, budget=5 * 2400))


def test_record_stream_is_no_write() -> None:
    def f(x: Tensor) -> Tensor:
        y = x.sin()
        y.record_stream(torch.Stream(DEVICE))
        return y.cos() * y

    g = EVERYTHING(f)
    x = argument()
    assert_bitwise_equal(g(x), f(x))
    plain = rematfn.remat(lambda x: (y := x.sin()).cos() * y)
    plain(x)
    h = rematfn.remat(f)
    h(x)
    assert rematfn.stats(h).peak_bytes == rematfn.stats(plain).peak_bytes


def test_record_stream_finds_bytes_of_the_allocators() -> None:
    """While a profiler records shapes, what is to be kept has a share in the program's bytes."""

    def f(x: Tensor) -> Tensor:
        y = rematfn.keep(x.sin())
        for _ in range(4):
            x = (x * 2).cos()  # before each of these the level looks for what has died
        y.record_stream(torch.Stream(DEVICE))
        return x * y

    with profile(activities=[ProfilerActivity.CPU], record_shapes=True, acc_events=True):
        actual = rematfn.remat(f)(argument())
    assert_bitwise_equal(actual, f(argument()))
