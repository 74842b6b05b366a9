# SPDX-License-Identifier: Apache-2.0
"""Scripts that move values to a disk, run to their exit codes: nothing hangs, nothing is left.

The disk is so slow that transfers are under way wherever a script ends.
"""

from pathlib import Path

import pytest
from processes import Ended, forked, once

PRELUDE = """
import atexit, gc, os, signal, sys, threading, time
import torch, rematfn
signal.signal(signal.SIGINT, signal.default_int_handler)
torch.set_num_threads(1)
disk = rematfn.Disk(sys.argv[1], bandwidth=30e6)

def f(x):
    for _ in range(12):
        x = (x * 1.01).sin()
    return x.square().sum()

X = torch.linspace(-1, 1, 1 << 18).requires_grad_()
Z = X.detach().clone().requires_grad_()
f(Z).backward()
g = rematfn.offload(f, to=disk)

def queued():
    return disk.open().statistics()["queued_bytes"]

def step(g=g):
    X.grad = None
    g(X).backward()
    assert torch.equal(X.grad, Z.grad)
    rematfn.testing.check()
"""
WRITING = "loss = g(X)\nassert queued() > 0\n"

# What each ends with: the exit code, and the last line that it says.
SCRIPTS: dict[str, tuple[str, int, str]] = {
    "ends as it writes": (WRITING, 0, ""),
    "drops the graph and ends": (WRITING + "del loss", 0, ""),
    "ends as it reads": (
        """
def ends(grad): sys.exit(3)
def f(x):
    y = x.sin()
    y.register_hook(ends)
    for _ in range(12): y = (y * 1.01).sin()
    return y.square().sum()
rematfn.offload(f, to=disk)(X).backward()
""",
        3,
        "",
    ),
    "exits in f": (
        "def h(x):\n    y = f(x)\n    assert queued() > 0\n    sys.exit(4)\n"
        "rematfn.offload(h, to=disk)(X)",
        4,
        "",
    ),
    "is killed": (WRITING + "os.kill(os.getpid(), signal.SIGKILL)", -9, ""),
    **{
        f"is interrupted after {delay} s": (
            f"threading.Timer({delay}, os.kill, (os.getpid(), signal.SIGINT)).start()\n"
            "while True: step()",
            -2,
            "KeyboardInterrupt",
        )
        for delay in (0.1, 0.4)
    },
    "calls it as the program ends": ("atexit.register(step)\n" + WRITING, 0, ""),
    "a daemon in f": (
        """
inside = threading.Event()
def waits(x):
    y = f(x)
    inside.set()
    time.sleep(3600)
    return y
threading.Thread(target=rematfn.offload(waits, to=disk), args=(X,), daemon=True).start()
inside.wait()
""",
        0,
        "",
    ),
    "becomes another program": (
        WRITING + "os.execv(sys.executable, [sys.executable, '-c', 'raise SystemExit(12)'])",
        12,
        "",
    ),
    "forks as it writes": (
        WRITING
        + """
child = os.fork()
loss.backward()
assert torch.equal(X.grad, Z.grad)
if child == 0:
    del loss
    step()  # which keeps to what the first came to: all, if nothing had been written by the fork
    step(rematfn.offload(f, "8MiB", to=disk))
    os._exit(0 if disk.bytes_out > 0 else 13)
code = os.waitstatus_to_exitcode(os.wait()[1])
assert code == 0, code
del loss
assert disk.held_bytes == 0
step()
""",
        0,
        "",
    ),
    "forks as it reads": (
        """
pids = []
def forks(grad): pids.append(os.fork())
def h(x):
    y = x.sin()
    for i in range(12):
        y = (y * 1.01).sin()
        if i in (3, 6): y.register_hook(forks)
    return y.square().sum()
Z.grad = None
h = rematfn.offload(h, to=disk)
for _ in range(2):
    h(X).backward()
if 0 in pids: sys.exit(0)
for pid in pids: assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
""",
        0,
        "",
    ),
    "leaves nothing to the child that cannot be had again": (
        """
seed = torch.full((1 << 18,), 2.0)
@torch.library.custom_op("mine::draw", mutates_args=(), tags=(torch.Tag.nondeterministic_bitwise,))
def draw(x: torch.Tensor) -> torch.Tensor: return x + 1
draw.register_fake(torch.empty_like)
def h(x):
    drawn = draw(seed)
    y = (x * drawn).sin()
    for _ in range(6): y = (y * 1.01).sin()
    return y.sum()
loss = rematfn.offload(h, "4MiB", to=disk)(X)
child = os.fork()
if child == 0:
    try:
        loss.backward()
    except rematfn.errors.OffloadError as error:
        assert sys.argv[1] in str(error) and "fork" in str(error), error
        sys.exit(14)
    sys.exit(15)
assert os.waitstatus_to_exitcode(os.wait()[1]) == 14
loss.backward()
""",
        0,
        "",
    ),
}


Run = tuple[dict[str, Ended], list[str]]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Return how all scripts ended, and the files that they have left."""

    def work(scripts: Path) -> Run:
        scratch = tmp_path_factory.mktemp("scratch")
        jobs = {name: (PRELUDE + text + "\n", str(scratch)) for name, (text, *_) in SCRIPTS.items()}
        return forked(scripts, jobs, ()), [path.name for path in scratch.iterdir()]

    return once(tmp_path_factory, "offload", work)


@pytest.mark.forking
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_ends(name: str, run: Run) -> None:
    _, code, said = SCRIPTS[name]
    ended = run[0][name]
    assert ended.code == code, ended.err
    assert ended.err.splitlines()[-1:] == ([said] if said else [])


@pytest.mark.forking
def test_scripts_leave_no_file(run: Run) -> None:
    assert run[1] == []
