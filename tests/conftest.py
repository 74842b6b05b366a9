# SPDX-License-Identifier: Apache-2.0
"""What every test starts from, and what none may leave behind."""

from __future__ import annotations

import gc
import signal
import warnings
from collections.abc import Iterator

import pytest
import torch

pytest.register_assert_rewrite("helpers")

with warnings.catch_warnings():
    # torch imports this on the first forward-mode derivative, and warns about its own code then.
    warnings.simplefilter("ignore", DeprecationWarning)
    import torch._decomp.decompositions_for_jvp

import programs_storage  # noqa: E402, F401  (fills the zoo)
from helpers import MODES, Mode  # noqa: E402
from programs import ZOO, Program  # noqa: E402

import rematfn  # noqa: E402
from rematfn import _C  # noqa: E402


def remains() -> dict[str, int]:
    """Count what is alive, cycles through autograd graphs and tracebacks aside."""
    if _C.live_levels() or _C.live_operations():
        # autograd's queue holds on to a backward that failed until the thread runs another one.
        torch.ones((), requires_grad=True).sin().backward()
        gc.collect()
    return {"levels": _C.live_levels(), "operations": _C.live_operations()}


@pytest.fixture(autouse=True, scope="session")
def interrupts_are_served() -> None:
    """A process that a script started in the background ignores Ctrl-C, and Python with it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    """Check the tables, and that each test leaves no level and no lineage of its own.

    A failed test's traceback keeps its frames, and with them its lineage, until the next failure:
    hence the comparison with what was there before.
    """
    # One thread: reductions split over threads would be equal too, but tiny programs run slower.
    torch.set_num_threads(1)
    torch.manual_seed(0)
    before = remains()
    yield
    rematfn.check()
    assert _C.stack_depth() == 0, "a level was left on the stack"
    after = remains()
    assert all(after[k] <= before[k] for k in after), f"left behind: {after}, before: {before}"


@pytest.fixture(params=MODES, ids=lambda mode: mode.name)
def mode(request: pytest.FixtureRequest) -> Mode:
    """The three ways to transform: plain, within the smallest budget, evicting everything."""
    return request.param


@pytest.fixture(params=ZOO, ids=lambda program: program.name)
def program(request: pytest.FixtureRequest) -> Program:
    """Every program of the zoo."""
    return request.param


@pytest.fixture(params=[p for p in ZOO if p.differentiable], ids=lambda program: program.name)
def differentiable(request: pytest.FixtureRequest) -> Program:
    """Every program of the zoo that has gradients."""
    return request.param
