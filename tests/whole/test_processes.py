# SPDX-License-Identifier: Apache-2.0
"""Short scripts, run to their exit codes: they end as they do in eager, and say the same.

Most run in children forked from one process that has imported torch and done nothing else; they end
by the interpreter's usual way out. One that spawns others, which import the script, is a process of
its own from the start, and so is one that ends with an error of ours.
"""

from pathlib import Path

import pytest
from processes import Ended, forked, fresh, once

PRELUDE = """
import atexit, faulthandler, gc, os, signal, sys, threading, time
import torch

signal.signal(signal.SIGINT, signal.default_int_handler)
torch.set_num_threads(1)
torch.manual_seed(0)

if sys.argv[1] == "eager":
    def remat(f=None, *args, **options):
        return (lambda f: f) if f is None else f
else:
    from rematfn import remat

def f(w, x):
    for _ in range(20):
        x = torch.tanh(x @ w) + x
    return x.square().sum()

X = torch.linspace(-1, 1, 512).view(16, 32)

def step(g, x=X):
    w = torch.linspace(-1, 1, 1024).view(32, 32).requires_grad_()
    g(w, x).backward()
    return w.grad.sum().item()

g = remat(f, 0.4)
"""

INTERRUPTED = """
threading.Timer({delay}, os.kill, (os.getpid(), signal.SIGINT)).start()
while True:
    step(g)
"""
TWICE = "print(step(g), step(g))\n"

SCRIPTS: dict[str, str] = {
    "returns": TWICE + "print(step(g))",
    "evicts everything": (
        "if sys.argv[1] != 'eager':\n    from rematfn.testing import EvictEverything\n"
        "    g = remat(f, policy=EvictEverything())\n" + TWICE
    ),
    "exits in f": """
def f(w, x):
    y = (x @ w).sin()
    if len(done) == 2: sys.exit(4)
    done.append(1)
    return y.sum()
done = []
g = remat(f, '1MiB')
for _ in range(3): step(g)
""",
    "raises": TWICE + "raise ValueError('mine')",
    "interrupted after 0.2 s": INTERRUPTED.format(delay=0.2),
    "daemon in f": TWICE
    + """
def waits(w, x):
    y = f(w, x)
    inside.set()
    time.sleep(60)
    return y
inside = threading.Event()
threading.Thread(target=step, args=(remat(waits, '1MiB'),), daemon=True).start()
inside.wait()
""",
    "thread outlives main": """
def later():
    time.sleep(0.3)
    print(step(g))
print(step(g), step(g))
threading.Thread(target=later).start()
""",
    "forks and both compute": TWICE
    + """
sys.stdout.flush()
pid = os.fork()
if pid: print(os.waitstatus_to_exitcode(os.wait()[1]))
print(step(g), step(g))
""",
    "forks in f": """
def h(w, x):
    y = f(w, x)
    sys.stdout.flush()
    if os.fork() == 0: sys.exit(9)
    print(os.waitstatus_to_exitcode(os.wait()[1]))
    return y
step(g); print(step(remat(h, '1MiB')))
""",
    "spawns": """
def work(queue): queue.put((step(g), step(g)))
if __name__ == '__main__':
    import multiprocessing
    print(step(g), step(g))
    context = multiprocessing.get_context('spawn')
    queue = context.SimpleQueue()
    worker = context.Process(target=work, args=(queue,))
    worker.start()
    print(queue.get()); worker.join(); print(worker.exitcode)
""",
    "loads data in f": """
from torch.utils.data import DataLoader
data = DataLoader(list(X), batch_size=8, num_workers=1)
g = remat(lambda w, x: sum(f(w, x) for x in data), 0.5)
print(step(g), step(g))
""",
    "atexit calls it": "atexit.register(lambda: print(step(g)))\n" + TWICE,
    "a destructor calls it": """
class Last:
    def __init__(self): self.step, self.g, self.print = step, g, print
    def __del__(self): self.print(self.step(self.g))
last = Last()
"""
    + TWICE
    + "del last",
}

# In eager there is none, so what is expected is written down.
BUDGET_ERROR = "step(g); step(remat(f, 512))"


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ended]:
    """Return how each script ended, in eager and under a budget."""
    return once(tmp_path_factory, "processes", run_scripts)


def run_scripts(folder: Path) -> dict[str, Ended]:
    jobs = {
        f"{name}, {kind}": (PRELUDE + text + "\n", kind)
        for name, text in SCRIPTS.items()
        for kind in ("eager", "remat")
    }
    afresh = {"spawns, eager", "spawns, remat"}
    found = forked(folder, {name: job for name, job in jobs.items() if name not in afresh})
    for name in afresh:
        script = folder / "afresh.py"
        script.write_text(jobs[name][0])
        found[name] = fresh(script, jobs[name][1])
    return found


@pytest.mark.forking
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_ends_as_it_does_in_eager(name: str, ended: dict[str, Ended]) -> None:
    ours, eager = ended[f"{name}, remat"], ended[f"{name}, eager"]
    assert ours.code == eager.code, ours.err
    assert ours.out == eager.out
    assert ours.err.splitlines()[-1:] == eager.err.splitlines()[-1:]
    for words in ("terminate called", "Fatal Python error", "Segmentation", "internal assert"):
        assert words not in ours.err


@pytest.mark.forking
def test_an_uncaught_budget_error_ends_the_script_with_its_message(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(PRELUDE + BUDGET_ERROR)
    found = fresh(script, "remat")
    assert found.code == 1
    assert "rematfn.BudgetError: remat(f, budget=512 B): `aten::" in found.err
    assert found.err.splitlines()[-1] == "See help(rematfn.BudgetError)."
