# SPDX-License-Identifier: Apache-2.0
"""What the operating system counts: larger blocks come from pages that go back in time."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from models import CORE, compile_model, run_all
from processes import forking, in_a_child, in_a_process
from torch import Tensor

import rematfn
from rematfn.testing import ResidentPeak
from rematfn.testing._resident import give_back

MIB = 1 << 20
SIDE = 1024  # a square of floats: 4 MiB
SQUARE = 4 * MIB
LINKS = 40

# These look at pages of the pool, of which there are none then (kMayUsePages in allocator.cpp). The
# model of the pool runs all the same.
pooled = pytest.mark.skipif(
    "libasan" in os.environ.get("LD_PRELOAD", ""),
    reason="the address sanitizer watches the C library's blocks; the pool is off",
)


# --- the pool by itself ---------------------------------------------------------------------------


def test_the_pool_is_its_model() -> None:
    core = [CORE / "memory" / name for name in ("pages.cpp", "stretches.cpp")]
    run_all(compile_model("pages", [Path(__file__).with_name("pages_model.cpp"), *core]))


# --- under torch's allocator ----------------------------------------------------------------------


def deep(x: Tensor) -> Tensor:
    for _ in range(LINKS):
        x = (x * 1.01).sin()
    return x.square().mean()


def square() -> Tensor:
    return torch.linspace(-1, 1, SIDE * SIDE).view(SIDE, SIDE)


@pooled
@forking
def test_a_forked_child_allocates_and_frees() -> None:
    x = square().requires_grad_()
    loss = rematfn.remat(deep, 10 * SQUARE)(x)

    def child() -> None:
        nonlocal loss
        y = torch.ones(SIDE, SIDE).sin()
        del loss, y
        rematfn.testing.check()
        assert torch.isfinite(rematfn.remat(deep, 10 * SQUARE)(square()))

    assert in_a_child(child) == 0
    loss.backward()
    assert x.grad is not None


# --- in a process of its own ----------------------------------------------------------------------


def added(*functions: Callable[[Tensor], Tensor]) -> list[int]:
    """Return how far the resident set rises in three calls of each."""
    torch.set_num_threads(1)
    x, found = square(), []
    for f in functions:
        small = rematfn.remat(lambda x: x.sin().sum(), "1MiB", offload=True)  # what is set up once
        for _ in range(2):
            torch.func.grad(small)(torch.ones(100))
        give_back()
        with ResidentPeak() as whole:
            for _ in range(3):
                torch.func.grad(f)(x)
        assert whole.added is not None
        found.append(whole.added)
    return found


# A gradient, and a megabyte for each of two threads to pass bytes through.
BESIDE = SQUARE + 8 * MIB


@pooled
@in_a_process
def test_the_resident_set_stays_within_the_budget() -> None:
    """What is on its way to a disk counts, its page cache is not used, bounce buffers are small."""
    budget = 10 * SQUARE
    disk = rematfn.Disk()
    free, *bounded = added(
        deep,
        rematfn.remat(deep, budget),
        rematfn.offload(deep, budget, to=disk),
        rematfn.remat(deep, budget, offload=disk),
    )
    assert free > 30 * SQUARE, f"{free / MIB} MiB"
    for nbytes in bounded:
        assert 5 * SQUARE < nbytes <= 1.1 * budget + BESIDE, f"{nbytes / MIB} MiB"
    assert disk.bytes_out > 20 * SQUARE


def gated(x: Tensor) -> Tensor:
    for _ in range(LINKS):
        x = (x * 1.01).relu()
    return x.square().mean()


@pooled
@in_a_process
def test_the_resident_set_is_what_is_counted_where_values_are_packed() -> None:
    """Without a budget, and within one: what is cut off of packed values goes back."""
    for budget in (None, 25 * SQUARE):
        g = rematfn.offload(gated, budget, to="packed")
        (nbytes,) = added(g)
        most = rematfn.stats(g).peak_bytes
        assert nbytes <= 1.1 * most + BESIDE, f"{nbytes / MIB} of {most / MIB}"
        assert 15 * SQUARE < most < 0.7 * LINKS * SQUARE
