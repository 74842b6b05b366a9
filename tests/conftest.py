# SPDX-License-Identifier: Apache-2.0
"""What every test starts from, and what none may leave behind."""

import gc
import signal
import warnings
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

pytest.register_assert_rewrite("helpers")

with warnings.catch_warnings():
    # torch imports this on the first forward-mode derivative, and warns about its own code then.
    warnings.simplefilter("ignore", DeprecationWarning)
    warnings.simplefilter("ignore", FutureWarning)  # the same, from 2.15 on
    import torch._decomp.decompositions_for_jvp

import programs_storage  # noqa: E402, F401  (fills the zoo)
from helpers import assert_nothing_left, remains  # noqa: E402
from programs import ZOO, Program  # noqa: E402

import rematfn  # noqa: E402
from rematfn import _C  # noqa: E402

# What a seed is to do on a device that is not in use waits for it, with the stack of the call as
# text: to write that took a tenth of the time of all tests.
for module in (torch.cuda, torch.xpu, torch.mtia):
    module.traceback = SimpleNamespace(format_stack=list)


@pytest.fixture(autouse=True, scope="session")
def interrupts_are_served() -> None:
    """A process that a script started in the background ignores Ctrl-C, and Python with it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True, scope="module")
def collections_are_quick() -> None:
    """What is there before a module's tests is not looked through by each collection of theirs."""
    gc.collect()
    gc.freeze()


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
    rematfn.testing.check()
    assert_nothing_left(before)


@pytest.fixture
def costs_at_random() -> Iterator[None]:
    """What may be moved or dropped is one or the other at random, and what may be packed is."""
    _C.testing.draw_link_costs(True)
    _C.testing.pack_everything(True)
    yield
    _C.testing.draw_link_costs(False)
    _C.testing.pack_everything(False)


@pytest.fixture(params=ZOO, ids=lambda program: program.name)
def program(request: pytest.FixtureRequest) -> Program:
    """Every program of the zoo."""
    return request.param


@pytest.fixture(params=[p for p in ZOO if p.differentiable], ids=lambda program: program.name)
def differentiable(request: pytest.FixtureRequest) -> Program:
    """Every program of the zoo that has gradients."""
    return request.param


@pytest.fixture
def nothing_compiled() -> Iterator[None]:
    """Have torch's compiler know of nothing before a test, and forget what it compiled."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
