# SPDX-License-Identifier: Apache-2.0
"""Operators that race where they are split over threads: kept there, and replayed everywhere else.

Those that race on accelerators alone: tests/device/test_operators_on_a_device.py.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from helpers import assert_bitwise_equal
from torch import Tensor

import rematfn
from rematfn import _C

MANY = 1 << 15  # from which on a CPU's loop is split
Write = Callable[[Tensor, Tensor], Tensor]


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def is_kept(write: Write, count: int) -> bool:
    """Return whether what is written cannot be evicted."""
    index = torch.arange(MANY) % 50

    def f(index: Tensor) -> Any:
        y = write(torch.zeros(50), index)
        evicted = _C.testing.evict(y)
        return y * 2, evicted

    with threads(count):
        got, evicted = rematfn.remat(f, "1GiB")(index)
        if count == 1 or evicted:
            assert_bitwise_equal(got, write(torch.zeros(50), index) * 2)
    return not evicted


def values(index: Tensor) -> Tensor:
    return torch.linspace(0, 1, len(index))


RACING: dict[str, Write] = {
    "index_put_": lambda y, i: y.index_put_((i,), values(i)),
    "index_put_, summed": lambda y, i: y.index_put_((i,), values(i), accumulate=True),
    "index_put": lambda y, i: y.index_put((i,), values(i)),
    "_unsafe_index_put": lambda y, i: torch.ops.aten._unsafe_index_put(y, [i], values(i), True),
    "a row for each": lambda y, i: y.view(5, 10).index_put_((i[:3300] % 5,), torch.ones(10)),
    "put_": lambda y, i: y.put_(i, values(i)),
    "put_, summed": lambda y, i: y.put_(i, values(i), accumulate=True),
    "index_copy_": lambda y, i: y.index_copy_(0, i, values(i)),
    "index_copy": lambda y, i: y.index_copy(0, i, values(i)),
    "max_unpool2d": lambda y, i: torch.ops.aten.max_unpool2d(
        values(i).view(1, -1, 64), i.view(1, -1, 64), [5, 10]
    ),
    "max_unpool3d": lambda y, i: torch.ops.aten.max_unpool3d(
        values(i).view(1, -1, 8, 8), i.view(1, -1, 8, 8), [1, 5, 10], [1, 1, 1], [0, 0, 0]
    ),
}


@pytest.mark.parametrize("write", RACING.values(), ids=RACING.keys())
def test_what_may_race_is_kept(write: Write) -> None:
    assert is_kept(write, 2)
    assert not is_kept(write, 1)


RESTING: dict[str, Write] = {
    "a mask": lambda y, i: torch.zeros(2 * MANY).index_put_(
        (torch.arange(2 * MANY) % 2 == 0,), torch.ones(())
    ),
    "sums of doubles": lambda y, i: y.double().index_put_(
        (i,), values(i).double(), accumulate=True
    ),
    "one index": lambda y, i: y.view(5, 10).index_copy_(0, i[:1], torch.ones(1, 10)),
    "few": lambda y, i: y.index_put_((i[:99],), values(i[:99])),
    "another operator": lambda y, i: y.index_add_(0, i, values(i)),
}


@pytest.mark.parametrize("write", RESTING.values(), ids=RESTING.keys())
def test_what_cannot_race_is_replayed(write: Write) -> None:
    assert not is_kept(write, 2)
