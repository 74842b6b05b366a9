# SPDX-License-Identifier: Apache-2.0
"""`offload` to the host's memory: bit for bit what `f` gives, where copies and kernels are late.

Each published race of overlapped offloading that can occur here has a test by its name.
"""

import functools
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from fake_device import (
    DEVICE,
    ONE,
    assert_comes_empty,
    big,
    captured,
    chain,
    delays,
    failed,
    pinned_bytes,
    pinned_limit,
    room_for,
    stopped,
)
from helpers import assert_bitwise_equal
from torch import Tensor

import rematfn
from rematfn import _C
from rematfn.testing import EvictEverything, MemoryTimeline

HOST = rematfn.Host("256MiB")


@pytest.fixture(autouse=True)
def on_the_device() -> Iterator[None]:
    with torch.device(DEVICE):
        yield
    torch.accelerator.synchronize()
    assert_comes_empty(HOST)


@pytest.mark.parametrize("seed", range(4))
def test_on_several_streams_that_are_late(seed: int) -> None:
    side = torch.Stream(DEVICE)

    def f(x: Tensor) -> Tensor:
        kept = []
        for i in range(6):
            x = (x * 1.5).sin()
            kept.append(x)
            if i % 2:
                side.wait_stream(main())
                with side:
                    new = kept[-2].cos() * x
                main().wait_stream(side)
                new.record_stream(main())
                kept[-2] = new
        return torch.stack(kept).prod(0)

    expected = f(argument())
    torch.accelerator.synchronize()
    for options in ({}, {"policy": EvictEverything()}):
        with delays(seed, most=300):
            found = rematfn.offload(f, to=HOST, **options)(argument())
            torch.accelerator.synchronize()
        assert_bitwise_equal(found, expected)


# --- the races that others have had ---------------------------------------------------------------

MOVED = functools.partial(rematfn.offload, budget=1 << 20, to=HOST)


def main() -> torch.Stream:
    return torch.accelerator.current_stream()


def argument() -> Tensor:
    return torch.linspace(0.1, 1.0, 600)


def gone(*tensors: Tensor) -> None:
    """Have them move to the host, as far as the host's thread is concerned. In eager: nothing."""
    for t in tensors:
        _C.testing.evict(t)
    for t in tensors[:1]:
        _C.testing.end_moves(t)


def stream_of(host: rematfn.Host, way: int) -> torch.Stream:
    """Return the stream that copies go out on, or come back on."""
    (numbers,) = _C.testing.streams_of(host.open())
    return torch.Stream(stream_id=numbers[way], device_index=0, device_type=main().device_type)


def out() -> torch.Stream:
    return stream_of(HOST, 0)


def back() -> torch.Stream:
    return stream_of(HOST, 1)


@pytest.fixture(autouse=True, scope="module")
def a_first_copy() -> None:
    """The streams are made with the first copy."""
    x = torch.ones(8, device=DEVICE)
    rematfn.offload(lambda x: (y := x.sin(), gone(y), y.cos())[-1], 1 << 20, to=HOST)(x)


@contextmanager
def halted(stream: torch.Stream | None = None) -> Iterator[None]:
    """Stop a stream, unless what an operator takes is still to be found out, by waiting for it."""
    with stopped(stream) if halting else nullcontext():
        yield


halting = False


@contextmanager
def halts() -> Iterator[None]:
    global halting
    halting = True
    yield
    halting = False


def no_race(f: Callable[[Tensor], Tensor]) -> Callable[[], None]:
    """Make a test of a function of tensors: nothing races where its values move."""

    def test() -> None:
        expected = f(argument())
        for _ in range(2):
            MOVED(f)(argument())
        torch.accelerator.synchronize()
        moved = HOST.bytes_out
        for seed in range(3):
            x = argument()
            with delays(seed), halts():
                found = MOVED(f)(x)
                torch.accelerator.synchronize()
            assert_bitwise_equal(found, expected)
        assert HOST.bytes_out > moved

    test.__doc__ = f.__doc__
    return test


@no_race
def test_a_copy_out_waits_for_the_kernel_that_makes_the_bytes(x: Tensor) -> Tensor:
    """A copy that is enqueued beside what it copies (trl, pull request 7195)."""
    with halted():
        y = x.sin()
        gone(y)
    return y * 2


@no_race
def test_memory_is_not_handed_out_before_the_copy_out_is_done(x: Tensor) -> Tensor:
    """Freed too early (torchtune, issue 1867)."""
    y = x.sin()
    with halted(out()):
        gone(y)
        z = x.cos() + 1  # where y was
    return y * z


@no_race
def test_what_comes_back_does_not_overwrite_what_is_still_to_be_read(x: Tensor) -> Tensor:
    """A return into memory that earlier kernels use (DeepSpeed, pull request 8186)."""
    y = x.sin()
    gone(y)
    with halted():
        t = x * 3
        z = t.cos()
        del t  # whose memory y gets
        _C.testing.begin_to_fetch(y)
    return y + z


@no_race
def test_a_return_waits_for_its_own_copy_out(x: Tensor) -> Tensor:
    """A return that overtakes the copy out (Megatron-LM, issue 7398)."""
    y = x.sin()
    with halted(out()):
        gone(y)
        z = y * 2
    return z + y


@no_race
def test_what_comes_back_is_not_read_before_it_has_come(x: Tensor) -> Tensor:
    """A read beside the return (three stream races, DeepSpeed, pull request 8186)."""
    y = x.sin()
    gone(y)
    with halted(back()):
        z = y * 2
    return z + y


def test_a_place_is_not_given_away_before_it_has_been_read() -> None:
    """Two functions share a host, on two streams (no block is reused before its copy is done)."""
    host = rematfn.Host(4096)  # one place
    side = torch.Stream(DEVICE)
    x, w = argument(), argument().cos()
    expected = x.sin() * 2, w.exp() * 3
    torch.accelerator.synchronize()

    def first(x: Tensor) -> Tensor:
        y = x.sin()
        gone(y)
        return y * 2  # which waits for the return; the place is free again

    def second(w: Tensor) -> Tensor:
        v = w.exp()
        gone(v)
        return v * 3

    for _ in range(2):
        rematfn.offload(first, 1 << 20, to=host)(x)
        rematfn.offload(second, 1 << 20, to=host)(w)
    torch.accelerator.synchronize()
    with stopped(stream_of(host, 1)):
        y = rematfn.offload(first, 1 << 20, to=host)(x)
        with side:
            v = rematfn.offload(second, 1 << 20, to=host)(w)
    torch.accelerator.synchronize()
    assert_bitwise_equal((y, v), expected)


@no_race
def test_the_stream_is_the_current_one_of_each_call(x: Tensor) -> Tensor:
    """The compute stream taken down when the tier was made (trl, pull request 7195)."""
    side = torch.Stream(DEVICE)
    side.wait_stream(main())
    with side, halted(side):
        y = x.sin()
        gone(y)
    with side:
        z = y * 2
    main().wait_stream(side)
    z.record_stream(main())
    return z + 1


@no_race
def test_the_stream_is_asked_for_outside_of_our_own(x: Tensor) -> Tensor:
    """`current_stream()` within `with stream` (torchtitan, pull request 2581)."""
    y = x.sin()
    gone(y)
    before = main()
    with halted(back()):
        _C.testing.begin_to_fetch(y)
        z = y * 2  # on the main stream, which is still the current one
        assert main() == before
    return z


@no_race
def test_memory_for_a_return_is_the_current_stream_s(x: Tensor) -> Tensor:
    """A clone in the pool of the side stream (axolotl, pull request 3833)."""
    y, w = x.sin(), x.cos()
    gone(y, w)
    with halted():
        z = y * 2
        del y  # whose memory w would get, if that were the copying stream's
        _C.testing.begin_to_fetch(w)
    return z + w


@no_race
def test_a_return_that_nobody_wants_any_more_writes_to_nobody_s_memory(x: Tensor) -> Tensor:
    """Freed while it comes (torchtune, issue 1867, the other way)."""
    y = x.sin()
    gone(y)
    with halted(back()):
        _C.testing.begin_to_fetch(y)
        del y
        z = x.exp()  # would be there
        w = x.cos()
    return z * w


@no_race
def test_what_goes_out_may_die_on_the_way(x: Tensor) -> Tensor:
    y = x.sin()
    with halted(out()):
        _C.testing.evict(y)
        del y
        z = x.exp()
    return z * 2


@no_race
def test_what_goes_out_may_be_written_on_the_way(x: Tensor) -> Tensor:
    y = x.sin()
    with halted(out()):
        _C.testing.evict(y)
        y.mul_(3)
    gone(y)
    return y * 2


@no_race
def test_a_side_stream_reads_what_has_come_back(x: Tensor) -> Tensor:
    """Side streams beside it (torchtune, issue 2683)."""
    side = torch.Stream(DEVICE)
    y = x.sin()
    side.wait_stream(main())
    gone(y)
    with halted(back()):
        with side:
            z = y * 2
        w = y + 1
    main().wait_stream(side)
    z.record_stream(main())
    return z + w


# --- bounded on both sides ------------------------------------------------------------------------

WAYS: dict[str, Callable[[rematfn.Host], Any]] = {
    "offload": lambda host: functools.partial(rematfn.offload, to=host),
    "hybrid": lambda host: functools.partial(rematfn.remat, offload=host),
    "remat": lambda host: rematfn.remat,
    "everything": lambda host: functools.partial(rematfn.remat, policy=EvictEverything()),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("units", [3, 4, 6])
def test_the_budget_holds_as_the_device_counts(way: str, units: int) -> None:
    host = rematfn.Host("16MiB")
    x = big()
    expected = chain(x)
    g = WAYS[way](host)(chain, budget=units * ONE)
    for _ in range(3):
        with MemoryTimeline(DEVICE) as timeline:
            found = g(x)
        assert_bitwise_equal(found, expected)
        stats = rematfn.stats(g)
        assert timeline.peak == timeline.device_peak  # as the device's own allocator counts
        assert 0 < stats.peak_bytes <= timeline.peak <= units * ONE
        if way == "offload":
            assert stats.replays == 0
            assert stats.moved_bytes >= (8 - units) * ONE
    assert host.peak_bytes <= host.pinned_bytes <= 16 * ONE


def test_the_host_s_budget_is_a_hard_cap() -> None:
    host = rematfn.Host(2 * ONE)
    x = big()
    with pytest.raises(rematfn.BudgetError, match=r"on the host [\d.]+ MiB of 2 MiB"):
        rematfn.offload(chain, 3 * ONE, to=host)(x)
    assert host.peak_bytes <= host.pinned_bytes <= 2 * ONE
    g = rematfn.remat(chain, 3 * ONE, offload=host)  # the rest is dropped
    assert_bitwise_equal(g(x), chain(x))
    assert host.peak_bytes <= host.pinned_bytes <= 2 * ONE
    gc.collect()
    assert host.held_bytes == 0


def test_where_no_more_memory_can_be_pinned_the_value_stays() -> None:
    host = rematfn.Host("64MiB")
    x = big()
    with pinned_limit(0):
        assert_bitwise_equal(rematfn.remat(chain, 3 * ONE, offload=host)(x), chain(x))
        nothing = r"(?s)on the host 0 B of 0 B: no more memory"
        with pytest.raises(rematfn.BudgetError, match=nothing):
            rematfn.offload(chain, 3 * ONE, to=host)(x)
    assert host.pinned_bytes == 0


def test_what_was_pinned_serves_after_no_more_can_be() -> None:
    """A value that needs two places finds no room beyond what is pinned, though two are free."""
    host = rematfn.Host("512MiB")
    unit = 1 << 22  # elements: 16 MiB, which is as much as is pinned at once

    def f(x: Tensor, limit: int) -> Tensor:
        small = [x[:unit] * i for i in range(4)]
        made = [y.sum() for y in small]
        with pinned_limit(limit):
            for i in range(3):
                two = x * i
                made += [two.sum(), two.mean()]
                del small[min(i, 1)], two  # the first, then one between the others
        return torch.stack([*made, *(y.sum() for y in small)])

    x = torch.linspace(0, 1, 2 * unit)
    g = rematfn.offload(f, to=host, policy=EvictEverything())
    assert_bitwise_equal(g(x, 0), f(x, 0))
    assert 0 < host.pinned_bytes <= 96 << 20


# --- what is left behind --------------------------------------------------------------------------


def test_pinned_memory_goes_with_the_tier() -> None:
    before = pinned_bytes()
    host = rematfn.Host("16MiB")
    x = big()
    assert_bitwise_equal(rematfn.offload(chain, 3 * ONE, to=host)(x), chain(x))
    assert pinned_bytes() >= before + 16 * ONE
    del host
    gc.collect()
    torch.accelerator.synchronize()
    assert pinned_bytes() == before


def test_graphs_are_dropped_on_a_device_that_has_failed() -> None:
    """Who lets go is a destructor: there what the device says of it would end the process."""
    host = rematfn.Host("16MiB")
    y = rematfn.offload(chain, 3 * ONE, to=host)(big().requires_grad_())
    assert host.held_bytes > 0
    with failed():
        del y
        gc.collect()
    assert host.held_bytes == 0


@pytest.mark.skipif(torch.__version__ < "2.13", reason="torch 2.12 does not tell of every device")
def test_nothing_moves_while_a_stream_is_captured() -> None:
    host = rematfn.Host("16MiB")

    def f(x: Tensor) -> Tensor:
        y = x.sin()
        gone(y)
        z = x.cos()  # begins to leave
        with captured():
            before = host.bytes_out, host.bytes_in
            x.tan() * 2
            with pytest.raises(rematfn.errors.OffloadError, match="while a stream is captured"):
                y + 1  # which is on the host
            assert (host.bytes_out, host.bytes_in) == before
        return y * z

    def plain(x: Tensor) -> Tensor:
        return x.sin() * x.cos()

    x = big()
    g = rematfn.offload(f, to=host, policy=EvictEverything())
    assert_bitwise_equal(g(x), plain(x))
    assert host.held_bytes == 0


def test_a_device_that_is_full_waits_for_what_is_leaving() -> None:
    """All that could go may have begun to before the device is full."""

    def f(x: Tensor) -> Tensor:
        kept = [x.sin(), x.cos(), x.exp()]
        for _ in range(4):
            x[:8] * 2  # in the meantime those begin to leave
        kept.append(x.tan())
        return sum(kept)

    x = big()
    expected = f(x)
    for _ in range(2):  # nobody waits for a first copy, nor for an operator that is timed
        rematfn.offload(f, to=HOST)(x)
    with room_for(3), stopped(out()):
        found = rematfn.offload(f, to=HOST)(x)
    assert_bitwise_equal(found, expected)


# --- the interface --------------------------------------------------------------------------------


def test_by_default_values_on_an_accelerator_go_to_the_host_and_others_to_a_disk() -> None:
    def f(x: Tensor, y: Tensor) -> Any:
        return chain(x), chain(y)

    x, y = big(), big().cpu()
    g = rematfn.offload(f, 5 * ONE)
    assert_bitwise_equal(g(x, y), f(x, y))
    assert [tier.bytes_out > 0 for tier in g._options.tiers.all] == [True, True]


def test_a_disk_is_no_tier_for_an_accelerator() -> None:
    with pytest.raises(rematfn.BudgetError, match=r"on the disk 0 B.*accelerator do not go there"):
        rematfn.offload(chain, 3 * ONE, to="disk")(big())
