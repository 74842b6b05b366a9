# SPDX-License-Identifier: Apache-2.0
"""What huge pages do for copies to a disk: a step that moves, with them and without.

Each row is of a process of its own; those without them have turned them off for themselves
(``PR_SET_THP_DISABLE``), and do all else alike.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import torch
from measure import RESULTS, compared, interleaved, save

import rematfn
from rematfn.demo.task import Task

GIB = 2**30
PR_SET_THP_DISABLE = 41
TASKS = Path("/proc/self/task")
TITLE = "Copies to a disk, from huge pages and from small ones (`python benchmarks/huge_pages.py`)"
ABOUT = """
The demo's step in a fraction of its peak by `offload`, which moves whatever does not fit, once its
plan is settled; with huge pages and without, in turn, each in a process of its own. *Out* and *in*:
what the disk carried while it was busy. *Threads*: processor time of rematfn's threads that write
and read. *Switches*: how often the thread that computes had to make way for another, in a step; in
eager there is no cause to but the machine's other work. *Time / eager*: the median of rounds in
which both take turns.
"""


def threads() -> set[str]:
    """Return the threads of this process."""
    return {task.name for task in TASKS.iterdir()}


def processor_seconds(of: set[str]) -> float:
    """Return the processor time that these threads of this process have taken."""
    return sum(int((TASKS / name / "schedstat").read_text().split()[0]) for name in of) / 1e9


def switches() -> int:
    """Return how often the main thread has had to make way for another."""
    status = Path("/proc/thread-self/status").read_text()
    return int(status.split("nonvoluntary_ctxt_switches:")[1].split()[0])


def measure(budget: float, rounds: int) -> dict[str, object]:
    """Return a row of the table."""
    task = Task.of_python_manual()
    tokens = next(task.batches)
    eager = torch.func.grad_and_value(task.loss_fn)
    task.run(eager, tokens, 0)
    before = threads()
    disk = rematfn.Disk()
    f = rematfn.offload(task.loss_fn, budget, to=disk)
    moving = torch.func.grad_and_value(f)
    task.run(moving, tokens, 0)
    copiers = threads() - before  # the search's thread is gone when a plan is settled
    while not rematfn.stats(f).settled:
        task.run(moving, tokens, 0)
    copiers &= threads()

    found = dict.fromkeys(("moved", "seconds", "switches"), 0.0)

    def run_moving() -> float:
        start = processor_seconds(copiers), switches()
        _, took = task.run(moving, tokens, 0)
        found["seconds"] += processor_seconds(copiers) - start[0]
        found["switches"] += switches() - start[1]
        stats = rematfn.stats(f)
        found["moved"] += stats.moved_bytes + stats.returned_bytes
        return took

    seconds = interleaved(
        {"moving": run_moving, "eager": lambda: task.run(eager, tokens, 0)[1]}, rounds
    )
    calls = 2 * rounds
    stats = rematfn.stats(f)
    return {
        "moved in a step, MiB": found["moved"] / calls / 2**20,
        "out, MB/s": disk.bandwidth_out and disk.bandwidth_out / 1e6,
        "in, MB/s": disk.bandwidth_in and disk.bandwidth_in / 1e6,
        "threads, s/GiB": found["seconds"] / (found["moved"] / GIB),
        "switches": found["switches"] / calls,
        "replayed": stats.replayed_cost,
        "time / eager": compared(seconds["moving"], seconds["eager"])["time / eager"],
    }


def without_huge_pages() -> None:
    """Turn them off for this process."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "huge pages cannot be turned off")


def in_a_process(pages: str, options: argparse.Namespace) -> Mapping[str, object]:
    """Return the row that a fresh process measures."""
    arguments = ["--budget", options.budget, "--rounds", options.rounds, "--pages", pages]
    command = [sys.executable, __file__, *map(str, arguments)]
    found: Mapping[str, object] = json.loads(subprocess.check_output(command, text=True))
    print(pages, found, flush=True)
    return {"pages": pages, **found}


def main() -> None:
    """Measure; print and save the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--budget", type=float, default=0.3)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--processes", type=int, default=3, help="of each kind")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--pages", choices=("huge", "small"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.pages:
        if options.pages == "small":
            without_huge_pages()
        print(json.dumps(measure(options.budget, options.rounds)))
        return
    kinds = ("huge", "small") * options.processes
    rows = sorted((in_a_process(kind, options) for kind in kinds), key=lambda r: str(r["pages"]))
    save("huge_pages", TITLE, rows, options.out, about=ABOUT)


if __name__ == "__main__":
    main()
