# SPDX-License-Identifier: Apache-2.0
"""Disks that are full, fail, are cut or corrupted: nothing that was here is lost.

The file has no name; here it is found among the process's open files, and spoiled for real.
"""

import functools
import gc
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import Transform, assert_bitwise_equal, drawn, refusal_of, remains
from processes import in_a_process, interrupted, together
from torch import Tensor

import rematfn
from rematfn import _C

pytestmark = pytest.mark.usefixtures("costs_at_random")
EVICTING = rematfn.testing.EvictEverything()
LINKS = 12
NUMEL = 1 << 14  # 64 KiB each
VALUE = 4 * NUMEL


def chain(x: Tensor) -> Tensor:
    for _ in range(LINKS):
        x = (x * 1.01).sin()
    return x.square().sum()


def not_replayable(x: Tensor) -> Tensor:
    for _ in range(LINKS):
        x = drawn(x.sin())
    return x.square().sum()


def argument() -> Tensor:
    return torch.linspace(-1, 1, NUMEL).requires_grad_()


def gradient(f: Callable[[Tensor], Tensor]) -> Tensor:
    x = argument()
    f(x).backward()
    return x.grad


def file_of(folder: Path) -> int:
    """Return the descriptor of the file that a disk has in `folder`."""
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:
            continue
        if target.startswith(str(folder)) and target.endswith("(deleted)"):
            return int(name)
    raise AssertionError("no file is open there")


def wait_for(disk: rematfn.Disk) -> None:
    """Wait until nothing is under way."""
    until = time.monotonic() + 30
    while disk.open().statistics()["queued_bytes"] > 0:
        assert time.monotonic() < until
        time.sleep(0.001)


def truncate(folder: Path) -> None:
    os.truncate(f"/proc/self/fd/{file_of(folder)}", 0)


def corrupt(folder: Path) -> None:
    """Change one byte in each page."""
    file = os.open(f"/proc/self/fd/{file_of(folder)}", os.O_RDWR)
    try:
        for offset in range(100, os.fstat(file).st_size, 4096):
            byte = os.pread(file, 1, offset)
            os.pwrite(file, bytes([byte[0] ^ 1]), offset)
        os.fsync(file)
    finally:
        os.close(file)


@contextmanager
def replaced(folder: Path, by: str, flags: int) -> Iterator[None]:
    """Have the descriptor stand for another file, for the while."""
    file = file_of(folder)
    kept, other = os.dup(file), os.open(by, flags)
    os.dup2(other, file)
    os.close(other)
    try:
        yield
    finally:
        os.dup2(kept, file)
        os.close(kept)


def full(folder: Path) -> Any:
    return replaced(folder, "/dev/full", os.O_RDWR)


def failing(folder: Path) -> Any:
    return replaced(folder, "/dev/null", os.O_RDONLY)


def opened(folder: Path, **options: object) -> rematfn.Disk:
    """Return a disk whose file is there."""
    disk = rematfn.Disk(folder, **options)  # type: ignore[arg-type]
    rematfn.offload(chain, to=disk, policy=EVICTING)(argument())
    file_of(folder)
    return disk


def assert_clean(disk: rematfn.Disk) -> None:
    rematfn.testing.check()
    assert remains() == {"levels": 0, "operations": 0}
    assert disk.held_bytes == 0


How = Callable[[rematfn.Disk], Transform]
Spoil = Callable[[Path], Any]
SPOILED = {"truncated": truncate, "corrupted": corrupt}
spoiled = pytest.mark.parametrize("spoil", SPOILED.values(), ids=SPOILED.keys())
BROKEN = {"full": full, "failing": failing}
broken = pytest.mark.parametrize("breaks", BROKEN.values(), ids=BROKEN.keys())
TRANSFORMS: dict[str, How] = {
    "moves": lambda disk: lambda f: rematfn.offload(f, to=disk),
    "moves, tight": lambda disk: lambda f: rematfn.offload(f, 4 * VALUE, to=disk),
    "moves everything": lambda disk: lambda f: rematfn.offload(f, to=disk, policy=EVICTING),
    "moves or drops": lambda disk: lambda f: rematfn.remat(f, offload=disk, policy=EVICTING),
}
transforms = pytest.mark.parametrize("how", TRANSFORMS.values(), ids=TRANSFORMS.keys())


# --- what is there cannot be read -----------------------------------------------------------------


@spoiled
@transforms
def test_what_cannot_be_read_is_replayed(spoil: Spoil, how: How, tmp_path: Path) -> None:
    """Under a budget that leaves no room for that, nothing can go any more: the error says why."""
    disk = rematfn.Disk(tmp_path, verify=True)
    g = how(disk)(chain)
    x = argument()
    loss = g(x)
    wait_for(disk)
    assert disk.held_bytes > 0
    spoil(tmp_path)
    refusal = refusal_of(loss.backward)
    if refusal:
        assert how is TRANSFORMS["moves, tight"]
        assert "could not read back" in str(refusal)
        assert str(tmp_path) in str(refusal)
    else:
        assert rematfn.stats(g).replays > 0 or disk.bytes_in == 0
        assert_bitwise_equal(x.grad, gradient(chain))
    del loss
    assert_clean(disk)


@spoiled
def test_what_cannot_be_read_nor_replayed_is_an_error(spoil: Spoil, tmp_path: Path) -> None:
    disk = rematfn.Disk(tmp_path, verify=True)
    x = argument()
    loss = rematfn.offload(not_replayable, to=disk, policy=EVICTING)(x)
    wait_for(disk)
    x.sin()
    spoil(tmp_path)
    for _ in range(2):  # it is tried again, and fails again
        with pytest.raises(rematfn.errors.OffloadError, match="directory") as raised:
            loss.backward(retain_graph=True)
        assert str(tmp_path) in str(raised.value)
        rematfn.testing.check()
    del loss, raised
    assert_clean(disk)


@pytest.mark.parametrize("reads", [False, True])
def test_what_is_lost_on_its_way_back_is_told_of_to_who_reads_it(
    reads: bool, tmp_path: Path
) -> None:
    """Nothing has asked for it yet when it should have come."""
    disk = opened(tmp_path, verify=True)

    def f(x: Tensor) -> Tensor:
        y = drawn(x)
        assert _C.testing.evict(y)
        _C.testing.end_moves(y)
        corrupt(tmp_path)
        assert _C.testing.begin_to_fetch(y)
        wait_for(disk)
        z = x.sin().cos()
        if reads:
            with pytest.raises(rematfn.errors.OffloadError, match="not what was written"):
                z + y
        return z

    x = argument().detach()
    g = rematfn.offload(f, 8 * VALUE, to=disk)
    assert_bitwise_equal(g(x), x.sin().cos())
    assert_clean(disk)


def test_what_can_be_read_again_is_not_lost(tmp_path: Path) -> None:
    """A read that fails once: the values that cannot be replayed are there when it works again."""
    disk = rematfn.Disk(tmp_path)
    x = argument()
    loss = rematfn.offload(not_replayable, to=disk, policy=EVICTING)(x)
    wait_for(disk)
    with replaced(tmp_path, "/dev/null", os.O_WRONLY), pytest.raises(rematfn.errors.OffloadError):
        loss.backward(retain_graph=True)
    loss.backward()
    assert_bitwise_equal(x.grad, gradient(not_replayable))
    del loss
    assert_clean(disk)


# --- it cannot be written to ----------------------------------------------------------------------


@broken
@transforms
def test_what_cannot_be_written_stays_or_is_dropped(
    breaks: Spoil, how: How, tmp_path: Path
) -> None:
    """It breaks after each operator in turn: what has left before comes back."""
    right = gradient(chain)

    def f(x: Tensor, at: int, stack: ExitStack) -> Tensor:
        for i in range(LINKS):
            if i == at:
                stack.enter_context(breaks(tmp_path))
            x = (x * 1.01).sin()
        return x.square().sum()

    def step(disk: rematfn.Disk, x: Tensor, at: int) -> None:
        with ExitStack() as stack:
            loss = how(disk)(f)(x, at, stack)
            wait_for(disk)
            if at > 0:
                stack.close()  # what has left before is read
            loss.backward()

    for at in range(0, LINKS, 3):
        disk = opened(tmp_path)
        x = argument()
        refusal = refusal_of(functools.partial(step, disk, x, at))
        if refusal:
            assert how is TRANSFORMS["moves, tight"]
            assert str(tmp_path) in str(refusal)
        else:
            assert_bitwise_equal(x.grad, right)
        assert at > 0 or "could not write" in disk.open().statistics()["trouble"]
        del refusal
        assert_clean(disk)
        del disk
        gc.collect()


# --- nothing is left ------------------------------------------------------------------------------


@in_a_process
def test_neither_threads_nor_files_are_left() -> None:
    def threads() -> int:
        return len(os.listdir("/proc/self/task"))

    def files() -> int:
        return len(os.listdir("/proc/self/fd"))

    torch.set_num_threads(1)
    gradient(rematfn.remat(chain))
    ran, opened = threads(), files()
    disk = rematfn.Disk(bandwidth=20e6)
    g = rematfn.offload(chain, to=disk)
    gradient(g)
    loss = g(argument())
    assert threads() > ran
    assert files() == opened + 1
    del g, disk
    gc.collect()
    assert files() == opened + 1, "the graph holds it"
    loss.backward()
    del loss
    gc.collect()
    until = time.monotonic() + 30
    while (threads(), files()) != (ran, opened):
        assert time.monotonic() < until, f"{threads()} threads, {files()} files"
        time.sleep(0.01)


@in_a_process
def test_what_lineage_alone_holds_is_freed_while_it_is_written() -> None:
    torch.set_num_threads(1)
    disk = rematfn.Disk(bandwidth=1e9)

    def f(x: Tensor) -> Tensor:
        y = x.sin()
        x.mul_(0.5)  # only lineage holds what was there before
        return y.sum()

    g = rematfn.offload(f, to=disk, policy=EVICTING)
    x = torch.ones(1 << 24)  # so large that its memory is unmapped when it is freed
    for _ in range(10):
        g(x)
    assert disk.bytes_out > 0
    assert disk.open().statistics()["trouble"] == ""


# --- threads --------------------------------------------------------------------------------------


@pytest.mark.parametrize("bandwidth", [None, 30e6])
def test_a_tensor_is_dropped_elsewhere_while_it_moves(
    bandwidth: float | None, tmp_path: Path
) -> None:
    """On a thread that does not hold the level: as it leaves, while it is away, as it comes."""
    disk = rematfn.Disk(tmp_path, bandwidth=bandwidth)

    def f(x: Tensor) -> Tensor:
        boxes = [[], []]
        for i in range(4 * LINKS):
            x = (x * 1.01).sin()
            boxes[i % 2].append(x)
        loss = x.square().sum()

        def drop(box: list[Tensor]) -> None:
            while box:
                box.pop(len(box) // 2)

        def read() -> Tensor:
            total = loss
            for i in range(LINKS):
                total = total + kept[i % len(kept)].sum()
            return total

        kept = boxes[0][::3]
        found = together(read, *[lambda box=box: drop(box) for box in boxes])
        return found[0]

    right = gradient(f)
    for transform in (how(disk) for how in TRANSFORMS.values()):
        for _ in range(3):
            assert_bitwise_equal(gradient(transform(f)), right)
    assert_clean(disk)


# --- interrupts -----------------------------------------------------------------------------------


class StoppedError(Exception):
    """Raised by a signal handler."""


@interrupted
@transforms
def test_an_interrupt_while_transfers_are_under_way(how: How, tmp_path: Path) -> None:
    disk = rematfn.Disk(tmp_path, bandwidth=200e6)
    g = how(disk)(chain)
    right = gradient(chain)

    def stop(*_: object) -> None:
        raise StoppedError

    def seconds() -> float:
        start = time.perf_counter()
        gradient(g)
        return time.perf_counter() - start

    step = min(0.008, *(seconds() for _ in range(3)))
    before = signal.signal(signal.SIGALRM, stop)
    stopped = 0
    try:
        for delay in range(1, 60):
            try:
                signal.setitimer(signal.ITIMER_REAL, step * delay / 40)
                found = gradient(g)
                signal.setitimer(signal.ITIMER_REAL, 0)
                assert_bitwise_equal(found, right)
            except StoppedError:
                stopped += 1
            assert _C.stack_depth() == 0
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert stopped > 3
    assert_clean(disk)
    assert_bitwise_equal(gradient(g), right)
