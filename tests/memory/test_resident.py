# SPDX-License-Identifier: Apache-2.0
"""What the operating system counts: larger blocks come from pages that go back in time."""

import os
from pathlib import Path

import pytest
import torch
from models import CORE, compile_model, run_model
from processes import forking, in_a_child, in_a_process
from torch import Tensor

import rematfn
from rematfn.testing import ResidentPeak
from rematfn.testing._resident import give_back

MIB = 1 << 20
SIDE = 1024  # a square of floats: 4 MiB
SQUARE = 4 * MIB
LINKS = 40
MODEL = ["random", "kept", "threads", "fork", "addresses", "data", "mappings"]

# These look at pages of the pool, of which there are none then (kMayUsePages in allocator.cpp). The
# model of the pool runs all the same.
pooled = pytest.mark.skipif(
    "libasan" in os.environ.get("LD_PRELOAD", ""),
    reason="the address sanitizer watches the C library's blocks; the pool is off",
)


# --- the pool by itself ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model() -> Path:
    """Compile the pool, without torch, and a program that puts it beside a model."""
    core = [CORE / "memory" / name for name in ("pages.cpp", "stretches.cpp")]
    sources = [Path(__file__).with_name("pages_model.cpp"), *core]
    return compile_model("pages", sources)


@pytest.mark.parametrize("name", MODEL)
def test_the_pool_is_its_model(model: Path, name: str) -> None:
    run_model(model, name)


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


def added(budget: int | None) -> int:
    """Return how far the resident set rises in calls from the second on."""
    small = rematfn.remat(lambda x: x.sin().sum(), "1MiB")
    for _ in range(2):
        torch.func.grad(small)(torch.ones(100))
    f = deep if budget is None else rematfn.remat(deep, budget)
    x, most = square(), 0
    with ResidentPeak() as whole:
        for number in range(3):
            with ResidentPeak() as peak:
                torch.func.grad(f)(x)
            assert peak.after is not None
            assert whole.before is not None
            if number > 0:
                most = max(most, peak.after - whole.before)
    return most


@pooled
@in_a_process
def test_the_resident_set_stays_within_the_budget() -> None:
    torch.set_num_threads(1)
    budget = 10 * SQUARE
    most = added(budget)
    assert most <= 1.1 * budget + SQUARE + 8 * MIB, f"{most / MIB} MiB"


@pooled
@in_a_process
def test_the_resident_set_rises_further_without_one() -> None:
    torch.set_num_threads(1)
    most = added(None)
    assert most > 30 * SQUARE, f"{most / MIB} MiB"


# --- with a disk ----------------------------------------------------------------------------------


@pooled
@in_a_process
def test_the_resident_set_stays_within_the_budget_with_a_disk() -> None:
    """What is on its way counts, the page cache is not used, and bounce buffers are small."""
    torch.set_num_threads(1)
    budget = 10 * SQUARE
    x = square()
    disk = rematfn.Disk()
    small = rematfn.offload(lambda x: x.sin().sum(), "1MiB", to=disk)
    for _ in range(2):
        torch.func.grad(small)(torch.ones(100))
    for transform in (
        rematfn.offload(deep, budget, to=disk),
        rematfn.remat(deep, budget, offload=disk),
    ):
        give_back()
        with ResidentPeak() as whole:
            for _ in range(3):
                torch.func.grad(transform)(x)
        assert whole.added is not None
        # A gradient, and a megabyte for each of two threads to pass bytes through.
        assert whole.added <= 1.1 * budget + SQUARE + 8 * MIB, f"{whole.added / MIB} MiB"
        assert whole.added > 5 * SQUARE
    assert disk.bytes_out > 20 * SQUARE


# --- packed ---------------------------------------------------------------------------------------


def gated(x: Tensor) -> Tensor:
    for _ in range(LINKS):
        x = (x * 1.01).relu()
    return x.square().mean()


@pooled
@in_a_process
def test_the_resident_set_is_what_is_counted_where_values_are_packed() -> None:
    """Without a budget, and within one: what is cut off of packed values goes back."""
    torch.set_num_threads(1)
    x = square()
    small = rematfn.offload(gated, to="packed")
    for _ in range(2):
        torch.func.grad(small)(torch.ones(100))
    for budget in (None, 25 * SQUARE):
        g = rematfn.offload(gated, budget, to="packed")
        give_back()
        with ResidentPeak() as whole:
            most = 0
            for _ in range(3):
                torch.func.grad(g)(x)
                most = max(most, rematfn.stats(g).peak_bytes)
        assert whole.added is not None
        assert whole.added <= 1.1 * most + SQUARE + 8 * MIB, f"{whole.added / MIB} of {most / MIB}"
        assert 15 * SQUARE < most < 0.7 * LINKS * SQUARE
