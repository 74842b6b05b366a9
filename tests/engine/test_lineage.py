# SPDX-License-Identifier: Apache-2.0
"""Lineage may be long, and goes when the last tensor that needs it goes."""

import threading
from typing import Any

import pytest
import torch
from helpers import EXHAUSTIVE, assert_bitwise_equal
from processes import together
from torch import Tensor

import rematfn
from rematfn import _C

UNIT = 16  # bytes of the four floats that every link of a chain holds


def read_in_reverse(x: Tensor, n: int) -> Tensor:
    """Make a chain of `n` operators, all held in a list, and read it from its end."""
    links = [x]
    for _ in range(n):
        links.append(links[-1] + 1.0)
    total = torch.zeros(4)
    while links:
        total = total * 0.5 + links.pop()
    return total


@pytest.mark.parametrize("n", [1_000, 100_000 if EXHAUSTIVE else 20_000])
def test_a_chain_in_two_square_roots_of_its_length(n: int) -> None:
    """No stack overflows, and no link is replayed again and again."""
    x = torch.arange(4.0)
    budget = 2 * int(n**0.5) * UNIT
    g = rematfn.remat(lambda x: read_in_reverse(x, n), budget=budget)
    assert_bitwise_equal(g(x), read_in_reverse(x, n))
    stats = rematfn.stats(g)
    assert stats.peak_bytes <= budget
    assert n // 2 < stats.replays < 8 * n, f"{stats.replays / n} replays a link"
    assert _C.testing.live_operations() == 0


def test_one_replay_of_a_long_chain_needs_no_stack() -> None:
    """One value at the end of a chain that kept none of its links."""

    def f(x: Tensor) -> Tensor:
        y = x * 2
        for _ in range(50_000):
            y = y + 1.0
        a = torch.ones(4)
        b = a + 1
        c = a * b  # a, b and c leave no room for y
        del a, b
        return y * c

    x = torch.arange(4.0)
    g = rematfn.remat(f, budget=4 * UNIT - 1)
    in_a_small_thread(lambda: assert_bitwise_equal(g(x), f(x)))
    assert rematfn.stats(g).replays >= 50_000


def in_a_small_thread(work: Any) -> None:
    """Run `work` on a thread of 256 KiB of stack, where any deep recursion is the end."""
    before = threading.stack_size(256 * 1024)
    try:
        together(work)
    finally:
        threading.stack_size(before)


def test_long_lineage_is_destroyed_without_recursion() -> None:
    def f(x: Tensor) -> Tensor:
        first = x * 2
        y = first
        for _ in range(50_000):
            y = y + 1.0
        assert _C.testing.live_operations() > 1, "y has a long lineage"
        del y  # all of it at once
        return first

    x = torch.arange(256.0)
    in_a_small_thread(lambda: assert_bitwise_equal(rematfn.remat(f)(x), x * 2))
    assert _C.testing.live_operations() == 0
