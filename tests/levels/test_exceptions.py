# SPDX-License-Identifier: Apache-2.0
"""An exception inside a level leaves no level, no lineage and no bytes behind."""

import gc
import random
import signal
from collections.abc import Callable

import pytest
import torch
from helpers import (
    EVERYTHING,
    UNIT,
    Transform,
    assert_bitwise_equal,
    assert_nothing_keyed,
    inner,
    leaf,
)
from torch import Tensor

import rematfn
from rematfn import _C
from rematfn.testing import MemoryTimeline

remat = rematfn.remat


class OwnError(Exception):
    """A user's exception."""


def raise_own() -> None:
    raise OwnError


def interrupt() -> None:
    signal.raise_signal(signal.SIGINT)  # as Ctrl-C does: Python raises at its next instruction
    for _ in range(1000):
        pass


def run_out_of_memory() -> None:
    torch.empty(1 << 60)


def ask_too_much() -> None:
    remat(lambda: torch.ones(UNIT).sin(), budget=UNIT)()


ENDS: dict[str, tuple[Callable[[], None], type[BaseException]]] = {
    "user": (raise_own, OwnError),
    "interrupt": (interrupt, KeyboardInterrupt),
    "out-of-memory": (run_out_of_memory, RuntimeError),
    "budget": (ask_too_much, rematfn.BudgetError),
}


@pytest.mark.parametrize(("end", "error"), ENDS.values(), ids=ENDS.keys())
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("mode", [remat, EVERYTHING], ids=["plain", "everything"])
def test_an_exception_leaves_nothing_behind(
    end: Callable[[], None], error: type[BaseException], depth: int, mode: Transform
) -> None:
    x, state = leaf(), torch.zeros(UNIT // 4)

    def f(x: Tensor) -> Tensor:
        y = inner(x)
        with torch.no_grad():
            state.add_(y)
        end()
        return y

    g = f
    for _ in range(depth):
        g = mode(lambda x, g=g: g(x.sin()) * 2)

    def call() -> None:
        with pytest.raises(error) as caught:
            g(x)
        assert _C.stack_depth() == 0
        del caught

    call()  # whatever torch caches is there now
    gc.collect()
    with MemoryTimeline() as timeline:
        call()
        gc.collect()  # the traceback and its frames are a cycle
    assert timeline.final == 0, "memory is back where it was"
    assert_nothing_keyed([x, state])
    assert _C.testing.live_operations() == 0
    expected = x.detach()
    for _ in range(depth):
        expected = expected.sin()
    assert_bitwise_equal(state, 0.0 + inner(expected) + inner(expected))
    assert_bitwise_equal(mode(inner)(x), inner(x))  # and the next call is sound


def test_an_interrupt_between_any_two_statements_leaves_a_function_that_runs() -> None:
    def stop(*_: object) -> None:
        if armed[0]:
            raise OwnError

    armed, stopped = [False], 0
    dice = random.Random(0)
    before = signal.signal(signal.SIGALRM, stop)
    try:
        for i in range(1000):
            if i % 20 == 0:  # its first calls are those that are noted anew
                g = rematfn.remat(lambda x: x.sin().cos().sum(), "1MiB")
            try:
                try:
                    armed[0] = True
                    signal.setitimer(signal.ITIMER_REAL, dice.uniform(1e-6, 3e-4))
                    g(torch.ones(8))
                    armed[0] = False
                except OwnError:
                    armed[0] = False
                    stopped += 1
            except OwnError:  # one more, while that one is served
                armed[0] = False
            signal.setitimer(signal.ITIMER_REAL, 0)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert stopped > 100
    assert torch.equal(g(torch.ones(8)), torch.ones(8).sin().cos().sum())
