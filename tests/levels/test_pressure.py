# SPDX-License-Identifier: Apache-2.0
"""Levels without a budget: they hold everything while memory lasts, and evict when it does not."""

import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch
from helpers import assert_bitwise_equal
from processes import in_a_process
from torch import Tensor

import rematfn
from rematfn import _C

MIB = 1 << 20


@pytest.fixture
def pretend() -> Iterator[Callable[[int], None]]:
    yield _C.testing.pretend_memory_left
    _C.testing.pretend_memory_left(None)


def deep(x: Tensor, steps: int = 12) -> Tensor:
    for _ in range(steps):
        x = x.sin() * 1.5
    return x.sum()


def gradient(f: Callable[[Tensor], Tensor]) -> Tensor:
    return torch.func.grad(f)(torch.linspace(0, 1, MIB // 4))  # 1 MiB


def test_a_level_evicts_when_little_memory_is_left(pretend: Callable[[int], None]) -> None:
    pretend(0)
    g = rematfn.remat(deep)
    assert torch.equal(gradient(g), gradient(deep))
    assert rematfn.stats(g).evictions > 0
    assert rematfn.stats(g).replays > 0


# --- when an allocation fails ---------------------------------------------------------------------

LARGE = 40 * MIB  # more than the C library keeps for later, but for one such block
# A sanitizer maps its shadow, terabytes of addresses, before the first line runs, and more of it as
# it goes: within a limit on addresses it aborts whatever we do.
no_sanitizer = pytest.mark.skipif(
    "san.so" in os.environ.get("LD_PRELOAD", ""), reason="a sanitizer needs all addresses"
)


@contextmanager
def addresses(nbytes: int) -> Iterator[None]:
    """Let the process have so many bytes of addresses more than it has."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def large() -> Tensor:
    return torch.linspace(0, 1, LARGE // 4)


@no_sanitizer
@in_a_process
def test_a_level_evicts_when_an_allocation_fails() -> None:
    torch.set_num_threads(1)
    x = large()
    shallow = partial(deep, steps=6)
    expected = torch.func.grad(shallow)(x)
    g = rematfn.remat(shallow)
    torch.func.grad(rematfn.remat(lambda x: x.sin().sum()))(torch.ones(9))  # what is set up once
    with addresses(8 * LARGE):
        with pytest.raises(RuntimeError, match="allocate memory"):
            torch.func.grad(shallow)(x)
        found = [torch.func.grad(g)(x) for _ in range(2)]
    for each in found:
        assert_bitwise_equal(each, expected)
    assert rematfn.stats(g).evictions > 0
    rematfn.testing.check()


@torch.library.custom_op("rematfn_tests::write_and_allocate", mutates_args={"x"})
def write_and_allocate(x: Tensor) -> None:
    """Write, then ask for memory: who runs it again has written twice."""
    x.add_(1)
    scratch = torch.empty(2 * LARGE // 4)
    x.add_(scratch[:1].zero_().item())


@write_and_allocate.register_fake
def _(x: Tensor) -> None: ...


@no_sanitizer
@in_a_process
def test_an_operator_whose_allocation_failed_has_written_once() -> None:
    torch.set_num_threads(1)

    def f(x: Tensor) -> Tensor:
        held = [x * k for k in range(1, 6)]
        written = x.sin()
        write_and_allocate(written)
        return sum(held, written)  # type: ignore[return-value]

    x = large()
    expected = f(x)
    g = rematfn.remat(f)
    rematfn.remat(lambda x: x.sin().sum())(torch.ones(9))
    with addresses(int(7.5 * LARGE)):
        found = g(x)
    assert rematfn.stats(g).evictions > 0, "the allocation failed"
    assert_bitwise_equal(found, expected)
