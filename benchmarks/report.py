# SPDX-License-Identifier: Apache-2.0
"""The benchmark's document: tables of what was measured, and where a promise broke."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from measure import place, table

Record = Mapping[str, Any]

ABOUT = """\
Peaks are the allocator's, and not rematfn's count: torch's profiler reports each block that is
handed out or taken back. The peak is the most bytes that were live at once above those at the start
of the step, kernels' scratch included. What was there before (parameters, inputs) does not count,
nor do the results (gradients, loss), from the moment they are made. A budget is a fraction of
eager's peak, counted in the same way.

*Resident* is how far the resident set of the process rises in such a step (`VmHWM`, results
included), once the C library has given back what earlier ones left: [resident.md](resident.md).

*Exact*: every result, and a batch norm's statistics, are eager's, bit for bit. *Replayed cost* is
that of the cost model, as a fraction of the program's own. It is the same on every run that ends
its search with the same plan. *Replayed FLOPs* are those of
matrix products, convolutions and attention, as a fraction of the program's. *Time ratio*: the
median over rounds of the ratio to eager, all having taken turns in one process. *Guided* is the
default policy, from the second call of a signature on; *online* is `ON()`, as which the first call
runs. *Needs*: a `BudgetError` said so; *runs in* is where following its advice ends, *advised* how
often that took.

*Peers* are measured in the same way, then rematfn with each peer's peak as its budget. *Ahead* says
whether rematfn takes less at that peak; by cost only where the peer's recomputation can be counted.
"""
ABOUT_TARGETS = """\
The targets come from networks of the same kind at other sizes. No schedule that keeps the
program's order costs less than the *lower bound* ([bound.md](bound.md)): a target below that cannot
be met here. The study counts a dropout's random numbers as bytes moved; here they are forty times
as costly, as they are on a CPU.
"""
# From the study of policies by simulation, which the project's targets come from: networks of the
# same kind, at other sizes. Overhead online and guided, by budget.
TARGETS: dict[str, dict[float, tuple[float | None, float | None]]] = {
    "gpt": {0.5: (1.08, 1.06), 0.3: (1.18, 1.15), 0.2: (1.22, 1.20), 0.1: (1.35, 1.31)},
    "mlp": {0.5: (1.20, 1.18), 0.3: (1.28, 1.26), 0.2: (1.50, 1.40), 0.1: (3.1, 2.9)},
    "resnet": {0.5: (1.10, 1.09), 0.3: (1.18, 1.17), 0.2: (1.35, 1.25), 0.1: (2.0, 1.75)},
    "unet": {0.5: (1.07, 1.05), 0.3: (1.16, 1.13), 0.2: (1.70, 1.48)},
    "lstm": {0.5: (1.13, 1.12), 0.3: (1.23, 1.22), 0.2: (1.30, 1.28), 0.1: (None, 1.60)},
    "gpt-func": {0.5: (1.04, 1.00), 0.3: (1.26, 1.03), 0.2: (1.43, 1.09), 0.1: (1.70, 1.20)},
    "maml": {0.5: (1.12, 1.09), 0.3: (1.55, 1.24), 0.2: (2.1, 1.38), 0.1: (None, 2.5)},
}
# Cost that is no more than this share of the program's is not worth a word.
NOISE = 0.005


def broken_promises(records: Mapping[str, Record]) -> list[str]:
    """Return a sentence for each cell with a peak above the budget or other bits than eager's."""
    broken = []
    for name, record in records.items():
        for where, row in _runs(record):
            if row.get("peak", 0) > row["bytes"]:
                broken.append(f"{name}, {where}: a peak of {row['peak']:,} in {row['bytes']:,}")
            if row.get("exact") is False:
                broken.append(f"{name}, {where}: not bitwise eager's")
            if "needs" in row and "runs in" not in row:
                broken.append(f"{name}, {where}: the advice of a BudgetError did not help")
        if record["simulated"] is not True:
            broken.append(f"{name}: {record['simulated']}")
    return broken


def not_monotone(records: Mapping[str, Record]) -> list[str]:
    """Return a sentence wherever a smaller budget cost less, or had the higher peak."""
    found = []
    for name, record in records.items():
        for policy in ("online", "guided"):
            rows = [r for r in record["budgets"] if r["policy"] == policy and "peak" in r]
            rows.sort(key=lambda r: -r["budget"])
            for wide, tight in pairwise(rows):
                at = f"{name}, {policy}, {wide['budget']:g} to {tight['budget']:g}"
                a, b = wide["replayed cost"], tight["replayed cost"]
                if b < a - NOISE:
                    found.append(f"{at}: the replayed cost falls from {a:.3f} to {b:.3f}")
                if tight["peak"] > wide["peak"]:
                    found.append(f"{at}: the peak rises")
    return found


def lower_bounds(folder: Path) -> dict[tuple[str, float], float | str]:
    """Return what `bound.py` has written down in ``folder``, by network and budget."""
    path = folder / "bound.json"
    rows = json.loads(path.read_text())["rows"] if path.exists() else ()
    return {(row["network"], row["budget"]): row["lower bound"] for row in rows}


def above_targets(
    records: Mapping[str, Record], bounds: Mapping[tuple[str, float], float | str]
) -> list[dict[str, Any]]:
    """Return the cells for which the study of policies has a target, with the target.

    And with the least that any schedule could come to, where that is known.
    """
    rows = []
    for name, targets in TARGETS.items():
        for row in records.get(name, {}).get("budgets", ()):
            pair = targets.get(row["budget"], (None, None))
            target = pair[row["policy"] == "guided"]
            if target is not None:
                cost = row.get("replayed cost")
                rows.append(
                    {
                        "network": name,
                        "budget": row["budget"],
                        "policy": row["policy"],
                        "lower bound": bounds.get((name, row["budget"])),
                        "overhead": None if cost is None else 1 + cost,
                        "target": target,
                        "within": cost is not None and 1 + cost <= target + NOISE,
                    }
                )
    return rows


def alternative(name: str, record: Record) -> str:
    """Return what the picture of a network shows, in words, for those who do not see it."""
    guided = [row for row in record["budgets"] if row["policy"] == "guided" and row.get("peak")]
    ends = [guided[0], guided[-1]]
    peaks = " to ".join(f"{row['peak'] / record['eager']['peak']:.2f}" for row in ends)
    costs = " to ".join(f"{row['replayed cost']:.0%}" for row in ends)
    return (
        f"{name}: what is replayed, and the time of a step, over the measured peak. "
        f"From peaks of {peaks} of eager's, guided calls replay {costs} of the step's cost"
    )


def write(folder: Path, results: Mapping[str, Any]) -> str:
    """Write the document and its pictures into ``folder``; return what is worth printing."""
    from picture import draw  # loads matplotlib

    records: Mapping[str, Record] = results["networks"]
    parts = ["# Networks inside budgets, and their peers", ABOUT]
    checks = [
        _listed("Promises broken", broken_promises(records)),
        _listed("Not monotone", not_monotone(records)),
    ]
    parts += checks
    parts += ["## Overview", table(list(_overview(records)))]
    targets = above_targets(records, lower_bounds(folder))
    if targets:
        parts += ["## Targets of the policy study", ABOUT_TARGETS, table(targets)]
    for name, record in records.items():
        picture = folder / f"bench-{name}.png"
        draw(picture, name, record)
        parts += [
            f"## {name}",
            f"{record['about']}. Eager: peak {record['eager']['peak']:,} bytes{_seconds(record)}.",
            f"![{alternative(name, record)}]({picture.name})",
            table([{k: v for k, v in row.items() if k != "seconds"} for row in record["budgets"]]),
        ]
        if record.get("peers"):
            parts += [table(list(_beside_peers(record)))]
        parts += [f"{place(record['machine'])}; `{record['command']}`"]
    if results.get("traces"):
        traces = results["traces"]
        parts += ["## Public traces", traces["about"], table(traces["rows"])]
        parts += [f"{place(traces['machine'])}; `{traces['command']}`"]
    text = "\n\n".join(part.strip() for part in parts) + "\n"
    (folder / "bench.md").write_text(text)
    return "\n\n".join([*checks, table(list(_overview(records)))])


def _runs(record: Record) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for row in record["budgets"]:
        yield f"{row['policy']} at {row['budget']:g}", row
    for row in record.get("peers", ()):
        for policy, mine in row.get("ours", {}).items():
            yield f"{policy} beside {row['peer']}", {"bytes": row["peak"], **mine}


def _beside_peers(record: Record) -> Iterator[dict[str, Any]]:
    """Yield a row for each peer, with what rematfn takes at its peak."""
    for peer in record["peers"]:
        row = {column: value for column, value in peer.items() if column not in ("ours", "seconds")}
        for policy, mine in peer.get("ours", {}).items():
            if "needs" in mine:
                row[policy] = f"needs {mine['needs']:,}"
                continue
            for column, short in (("replayed cost", "cost"), ("time ratio", "time")):
                if column in mine:
                    row[f"{policy}, {column}"] = mine[column]
                if column in mine and column in peer:
                    row[f"{policy} ahead, {short}"] = mine[column] <= peer[column]
        yield row


def _overview(records: Mapping[str, Record]) -> Iterator[dict[str, Any]]:
    """Yield a row for each network and policy: cost and time at each budget."""
    for name, record in records.items():
        for policy in ("online", "guided"):
            row: dict[str, Any] = {"network": name, "policy": policy}
            for cell in record["budgets"]:
                if cell["policy"] == policy:
                    row[f"{cell['budget']:g}"] = _short(cell)
            yield row


def _short(cell: Mapping[str, Any]) -> str:
    if "needs" in cell:
        return f"needs {cell['needs']:,}"
    time = f", {cell['time ratio']:.2f}x" if "time ratio" in cell else ""
    return f"+{cell['replayed cost']:.1%}{time}"


def _listed(title: str, sentences: Iterable[str]) -> str:
    lines = [f"- {sentence}" for sentence in sentences]
    return "\n".join([f"**{title}:** {'' if lines else 'none.'}".strip(), "", *lines])


def _seconds(record: Record) -> str:
    seconds = record["eager"].get("seconds")
    return "" if seconds is None else f", {seconds:.3f} s"
