# SPDX-License-Identifier: Apache-2.0
"""Programs nobody thought of: operators, views, writes and drops in any order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from helpers import EVERY, PLAIN, TIGHT, Mode, Transform, assert_same_as_eager, untransformed
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from steps import NEW, VIEWS, WRITES
from torch import Tensor

import rematfn

Step = tuple[str, int, int]


def obey(pool: list[Tensor], step: Step) -> None:
    """Do one step on a pool of tensors; its numbers choose among them."""
    name, i, j = step
    a, b = pool[i % len(pool)], pool[j % len(pool)]
    if name == "drop":
        if len(pool) > 2:
            del pool[i % len(pool)]
    elif name == "swap":
        pool.append(pool.pop(i % len(pool)))
    elif name in WRITES:
        WRITES[name](a, b)
    else:
        made = (NEW | VIEWS)[name](a, b)
        # Numbers stay small, so that a wrong one is not lost among infinities.
        pool.append(made if name in VIEWS else made.clamp(-2, 2) if j % 2 else made)


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
    max_examples=150,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
modes = st.sampled_from([PLAIN, TIGHT, EVERY])


@known
@given(steps=steps_of(*NEW, *VIEWS, *WRITES, *WRITES, "drop", "swap"), mode=modes)
def test_any_program_of_reads_and_writes_is_bitwise_eager(steps: list[Step], mode: Mode) -> None:
    assert_same_as_eager(program_of(steps, differentiate=False), mode)


@known
@given(steps=steps_of(*NEW, *NEW, *VIEWS, *WRITES, "drop", "swap"), mode=modes)
def test_any_differentiable_program_is_bitwise_eager(steps: list[Step], mode: Mode) -> None:
    run = program_of(steps, differentiate=True)
    try:
        run(untransformed)
    except RuntimeError:  # autograd refuses some writes
        assume(False)
    assert_same_as_eager(run, mode)
