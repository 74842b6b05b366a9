# SPDX-License-Identifier: Apache-2.0
"""The budget is a promise: counted at the allocator, the level's bytes never exceed it.

So it is for the backward: what its formulas make without reading a level tensor is included.
"""

import functools

import torch
from helpers import Transform, assert_bitwise_equal, kept, scalar, smallest_budgets, untransformed
from programs import Case, Program
from torch import Tensor

import rematfn
from rematfn.testing import MemoryTimeline


def step(case: Case, transform: Transform, one: Tensor) -> list[Tensor | None]:
    """Run forward and backward so that only the results survive, all else being the level's."""
    g = transform(lambda *args: scalar(case.f(*args)))
    torch.manual_seed(7)
    loss = g(*case.args)
    loss.backward(one)
    return [loss.detach(), *(t.grad for t in case.leaves())]


def measured(program: Program, transform: Transform) -> tuple[MemoryTimeline, list[Tensor | None]]:
    case, one = program.make(), torch.ones(())
    with MemoryTimeline() as timeline:
        results = step(case, transform, one)
    return timeline, results


def smallest(program: Program) -> int:
    (least,) = smallest_budgets(lambda transform: step(program.make(), transform, torch.ones(())))
    return least


def test_the_allocator_never_sees_more_than_the_budget(differentiable: Program) -> None:
    """At the smallest budget that would do, and above it."""
    expected = step(differentiable.make(), untransformed, torch.ones(()))
    least = smallest(differentiable)
    for times in (1.0, 1.3, 2.0, 4.0):
        budget = int(times * least)
        capped, made = kept(functools.partial(rematfn.remat, budget=budget))
        timeline, results = measured(differentiable, capped)
        assert_bitwise_equal(results, expected)
        assert rematfn.stats(made[0]).peak_bytes <= budget
        storages = {t.untyped_storage().data_ptr(): t for t in results if t is not None}
        left = sum(t.untyped_storage().nbytes() for t in storages.values())
        assert timeline.survivors == left, "something besides the results outlived the step"
        assert timeline.peak_excluding_survivors <= budget, f"{times} x {least}"
