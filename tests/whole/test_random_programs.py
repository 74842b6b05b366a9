# SPDX-License-Identifier: Apache-2.0
"""Programs nobody thought of: operators, views, writes and drops in any order."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from helpers import (
    EVERY,
    EXHAUSTIVE,
    PLAIN,
    TIGHT,
    Mode,
    Run,
    Transform,
    assert_bitwise_equal,
    assert_same_as_eager,
    untransformed,
)
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from steps import NEW, READS, VIEWS, WRITES, Step, obey
from torch import Tensor

import rematfn


def program_of(steps: list[Step], differentiate: bool) -> Callable[[Transform], Any]:
    def f(x: Tensor, y: Tensor) -> list[Tensor]:
        pool = [x.exp(), y] if not differentiate else [x.exp(), y.cos()]
        for step in steps:
            obey(pool, step)
            rematfn.testing.check()
        return pool

    def run(transform: Transform) -> Any:
        torch.manual_seed(5)
        x = torch.linspace(-1, 1, 6).view(2, 3)
        y = torch.linspace(0, 1, 4)
        if not differentiate:
            return transform(f)(x, y), x, y, torch.rand(2)
        x.requires_grad_()
        y.requires_grad_()
        pool = transform(f)(x, y)
        loss = sum((t * t).sum() for t in pool)
        grads = torch.autograd.grad(loss, [x, y], allow_unused=True, create_graph=True)
        again = sum(g.sin().sum() for g in grads if g is not None)
        seconds: Any = None
        if isinstance(again, Tensor) and again.requires_grad:
            seconds = torch.autograd.grad(again, [x, y], allow_unused=True)
        return [t.detach() for t in pool], [g if g is None else g.detach() for g in grads], seconds

    return run


def steps_of(*names: str) -> st.SearchStrategy[list[Step]]:
    number = st.integers(0, 7)
    return st.lists(st.tuples(st.sampled_from(names), number, number), min_size=3, max_size=25)


# The fixture of conftest checks for leaks once, after all examples of a test.
known = settings(
    max_examples=300 if EXHAUSTIVE else 100,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
DISK = rematfn.Disk(verify=True)
ALL = functools.partial(rematfn.offload, to=DISK, policy=rematfn.testing.EvictEverything())
EITHER = functools.partial(
    rematfn.remat, offload=DISK, policy=rematfn.testing.EvictEverything(), verify=True
)
WITH_DISK: dict[str, Transform] = {
    "not in use": functools.partial(rematfn.offload, to=DISK),
    "tight": functools.partial(rematfn.offload, budget=150, to=DISK),
    "everything": ALL,
    "move or drop": EITHER,
    "tight hybrid": functools.partial(rematfn.remat, budget=150, offload=DISK),
    "moves inside drops": lambda f: rematfn.remat(
        lambda *args: ALL(f)(*args), policy=rematfn.testing.EvictEverything()
    ),
    "drops inside moves": lambda f: ALL(
        lambda *args: rematfn.remat(f, policy=rematfn.testing.EvictEverything())(*args)
    ),
    "either inside moves": lambda f: ALL(lambda *args: EITHER(f)(*args)),
}


class Moved(Mode):
    """Values go to a disk, by one of the ways above."""

    def __call__(self, run: Run) -> Any:
        return run(WITH_DISK[self.name])


modes = st.sampled_from([PLAIN, TIGHT, EVERY, *map(Moved, WITH_DISK)])


@pytest.fixture(autouse=True)
def everything_comes_back(costs_at_random: None) -> Iterator[None]:
    yield
    assert DISK.held_bytes == 0
    assert DISK.bytes_in > 0


@known
@given(
    steps=steps_of(*NEW, *NEW, *VIEWS, *WRITES, *WRITES, *READS, "drop", "swap"),
    differentiate=st.booleans(),
    mode=modes,
)
def test_any_program_is_bitwise_eager(steps: list[Step], differentiate: bool, mode: Mode) -> None:
    run = program_of(steps, differentiate)
    try:
        run(untransformed)
    except RuntimeError:  # autograd refuses some writes
        assume(False)
    try:
        assert_same_as_eager(run, mode)
    except rematfn.BudgetError:  # a guess of ours for moves, a finding of `mode` for the others
        if not isinstance(mode, Moved):
            raise
        assume(False)


WAYS = [
    rematfn.remat,
    functools.partial(rematfn.remat, offload=DISK),
    functools.partial(rematfn.offload, to=DISK),
]


@known
@given(
    steps=steps_of(*NEW, *NEW, *VIEWS, *WRITES, *READS, "drop", "swap"),
    differentiate=st.booleans(),
    budget=st.integers(100, 400),
    way=st.sampled_from(WAYS),
)
def test_any_program_is_bitwise_eager_when_it_is_guided(
    steps: list[Step], differentiate: bool, budget: int, way: Callable[..., Transform]
) -> None:
    run = program_of(steps, differentiate)
    try:
        expected = run(untransformed)
    except RuntimeError:
        assume(False)
    made: list[Any] = []

    def transform(f: Transform) -> Transform:
        """The same function each time, whose calls are alike from the second on."""
        if not made:
            made.append(way(f, budget))
        return made[0]

    for _ in range(4):
        try:
            found = run(transform)
        except rematfn.BudgetError:
            assume(False)
        assert_bitwise_equal(found, expected)
        rematfn.testing.check()
