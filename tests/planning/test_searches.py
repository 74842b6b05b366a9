# SPDX-License-Identifier: Apache-2.0
"""The thread that looks for better plans: it is not in the way of a process that ends or forks."""

import functools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from helpers import EXHAUSTIVE
from processes import Ended, environment, forked, in_a_process, once
from programs_traced import waves

import rematfn
from rematfn import _C

# Two calls, so that a search runs when the third line is reached; it would go on for minutes.
BEGUN = """
import os, signal, sys, threading, time, torch, rematfn
from rematfn import _C
def loss(params, x):
    for w in params:
        x = torch.nn.functional.gelu(x @ w)
    return x.square().mean()
params = [torch.randn(64, 64) / 8 for _ in range(24)]
x = torch.randn(128, 64)
g = torch.func.grad(rematfn.remat(loss, 0.2, policy=rematfn.policies.Guided(search=1 << 40)))
expected = torch.func.grad(loss)(params, x)
def call():
    assert all(map(torch.equal, g(params, x), expected))
call()
call()
assert _C.testing.is_searching()
"""

FORKED = """
pid = os.fork()
for _ in range(3):
    call()
assert _C.testing.is_searching()
if pid == 0:
    os._exit(0)
_, status = os.waitpid(pid, 0)
assert status == 0, status
"""

DEFAULT = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"

ENDS = {
    "the-end": ("", 0),
    "ctrl-c": ("signal.raise_signal(signal.SIGINT)", -signal.SIGINT),
    "at-exit": ("import atexit; atexit.register(call)", 0),
    "fork": (FORKED, 0),
    "multiprocessing": (
        "import multiprocessing\n"
        "p = multiprocessing.get_context('fork').Process(target=call)\n"
        "p.start(); p.join(); sys.exit(p.exitcode)",
        0,
    ),
}


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ended]:
    jobs = {end: (DEFAULT + BEGUN + script, "") for end, (script, _) in ENDS.items()}
    return once(tmp_path_factory, "searches", lambda folder: forked(folder, jobs, ()))


@pytest.mark.forking
@pytest.mark.parametrize("end", ENDS)
def test_a_process_ends_as_it_would_without_a_search(
    end: str, ended: dict[str, Ended], tmp_path: Path
) -> None:
    script, code = ENDS[end]
    if ended[end].code != code:  # what torch does at its exit may hide an interrupt
        none = BEGUN.replace("1 << 40", "0").replace("assert _C.testing.is_searching()", "")
        code = forked(tmp_path, {"it": (DEFAULT + none + script, "")}, ())["it"].code
    assert ended[end].code == code, ended[end].err
    assert "terminate called" not in ended[end].err


def test_ctrl_c_reaches_the_program_and_not_the_search() -> None:
    waits = "try:\n    print('ready', flush=True)\n    time.sleep(60)\nexcept KeyboardInterrupt:\n"
    script = DEFAULT + BEGUN + waits + "    call()\n    sys.exit(7)"
    command, pipe = [sys.executable, "-W", "ignore", "-c", script], subprocess.PIPE
    with subprocess.Popen(
        command, env=environment(), text=True, stdout=pipe, stderr=pipe
    ) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "ready\n"
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=60)
        finally:
            process.kill()  # what is left over is a warning, and so an error, of another test
    assert process.returncode == 7, out + err


def test_a_long_simulation_is_stopped_in_its_middle(tmp_path: Path) -> None:
    """One plan of this program takes seconds to simulate, and the exit is not to wait for it."""
    long = """
import time, torch, rematfn
from rematfn import _C
core = _C.Trace()
values = [core.add_value(1, True) for _ in range(300_000)]
for i, v in enumerate(values):
    reads = [(values[i - 1], False)] if i else []
    reads += [(values[-1 - i], False)] if i > 150_000 else []
    core.add_call("a", 1e-5, 0.0, 1, 0, True, False, i >= 150_000, reads, [(v, -1)])
program = _C.Program(core)
program.search(30_000, 1 << 40, 1 << 40)
program.follow()
time.sleep(0.5)
assert _C.testing.is_searching()
start = time.process_time()  # the thread gives way to others, and may wait for its turn
_C.end_searches()
assert time.process_time() - start < 2, time.process_time() - start
assert not _C.testing.is_searching()
program.follow()
assert not _C.testing.is_searching()
"""
    ended = forked(tmp_path, {"it": (long, "")})["it"]
    assert ended.code == 0, ended.out + ended.err


# --- within a process -----------------------------------------------------------------------------

X = torch.linspace(-1, 1, 4096)


@pytest.mark.parametrize("fraction", [0.3, 0.1])
def test_a_search_is_as_long_as_it_is_worth(fraction: float) -> None:
    """Where little is replayed, little can be gained."""
    trace = rematfn.record(torch.func.grad(waves), X)
    program = _C.Program(trace._core)
    program.search(int(fraction * trace.peak_bytes), 200_000, 10**9)
    program.finish()
    half = 2 * program.overhead() / trace.cost
    assert 0.05 < half < 0.7
    assert 4 * half <= _C.testing.simulated(program) / 200_000 <= 5 * half


def test_programs_take_turns() -> None:
    """One that needs long does not keep the others from a plan that is better than their first."""
    programs = []
    for steps in (24, 25, 26):
        trace = rematfn.record(torch.func.grad(functools.partial(waves, steps=steps)), X)
        programs.append(_C.Program(trace._core))
        programs[-1].search(int(0.12 * trace.peak_bytes), 10**9, 10**9)
        programs[-1].follow()
    firsts = [program.overhead() for program in programs]
    end = time.monotonic() + 100
    while any(program.overhead() >= first for program, first in zip(programs, firsts, strict=True)):
        assert time.monotonic() < end
        time.sleep(0.01)
    assert not any(program.is_settled() for program in programs)


@in_a_process
def test_a_child_goes_on_where_its_parent_was() -> None:
    """Whatever the thread was at, which is not in the child."""
    trace = rematfn.record(torch.func.grad(waves), X)

    def begun() -> _C.Program:
        program = _C.Program(trace._core)
        program.search(100_000, 50_000, 100_000)
        return program

    alone = begun()
    alone.finish()
    for _ in range(10 if EXHAUSTIVE else 4):
        program = begun()
        program.follow()
        child = os.fork()
        program.finish()
        same = program.overhead() == alone.overhead()
        if child == 0:
            os._exit(0 if same else 9)
        assert os.waitpid(child, 0)[1] == 0
        assert same
