# SPDX-License-Identifier: Apache-2.0
"""What a call would have held without a budget, counted while it runs within one."""

import functools
from collections.abc import Callable
from typing import Any

from helpers import EVERYTHING, NO_LIMIT, kept, smallest_budgets, world
from programs import Program

import rematfn
from rematfn._transform.transformed import transformed_of
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
    if any(overwrites(record) for record in records_of(program, UNCAPPED)):  # copies are ours
        assert all(peak >= nbytes for peak, nbytes in zip(peaks, expected, strict=True))
    else:
        assert peaks == expected
    budgets = iter(smallest_budgets(run))
    tight = traced(run, lambda f: rematfn.remat(f, next(budgets), policy=ON()))
    assert [rematfn.stats(g).unconstrained_bytes for g in tight] == expected
    everything = traced(run, functools.partial(EVERYTHING, budget=NO_LIMIT))
    assert [rematfn.stats(g).unconstrained_bytes for g in everything] == expected
    assert any(rematfn.stats(g).evictions for g in everything) or not any(expected)


def overwrites(record: Any) -> bool:
    """Return whether a call overwrites what was not made inside."""
    counted = [counted for _, counted in record.values()]
    calls = [data for kind, data in record.events() if kind == "call"]
    return any(written and not counted[value] for *_, reads, _ in calls for value, written in reads)


def records_of(program: Program, transform: Any) -> list[Any]:
    """Return the records of first calls, forward and backward."""
    found = traced(lambda keep: world(program, keep), transform)
    keys = [key for g in found for key in transformed_of(g, "test")[0]._history._keys.values()]
    recorded = [call for key in keys for _, call in key.pending]
    return [t for call in recorded if (t := call.report.take_trace()) is not None]
