# SPDX-License-Identifier: Apache-2.0
"""How long plans that move foretell a step to take, beside how long steps take.

Each network runs in a process of its own. A plan is made by the times that operators took in three
early calls; the calls after it are compared with it, each with the plan that it followed.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from cells import Bench, Row
from measure import RESULTS, machine, measured_parts, print_found, section, table, write_document
from moving import MIB, TIMED, Candidate, Way, below_floor
from networks import TINY
from offload import BUDGETS, CASES

import rematfn

NAMES = [name for name in CASES if name != TINY.name]
WAYS: tuple[Way, ...] = ("offload", "hybrid")

ABOUT = """
Seconds of a step beside a disk, as in [offload.md](offload.md): medians over calls, and the median
of the ratios. *Waiting* is what it spends on replays and waiting; what is foretold of it has in it
what operators take longer beside copies. A plan knows how long operators took in the three calls
before it, and the machine's speed changes. So two more figures stand beside *foretold / measured*.
*Eager* is what a forecast without any error comes to: the time of three steps of eager, a median,
beside that of the five after the next, four times for each network. *By the calls' own times* is
the forecast by what operators took in the first three of the calls that it is compared with: the
error that is left is that of the simulation.
"""


def measure(name: str, options: argparse.Namespace) -> Iterator[Row]:
    """Yield what there is to say of one network, and then a row for each budget and way."""
    bench = Bench(CASES[name])
    eager = beside_itself(bench)
    about = f"{CASES[name].about}. Eager: {min(eager):.3g} to {max(eager):.3g}."
    yield {"about": about, "eager": eager, "machine": machine()}
    budgets = [int(fraction * bench.peak) for fraction in options.budgets]
    below = None if options.quick else below_floor(bench)
    for budget in budgets if below is None else [*budgets, below]:
        for way in WAYS:
            row: Row = {"budget": budget / bench.peak, "MiB": budget / MIB, "way": way}
            candidate = Candidate(bench, way, budget)
            try:
                yield row | compare(bench, candidate, options.calls)
            except rematfn.BudgetError:
                yield row | {"foretold, s": "does not fit"}


def compare(bench: Bench, candidate: Candidate, calls: int) -> Row:
    """Return what plans foretold of ``calls`` steps, and what these took."""
    for _ in range(TIMED):
        candidate.timed(bench)
    rows: list[dict[str, float]] = []
    own: list[float] = []
    for _ in range(calls):
        planned = candidate.planned()
        assert planned is not None
        overhead = planned.overhead()
        taken = candidate.timed(bench)
        stats = rematfn.stats(candidate.transformed)
        row = {
            "foretold, s": planned.elapsed + overhead,
            "measured, s": taken,
            "waiting foretold, s": overhead,
            "waiting, s": (stats.waited or 0.0) + (stats.replayed_cost or 0.0) * planned.cost,
            "foretold / measured": (planned.elapsed + overhead) / taken,
        }
        rows.append(row)
        if not own and (timed := planned.timed_anew()) is not None:
            own = [(timed.elapsed + r["waiting foretold, s"]) / r["measured, s"] for r in rows]
    found: Row = {key: statistics.median(row[key] for row in rows) for key in rows[0]}
    return found | ({"by the calls' own times": statistics.median(own)} if own else {})


def beside_itself(bench: Bench, pairs: int = 4) -> list[float]:
    """Return ratios of eager's time to its own a little later."""
    ratios = []
    for _ in range(pairs):
        seconds = [bench.run(bench.eager)[1] for _ in range(3 + 1 + 5)]
        ratios.append(statistics.median(seconds[:3]) / statistics.median(seconds[4:]))
    return ratios


def summary(results: Mapping[str, Any]) -> str:
    """Return a table: how many of the cells are foretold how well."""
    rows = []
    for column in ("foretold / measured", "by the calls' own times"):
        ratios = [
            row[column] for record in results.values() for row in record["rows"] if column in row
        ]
        errors = [abs(ratio - 1) for ratio in ratios]
        rows.append(
            {
                "": column,
                "cells": len(ratios),
                "within 0.05": sum(error <= 0.05 for error in errors),
                "within 0.15": sum(error <= 0.15 for error in errors),
                "median": statistics.median(ratios),
                "least": min(ratios),
                "most": max(ratios),
            }
        )
    return table(rows)


def write(folder: Path, results: Mapping[str, Any]) -> str:
    """Write the document into ``folder``; return it."""
    parts = ["# A step's time, foretold and measured (`python benchmarks/elapsed.py`)"]
    parts += [ABOUT.strip(), summary(results)]
    for name, record in results.items():
        parts += section(name, record)
    return write_document(folder / "elapsed.md", parts)


def main() -> None:
    """Measure, and save after each row; what is not measured stays as it was."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--networks", nargs="+", default=NAMES, choices=[*NAMES, TINY.name])
    parser.add_argument("--budgets", type=float, nargs="+", default=BUDGETS)
    parser.add_argument("--calls", type=int, default=11, help="compared, for each cell")
    parser.add_argument("--quick", action="store_true", help="no budget below the floor")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--part", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part:
        return print_found(measure(options.part, options))
    results = measured_parts(__file__, options.networks, sys.argv[1:], options.out / "elapsed.json")
    print(write(options.out, results))


if __name__ == "__main__":
    main()
