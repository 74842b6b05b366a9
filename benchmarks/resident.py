# SPDX-License-Identifier: Apache-2.0
"""What the operating system counts: the resident set of networks inside budgets.

Each cell runs in a process of its own, which begins with eager steps and gives back what they left;
above that start its high-water mark (``VmHWM``) is read for each call from the second on. Where the
pool of pages is off, all blocks come from the C library. Ratios are of processor time, of steps
that take turns in one process.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import optree
import torch
from measure import RESULTS, interleaved, save
from networks import NETWORKS, Program, Step, in_order, untransformed

import rematfn
from rematfn import _C
from rematfn._transform.recorded import finish_searches
from rematfn.demo.task import Count, Task
from rematfn.testing import MemoryTimeline, ResidentPeak
from rematfn.testing._resident import give_back

MIB = 2**20
NAMES = ("gpt", "resnet", "unet", "lstm", "demo")
BUDGETS = (0.5, 0.3, 0.15)
SLACK = 32 * MIB
TITLE = "The resident set inside budgets (`python benchmarks/resident.py`)"
ABOUT = """
How far the resident set of a fresh process rises, in MiB, within budgets that are fractions of
eager's peak. *Results*: gradients, which the program holds beside the budget. *Allowed*: 1.1 of
the budget, the results, and 32 MiB, which torch's own threads and buffers take; *holds* says
whether the rise with the pool is within that. *C library*: the same budget, with blocks from the C
library in place of rematfn's pool. *Pool / libc* and *pool / eager* are ratios of the processor
time of a step.
"""


def demo() -> Program:
    """Return the demo's step."""
    task = Task.of_python_manual()
    tokens = next(task.batches)

    def make_step(transform: Callable[..., Any], run: Any) -> Step:
        gradient = torch.func.grad_and_value(transform(task.loss_fn))
        return lambda: gradient(task.params, tokens)

    return Program(make_step)


class Cell:
    """A network in a process of its own, warmed up."""

    def __init__(self, name: str) -> None:
        self.program = demo() if name == "demo" else NETWORKS[name].make()
        self._buffers = [b.clone() for b in self.program.buffers]
        self.eager = self.program.make_step(untransformed, in_order)
        self.run(self.eager)
        self.run(self.eager)
        # What rematfn, and torch for its sake, load and set up once.
        small = rematfn.remat(lambda x: x.sin().cos().sum(), "1MiB")
        for _ in range(3):
            torch.func.grad(small)(torch.ones(100))
        finish_searches()

    def run(self, step: Step) -> Any:
        """Run ``step`` from the same state as ever."""
        with torch.no_grad():
            for buffer, saved in zip(self.program.buffers, self._buffers, strict=True):
                buffer.copy_(saved)
        torch.manual_seed(0)
        return step()

    def inside(self, budget: int) -> Step:
        """Return a step inside ``budget`` bytes, after two calls and the search for a plan."""
        step = self.program.make_step(lambda f: rematfn.remat(f, budget), in_order)
        for _ in range(2):
            self.run(step)
        finish_searches()
        return step

    def peak(self) -> dict[str, Any]:
        """Return the allocator's peak of an eager step, and the bytes of its results."""
        with MemoryTimeline() as timeline:
            results = self.run(self.eager)
        held = sum(t.untyped_storage().nbytes() for t in optree.tree_leaves(results))
        return {"peak": Count.of(timeline, results).peak, "held": held}

    def resident(self, budget: int, calls: int) -> dict[str, Any]:
        """Return how far the resident set rises in a call; with no budget, in eager."""
        give_back()
        step, skipped, peaks = self.eager, 0, []
        if budget:
            step, skipped = self.program.make_step(lambda f: rematfn.remat(f, budget), in_order), 1
        with ResidentPeak() as whole:
            for number in range(calls + skipped):
                with ResidentPeak() as peak:
                    results = self.run(step)
                del results
                if number >= skipped:
                    assert peak.after is not None
                    assert whole.before is not None
                    peaks.append(peak.after - whole.before)
        return {"added": max(peaks)}

    def times(self, budget: int, repeats: int) -> dict[str, Any]:
        """Return ratios of a step's processor time: with the pool, without, and in eager."""
        ours = {}
        for on in (True, False):
            _C.testing.use_pages(on)
            ours[on] = self.inside(budget)

        def seconds(step: Step, on: bool) -> float:
            _C.testing.use_pages(on)
            start = time.process_time()  # what the system does for us included; others' work is not
            results = self.run(step)
            elapsed = time.process_time() - start
            del results
            return elapsed

        measured = interleaved(
            {
                "pool": lambda: seconds(ours[True], True),
                "libc": lambda: seconds(ours[False], False),
                "eager": lambda: seconds(self.eager, False),
            },
            repeats,
        )
        ratios = [a / b for a, b in zip(measured["pool"], measured["libc"], strict=True)]
        return {
            "pool / libc": statistics.median(ratios),
            "pool / eager": statistics.median(measured["pool"])
            / statistics.median(measured["eager"]),
        }


def in_a_process(name: str, what: str, *arguments: object, pool: bool = True) -> dict[str, Any]:
    """Return what a fresh process finds out about network ``name``."""
    command = [sys.executable, __file__, "--cell", name, what, *map(str, arguments)]
    command += [] if pool else ["--without-pool"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=1800)
    lines = [line for line in found.stdout.splitlines() if line.startswith("{")]
    if found.returncode or not lines:
        raise RuntimeError(f"{command}: {found.stderr[-2000:]}")
    return json.loads(lines[-1])  # type: ignore[no-any-return]


def row(
    name: str, fraction: float, eager: dict[str, Any], options: argparse.Namespace
) -> dict[str, object]:
    """Return a row of the table."""
    budget = int(fraction * eager["peak"])
    found: dict[str, object] = {"network": name, "budget": fraction, "MiB": budget / MIB}
    found["results, MiB"] = eager["held"] / MIB
    allowed = (1.1 * budget + eager["held"] + SLACK) / MIB
    found["allowed, MiB"] = allowed
    try:
        added = in_a_process(name, "resident", budget, options.calls)["added"] / MIB
    except RuntimeError as error:
        if "BudgetError" not in str(error):
            raise
        return found | {"fits": False}
    found["eager, MiB"] = eager["added"] / MIB
    libc = in_a_process(name, "resident", budget, options.calls, pool=False)["added"] / MIB
    found |= {"C library, MiB": libc, "pool, MiB": added, "holds": added <= allowed}
    if options.repeats:
        found |= in_a_process(name, "times", budget, options.repeats)
    return found


def main() -> None:
    """Measure what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--networks", nargs="*", default=NAMES, choices=NAMES, metavar="NAME")
    parser.add_argument("--budgets", type=float, nargs="+", default=BUDGETS)
    parser.add_argument("--calls", type=int, default=4, help="that are measured, after the first")
    parser.add_argument("--repeats", type=int, default=7, help="timed rounds; with 0, no times")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--cell", nargs="+", help=argparse.SUPPRESS)
    parser.add_argument("--without-pool", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.cell:
        _C.testing.use_pages(not options.without_pool)
        name, what, *numbers = options.cell
        print(json.dumps(getattr(Cell(name), what)(*map(int, numbers))))
        return
    RESULTS.mkdir(exist_ok=True)
    rows = []
    for name in options.networks:
        eager = in_a_process(name, "peak")
        eager |= in_a_process(name, "resident", 0, options.calls)
        for fraction in options.budgets:
            rows.append(row(name, fraction, eager, options))
            save("resident", TITLE, rows, about=ABOUT)


if __name__ == "__main__":
    main()
