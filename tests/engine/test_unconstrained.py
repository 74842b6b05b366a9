# SPDX-License-Identifier: Apache-2.0
"""What a call would have held without a budget, counted while it runs within one."""

import functools
from collections.abc import Callable
from typing import Any

from helpers import (
    EVERYTHING,
    NO_LIMIT,
    difference,
    kept,
    smallest_budgets,
    untransformed,
    world,
)
from programs import Program

import rematfn
from rematfn.policies import ON

UNCAPPED = functools.partial(rematfn.remat, budget=1.0, policy=ON())  # a first call: has no cap


def traced(run: Callable[[Callable[..., Any]], Any], transform: Any) -> list[Any]:
    """Return what `run` transforms, after it."""
    keep, made = kept(transform)
    run(keep)
    return made


def test_the_peak_that_a_capped_call_would_have_is_that_of_an_uncapped_one(
    program: Program,
) -> None:
    """To the byte: in a tight budget, with everything evicted, and forward and backward."""

    def run(transform: Callable[..., Any]) -> Any:
        return world(program, transform)

    free = [rematfn.stats(g) for g in traced(run, UNCAPPED)]
    expected = [stats.unconstrained_bytes for stats in free]
    peaks = [stats.peak_bytes for stats in free]
    assert all(peak >= nbytes for peak, nbytes in zip(peaks, expected, strict=True))
    assert peaks == expected or overwrites(program)  # what it overwrites is copied, by us
    budgets = iter(smallest_budgets(run))
    tight = traced(run, lambda f: rematfn.remat(f, next(budgets), policy=ON()))
    assert [rematfn.stats(g).unconstrained_bytes for g in tight] == expected
    everything = traced(run, functools.partial(EVERYTHING, budget=NO_LIMIT))
    assert [rematfn.stats(g).unconstrained_bytes for g in everything] == expected
    assert any(rematfn.stats(g).evictions for g in everything) or not any(expected)


def overwrites(program: Program) -> bool:
    """Return whether the program writes to what was not made inside."""
    seen = world(program, untransformed)
    made = program.make()
    return any(map(difference, [*seen["arguments"], *seen["held"]], [*made.args, *made.held]))
