# SPDX-License-Identifier: Apache-2.0
"""More candidates than are looked at one by one: Note [Victims are chosen a batch at a time]."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from helpers import assert_bitwise_equal
from torch import Tensor

import rematfn
from rematfn.testing import MemoryTimeline


def deep(x: Tensor) -> Tensor:
    for _ in range(300):
        x = x.sin().cos()
    return x.square().sum()


@pytest.mark.parametrize(
    "f",
    [deep, torch.func.grad(deep), torch.func.vmap(torch.func.grad(deep))],
    ids=["plain", "grad", "vmap(grad)"],
)
def test_so_many_candidates_that_victims_are_chosen_a_batch_at_a_time(
    f: Callable[[Tensor], Tensor],
) -> None:
    """See Note [Victims are chosen a batch at a time]."""
    x = torch.linspace(-1, 1, 512).view(4, 128).requires_grad_()
    peak = rematfn.record(f, x).peak_bytes
    assert peak > 2 * 128 * x.nbytes  # so more than 128 are resident in half of it
    g = rematfn.remat(f, peak // 2, policy=rematfn.policies.ON())
    with MemoryTimeline() as timeline:
        result = g(x)
    assert_bitwise_equal(result, f(x))
    assert rematfn.stats(g).evictions > 100
    assert rematfn.stats(g).peak_bytes <= peak // 2
    assert timeline.peak <= peak // 2 + result.nbytes
