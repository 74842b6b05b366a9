# SPDX-License-Identifier: Apache-2.0
"""The benchmark suite: networks inside budgets, beside the peers; public traces in the simulator.

Writes a document, a record in JSON and a picture for each network. Networks that are not run keep
what an earlier run has recorded.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import shlex
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("KINETO_LOG_LEVEL", "5")  # the profiler is chatty

import torch
import traces
from cells import Bench, budget_rows, peer_row
from measure import RESULTS, in_fresh_process, machine
from networks import NETWORKS, TINY
from peers import PEERS
from report import write
from tqdm import tqdm

import rematfn

BUDGETS = (0.7, 0.5, 0.4, 0.3, 0.2, 0.15, 0.1)


def simulated(bench: Bench, fraction: float = 0.4) -> bool | str:
    """Return True if the simulator predicts what the engine does, else what it says instead."""
    budget = int(fraction * bench.peak)
    trace = rematfn.record(bench.eager)
    predicted = rematfn.simulate(trace, budget, rematfn.policies.ON())
    step = rematfn.remat(bench.eager, budget, policy=rematfn.policies.ON())
    bench.run(step)
    for count in ("operators", "evictions", "replays", "peak_bytes"):
        a, b = getattr(predicted, count), getattr(rematfn.stats(step), count)
        if a != b:
            return f"the simulator predicts {a:,} {count}, the engine has {b:,}"
    return True


def command() -> str:
    """Return the command line, with the names of folders and not where they are."""
    arguments = [Path(a).name if os.sep in a else a for a in sys.argv[1:]]
    return shlex.join(["benchmarks/bench.py", *arguments])


def measure_network(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return the record of one network."""
    faulthandler.enable()  # a compiler that crashes should leave a trace
    torch.set_num_threads(options.threads)
    network = TINY if name == TINY.name else NETWORKS[name]
    bench = Bench(network)
    record: dict[str, Any] = {
        "about": network.about,
        "machine": machine(),
        "command": command(),
        "eager": {"peak": bench.peak, "resident": bench.resident(bench.eager)},
        "budgets": [],
        "peers": [],
    }
    try:
        record["simulated"] = simulated(bench)
    except rematfn.BudgetError:
        record["simulated"] = True
    for fraction in options.budgets:
        record["budgets"] += budget_rows(bench, fraction, options.repeats)
    failed: dict[str, str] = {}  # what a compiler refuses once, it refuses at every setting
    for peer in () if options.no_peers else PEERS:
        if peer.compiler in failed:
            row: dict[str, Any] = {"peer": peer.name, "refused": failed[peer.compiler]}
        else:
            row = peer_row(bench, peer, options.repeats, options.patience)
        if peer.compiler and "refused" in row:
            failed[peer.compiler] = row["refused"]
        record["peers"].append(row)
    seconds = [row["seconds"] / row["time ratio"] for row in record["budgets"] if "seconds" in row]
    if seconds:
        record["eager"]["seconds"] = min(seconds)
    return record


def measure_traces(folder: Path, bar: tqdm[Any]) -> dict[str, Any]:
    """Return the record of the public traces."""
    rows = []
    for row in traces.rows(folder):
        bar.set_description(f"trace of {row['trace']}")
        rows.append(row)
        bar.update()
    return {
        "about": "Total cost / cost without a budget. " + " ".join((traces.__doc__ or "").split()),
        "machine": machine(),
        "command": command(),
        "rows": rows,
    }


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--networks", nargs="*", default=list(NETWORKS), choices=list(NETWORKS), metavar="NAME",
        help=f"some of: {', '.join(NETWORKS)}",
    )  # fmt: skip
    parser.add_argument("--budgets", type=float, nargs="+", default=list(BUDGETS))
    parser.add_argument(
        "--repeats", type=int, default=5, help="timed rounds for each cell; with 0, no times"
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--patience", type=float, default=120, help="seconds that a peer may take to compile"
    )
    parser.add_argument("--no-peers", action="store_true", help="rematfn and eager only")
    parser.add_argument(
        "--traces", type=Path, default=os.environ.get("TRACES"), metavar="FOLDER",
        help="where the public traces are (or the environment's TRACES); skipped if not given",
    )  # fmt: skip
    parser.add_argument("--out", type=Path, default=RESULTS, help="a folder for the results")
    parser.add_argument(
        "--quick", action="store_true", help="one tiny network, two budgets, no peers, no traces"
    )
    return parser.parse_args(arguments)


def main() -> None:
    """Measure what was asked for; save after each network."""
    options = parse()
    networks = list(options.networks)
    if options.quick:
        networks, options.budgets, options.repeats = [TINY.name], [0.7, 0.4], 1
        options.no_peers, options.traces = True, None
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "bench.json"
    results: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"networks": {}}
    steps = 0 if options.traces is None else len(traces.REFERENCE) * len(traces.FRACTIONS)
    with tqdm(total=len(networks) + steps, file=sys.stderr) as bar:
        for name in networks:
            bar.set_description(name)
            # Some peers leave hooks behind.
            results["networks"][name] = in_fresh_process(measure_network, name, options)
            path.write_text(json.dumps(results, indent=1) + "\n")
            bar.update()
        if options.traces is not None:
            results["traces"] = measure_traces(options.traces, bar)
            path.write_text(json.dumps(results, indent=1) + "\n")
    print(write(options.out, results))
    if options.traces is None:
        print("The public traces were skipped: give --traces FOLDER.")


if __name__ == "__main__":
    main()
