# SPDX-License-Identifier: Apache-2.0
"""Levels nest, keep their budgets together, and belong to their thread."""

from functools import partial
from typing import Any

import pytest
import torch
from helpers import (
    EVERYTHING,
    UNIT,
    Transform,
    assert_bitwise_equal,
    assert_nothing_keyed,
    inner,
    kept,
    leaf,
)
from torch import Tensor

import rematfn
from rematfn.testing import MemoryTimeline

remat = rematfn.remat


def nest(x: Tensor, first: Transform, second: Transform) -> Tensor:
    """Two inner levels, each read again by the outer one after it has returned."""
    y = first(inner)(x)
    z = second(inner)(y * 0.5)
    return ((y + z).cos() * y).sum()


BUDGETS = {"uncapped": remat, "everything": EVERYTHING}
BUDGETS |= {f"{n}-units": partial(remat, budget=n * UNIT + 64) for n in (6, 9, 16)}


@pytest.mark.parametrize("around", BUDGETS.values(), ids=BUDGETS.keys())
@pytest.mark.parametrize("within", BUDGETS.values(), ids=BUDGETS.keys())
def test_a_level_within_a_level(around: Transform, within: Transform) -> None:
    within_kept, made = kept(within)
    x, y, z, one = leaf(), leaf().detach(), leaf(), torch.ones(())
    # The sum keeps the argument out: what the backward makes of arguments alone is not governed.
    outer = around(lambda x: nest(x + y, within_kept, within_kept))
    with MemoryTimeline() as timeline:
        loss = outer(x)
        loss.backward(one)
        del loss
    nest(z + y, lambda f: f, lambda f: f).backward()
    assert_bitwise_equal(x.grad, z.grad)
    assert_nothing_keyed(x)
    for stats in map(rematfn.stats, (*made, outer)):
        assert stats.budget is None or stats.peak_bytes <= stats.budget
    budget = rematfn.stats(outer).budget
    assert budget is None or timeline.peak_excluding_survivors <= budget
    if budget is not None and budget < 16 * UNIT and within is remat:
        assert sum(rematfn.stats(g).evictions for g in made) > 0, "the outer level made them evict"


@pytest.mark.parametrize("around", BUDGETS.values(), ids=BUDGETS.keys())
@pytest.mark.parametrize("within", BUDGETS.values(), ids=BUDGETS.keys())
def test_a_gradient_between_two_levels(around: Transform, within: Transform) -> None:
    """remat(grad(remat(f))): the allocator counts for the inner level alone while it works."""
    x, one = leaf().detach(), torch.ones(())
    windows: list[MemoryTimeline] = []

    def f(x: Tensor, g: Any) -> Tensor:
        y = (x.sin() * x).exp()
        if windows:
            with windows[-1]:
                dx = torch.func.vjp(g, x)[1](one)[0]
        else:
            dx = torch.func.vjp(g, x)[1](one)[0]
        return (dx.cos() * y).exp() * dx

    inside, outer = within(lambda x: inner(x * 0.5).sum()), around(f)
    assert_bitwise_equal(outer(x, inside), f(x, lambda x: inner(x * 0.5).sum()))
    for stats in map(rematfn.stats, (inside, outer)):
        assert stats.budget is None or stats.peak_bytes <= stats.budget

    # The profiler cannot look at two windows at once: the same again, once for each level.
    windows.append(MemoryTimeline())
    around(f)(x, inside)
    budget = rematfn.stats(inside).budget
    if budget is not None:
        assert windows[0].peak <= budget + UNIT, "the gradient is the outer level's"
    windows.clear()
    with MemoryTimeline() as timeline:
        around(f)(x, inside)
    budget = rematfn.stats(outer).budget
    if budget is not None:
        assert timeline.peak_excluding_survivors <= budget


def test_outputs_of_an_inner_level_can_be_evicted_by_the_outer() -> None:
    """Twelve units leave the inner levels; the outer one has room for five."""
    factors = torch.arange(12.0)  # Python numbers would be tensors of their own
    made: list[Any] = []

    def f(x: Tensor, transform: Transform) -> Tensor:
        made.extend(transform(lambda x, k=k: (x * k).sin()) for k in factors)
        found = [g(x) for g in made[-12:]]
        return torch.stack([y.sum() for y in reversed(found)])

    x = leaf().detach()
    made.append(remat(lambda x: f(x, remat), budget=5 * UNIT))
    with MemoryTimeline() as timeline:
        out = made[0](x)
    assert timeline.peak <= 5 * UNIT
    assert rematfn.stats(made[0]).peak_bytes <= 5 * UNIT
    counted = [rematfn.stats(g) for g in made]
    assert sum(s.evictions for s in counted) >= 7, "whichever level an eviction is noted by"
    assert sum(s.replays for s in counted) >= 7
    made.clear()
    assert_bitwise_equal(out, f(x, lambda f: f))
