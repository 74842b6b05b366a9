# SPDX-License-Identifier: Apache-2.0
"""What the rules near the floor buy: each is switched off alone, in the simulator, with ON().

A cell is a network in a budget. A network's budgets begin at the least in which it runs with all
rules, replays costing at most ten times the program; a BudgetError recommends no smaller either.
They end at 0.35 of its peak, or a little above the least. The rules are those of
Note [Near the floor].
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import rematfn
from rematfn import _C

RULES = ("mirrored", "priced", "pinned", "frugal")
MOST = 10.0  # times the program
STEP = 1.04  # from a budget to the next
PRECISION = 1.01  # of the least budget
FRACTION, BEYOND = 0.35, 1.4  # of the peak; of the least budget
ABOUT = """
One rule is off, all others are on: [what each does](../../docs/design/floor.md). A cell is a
network in a budget; it fits if replays cost at most ten times the program. *Cost* is the geometric
mean of the total cost, over that with all rules, where both fit; *the most* is the worst cell.
"""
Costs = Sequence[float | None]  # by cell; None: it does not fit, or replays cost too much


def total_cost(trace: rematfn.Trace, budget: int, without: str | None = None) -> float | None:
    """Return the cost of a run within ``budget`` over that of the program, if it fits."""
    rules = _C.testing.FloorRules()
    if without is not None:
        setattr(rules, without, False)
    most = MOST * trace.cost
    replayed = _C.testing.replayed_by_rules(trace._core, budget, rules, most)
    return None if replayed is None else 1 + replayed / trace.cost


def budgets(trace: rematfn.Trace) -> list[int]:
    """Return the budgets of the trace's cells."""
    fits, refused = trace.peak_bytes, 1
    while fits > PRECISION * refused:
        middle = math.isqrt(fits * refused)
        if total_cost(trace, middle) is None:
            refused = middle
        else:
            fits = middle
    most = max(FRACTION * trace.peak_bytes, BEYOND * fits)
    count = int(math.log(most / fits, STEP)) + 1
    return [int(fits * STEP**i) for i in range(count)]


def compared(cells: Sequence[str], ours: Costs, without: Costs) -> dict[str, Any]:
    """Return the table's row for one rule."""
    both = [(b / a, cell) for cell, a, b in zip(cells, ours, without, strict=True) if a and b]
    factor, where = max(both)
    return {
        "cells that fit": f"{sum(b is not None for b in without)} of {len(cells)}",
        "cells that change": sum(x != 1 for x, _ in both),
        "cost": math.exp(sum(math.log(x) for x, _ in both) / len(both)),
        "the most": f"{factor:.2f} ({where})",
    }


def traces(folder: Path | None) -> Iterator[tuple[str, rematfn.Trace]]:
    """Yield the benchmark's networks, and the public traces of ``folder``."""
    from cells import Bench
    from networks import NETWORKS

    for name, network in NETWORKS.items():
        yield name, rematfn.record(Bench(network).eager)
    for path in sorted(folder.glob("*.jsonl.gz")) if folder else ():
        yield f"public {path.name.split('.')[0]}", rematfn.Trace.load(path)


def main() -> None:
    """Simulate all cells and save the table."""
    import torch
    from measure import save

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--traces", type=Path, default=os.environ.get("TRACES"), help="a folder of public traces"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)  # as in the benchmark: kernels' scratch depends on it
    cells: list[str] = []
    costs: dict[str | None, list[float | None]] = {rule: [] for rule in (None, *RULES)}
    for name, trace in traces(options.traces):
        for budget in budgets(trace):
            cells.append(f"{name} in {budget / trace.peak_bytes:.3f}")
            for rule, found in costs.items():
                found.append(total_cost(trace, budget, rule))
        print(name, len(cells), flush=True)
    rows = [{"without": r or "-", **compared(cells, costs[None], costs[r])} for r in costs]
    save("floor", "What the rules near the floor buy", rows, about=ABOUT)


if __name__ == "__main__":
    main()
