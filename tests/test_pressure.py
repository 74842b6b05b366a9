# SPDX-License-Identifier: Apache-2.0
"""Levels without a budget: they hold everything while memory lasts, and evict when it does not."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

import rematfn
from rematfn import _C

MIB = 1 << 20


@pytest.fixture
def pretend() -> Iterator[Callable[[int], None]]:
    yield _C.pretend_memory_left
    _C.pretend_memory_left(None)


def deep(x: Tensor) -> Tensor:
    for _ in range(12):
        x = x.sin() * 1.5
    return x.sum()


def gradient(f: Callable[[Tensor], Tensor]) -> Tensor:
    return torch.func.grad(f)(torch.linspace(0, 1, 2 * MIB))  # 8 MiB


def test_nothing_is_evicted_while_memory_lasts(pretend: Callable[[int], None]) -> None:
    pretend(1 << 40)
    g = rematfn.remat(deep)
    gradient(g)
    assert rematfn.stats(g).evictions == 0


def test_a_level_evicts_when_little_memory_is_left(pretend: Callable[[int], None]) -> None:
    pretend(0)
    g = rematfn.remat(deep)
    assert torch.equal(gradient(g), gradient(deep))
    assert rematfn.stats(g).evictions > 0
    assert rematfn.stats(g).replays > 0


def test_memory_left_is_what_the_system_says() -> None:
    total = int(Path("/proc/meminfo").read_text().split("MemTotal:")[1].split()[0]) * 1024
    assert 0 < _C.memory_left() <= total
