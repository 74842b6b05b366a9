# SPDX-License-Identifier: Apache-2.0
"""What `rematfn.profile` predicts, beside what calls take.

Each network runs in a process of its own: one profile of a few calls, then steps within each
budget, which take turns with eager's. Times are medians of the ratios of a round.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from cells import Bench, Row
from measure import RESULTS, compared, machine, measured_parts, print_found, section, write_document
from moving import MIB, Candidate, times
from networks import TINY
from offload import CASES

import rematfn

BUDGETS = (0.7, 0.5, 0.3, 0.2)
NAMES = [name for name in CASES if name != TINY.name]


def measure(name: str, options: argparse.Namespace) -> Iterator[Row]:
    """Yield what there is to say of one network, and then a row for each budget."""
    bench = Bench(CASES[name])
    found = rematfn.profile(bench.eager, calls=options.repeats)
    about = (
        f"{CASES[name].about}. Predicted: peak {found.peak_bytes / MIB:.0f} MiB, smallest budget "
        f"{found.min_budget / MIB:.0f} MiB, {found.trace.operators} operators."
    )
    yield {"about": about, "machine": machine()}
    for fraction in options.budgets:
        budget = int(fraction * found.peak_bytes)
        predicted = found.predict(budget).time
        row: Row = {"budget": fraction, "MiB": budget / MIB}
        if budget < found.min_budget:
            row["predicted"] = "does not fit"
        else:
            row["predicted"] = predicted
        candidate = Candidate(bench, "remat", budget)
        try:
            row |= candidate.warm_up(bench)
        except rematfn.BudgetError:
            yield row | {"measured": "does not fit"}
            continue
        seconds, others = times(bench, {"remat": candidate.step}, options.repeats)
        took = compared(seconds["remat"], seconds["eager"])
        row |= {"measured": took["time / eager"], "least": took["least"], "most": took["most"]}
        row["predicted / measured"] = predicted / took["time / eager"]
        yield row | {"others, cores": others}


def write(folder: Path, results: Mapping[str, Any]) -> str:
    """Write the document into ``folder``; return it."""
    parts = ["# Predicted and measured (`python benchmarks/predicted.py`)"]
    parts += ["Time of a step within a budget, in multiples of eager's: what `rematfn.profile` "
              "predicts from a few calls without a budget, and what steps take."]  # fmt: skip
    for name, record in results.items():
        parts += section(name, record)
    return write_document(folder / "predicted.md", parts)


def main() -> None:
    """Measure, and save after each network; what is not measured stays as it was."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--networks", nargs="+", default=NAMES, choices=[*NAMES, TINY.name])
    parser.add_argument("--budgets", type=float, nargs="+", default=BUDGETS)
    parser.add_argument("--repeats", type=int, default=3, help="timed rounds for each cell")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--part", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part:
        return print_found(measure(options.part, options))
    results = measured_parts(
        __file__, options.networks, sys.argv[1:], options.out / "predicted.json"
    )
    print(write(options.out, results))


if __name__ == "__main__":
    main()
