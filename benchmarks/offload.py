# SPDX-License-Identifier: Apache-2.0
"""Moving to a disk, computing again, and the choice between the two, beside eager.

One process; every round runs eager and all candidates in turn, and times are medians of the ratios
of a round. Of the peers, `checkpoint` of each block runs. `save_on_cpu` is left out: it moves to
the CPU what is there already, and so saves nothing here.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from cells import Bench, Row
from measure import RESULTS, interleaved, save
from networks import (
    TINY,
    Network,
    Step,
    cnn,
    densenet,
    gpt,
    hessian_vector_product,
    in_order,
    inner_loop,
    lstm,
    mlp,
    plain,
    resnet,
    unet,
)
from networks import _network as network
from peers import PEERS
from picture import draw_link

import rematfn
from rematfn import Disk
from rematfn._transform.recorded import finish_searches

MIB = 2**20

# Larger than those of the other benchmarks: there is something to move, and time to do it.
CASES = {
    n.name: n
    for n in [
        network("gpt", "GPT, 6 layers, width 384", plain, lambda: gpt(6, 384, 6, 256, 8)),
        network("resnet", "ResNet, 9 blocks", plain, lambda: resnet((3, 3, 3), 32, 64, 16)),
        network("unet", "U-Net, 3 halvings", plain, lambda: unet(3, 32, 128, 4)),
        network("lstm", "LSTM, 128 steps of a cell", plain, lambda: lstm(128, 256, 256)),
        network("densenet", "DenseNet, 3 x 8 layers", plain, lambda: densenet(8, 12, 64, 16)),
        network(
            "maml", "MAML, 10 inner steps", inner_loop, lambda: mlp(4, 512, 1024), steps=10
        ),
        network("hvp", "CNN, 8 layers", hessian_vector_product, lambda: cnn(8, 32, 64, 16)),
    ]
}
BANDWIDTHS = (1e7, 3e7, 1e8, 3e8, 1e9, 3e9, 1e10, 1e11)  # bytes per second


class Candidate:
    """A step under one way to hold a budget."""

    def __init__(self, bench: Bench, way: str, budget: int, bandwidth: float | None = None) -> None:
        self.way = way
        self.budget = budget
        self.disk = None if way == "remat" else Disk(bandwidth=bandwidth)
        self.transformed: Any = None

        def transform(f: Callable[..., Any]) -> Callable[..., Any]:
            if way == "offload":
                self.transformed = rematfn.offload(f, budget, to=self.disk)
            else:
                self.transformed = rematfn.remat(f, budget, offload=self.disk)
            return self.transformed  # type: ignore[no-any-return]

        self.step: Step = bench.program.make_step(transform, in_order)

    def measure(self, bench: Bench) -> Row:
        """Return what a guided call does, but for its time.

        Raises:
            rematfn.BudgetError: It does not fit.
        """
        exact = bench.is_exact(bench.run(self.step)[0])  # is recorded
        exact = bench.is_exact(bench.run(self.step)[0]) and exact
        finish_searches()
        results, memory = bench.count(self.step)
        exact = bench.is_exact(results) and exact
        return {"peak / budget": memory.peak / self.budget, "exact": exact}

    def moved(self, eager: float, ratio: float) -> Row:
        """Return what the last call moved; ``eager`` are the seconds of eager's step."""
        stats = rematfn.stats(self.transformed)
        row: Row = {
            "call": stats.call,
            "replays": stats.replays,
            "replayed cost": stats.replayed_cost,
        }
        if self.disk is None:
            return row
        row |= {
            "moves": stats.moves,
            "MiB out": (stats.moved_bytes or 0) / MIB,
            "MiB back": (stats.returned_bytes or 0) / MIB,
            "late": stats.late_returns,
            "turned back": stats.turned_back,
            "waited, s": stats.waited,
        }
        out, into = self.disk.bandwidth_out, self.disk.bandwidth_in
        if out and into and stats.moved_bytes:
            # Beyond eager and what was computed again; the directions are served side by side.
            exposed = max(0.0, (ratio - 1 - (stats.replayed_cost or 0.0)) * eager)
            link = max(stats.moved_bytes / out, (stats.returned_bytes or 0) / into)
            row |= {"exposed, s": exposed, "bytes / bandwidth, s": link}
        return row

    def foretold(self) -> float | None:
        """Return the seconds beyond the program's own that the plan of the last call foretells."""
        last = self.transformed.last_call
        program = None if last is None else last.forecast.program
        if program is None or program.planned is None:
            return None
        return float(program.planned.overhead())


def measured(
    bench: Bench, candidates: Sequence[Candidate], repeats: int
) -> list[tuple[Row, float]]:
    """Return a row for each candidate, and the seconds of eager's step beside it."""
    rows: dict[int, Row] = {}
    for i, candidate in enumerate(candidates):
        row: Row = {"way": candidate.way}
        try:
            row |= candidate.measure(bench)
        except rematfn.BudgetError:
            row["does not fit"] = True
        rows[i] = row
    steps = {str(i): c.step for i, c in enumerate(candidates) if "does not fit" not in rows[i]}
    steps["eager"] = bench.eager
    try:
        seconds = interleaved(
            {name: lambda step=step: bench.run(step)[1] for name, step in steps.items()}, repeats
        )
    except rematfn.BudgetError as error:
        raise RuntimeError("a call that fitted did not fit again") from error
    eager = statistics.median(seconds["eager"])
    found = []
    for i, candidate in enumerate(candidates):
        if str(i) in seconds:
            pairs = zip(seconds[str(i)], seconds["eager"], strict=True)
            ratio = statistics.median(a / b for a, b in pairs)
            rows[i] |= {"time / eager": ratio, **candidate.moved(eager, ratio)}
        found.append((rows[i], eager))
    return found


def budget_rows(name: str, bench: Bench, fraction: float, repeats: int) -> list[Row]:
    """Return a row for each way to hold a budget of ``fraction`` of the peak."""
    budget = int(fraction * bench.peak)
    ways = [Candidate(bench, way, budget) for way in ("remat", "offload", "hybrid")]
    return [
        {"network": name, "budget": fraction, "MiB": budget / MIB, "eager, s": eager, **row}
        for row, eager in measured(bench, ways, repeats)
    ]


def peer_row(name: str, bench: Bench, repeats: int) -> Row:
    """Return the row of `checkpoint` of each block."""
    peer = PEERS[0]
    step = bench.program.make_step(peer.transform, peer.run)
    row: Row = {"network": name, "way": peer.name}
    try:
        results, memory = bench.count(step)
    except RuntimeError as error:  # what `checkpoint` does not take, such as transforms
        return {**row, "call": str(error).splitlines()[0][:60]}
    seconds = interleaved(
        {n: lambda s=s: bench.run(s)[1] for n, s in (("peer", step), ("eager", bench.eager))},
        repeats,
    )
    ratio = statistics.median(
        a / b for a, b in zip(seconds["peer"], seconds["eager"], strict=True)
    )
    return {
        **row,
        "budget": round(memory.peak / bench.peak, 3),
        "exact": bench.is_exact(results),
        "time / eager": ratio,
    }


def link_rows(
    bench: Bench, fraction: float, bandwidths: Sequence[float], repeats: int
) -> list[Row]:
    """Return a row for each bandwidth of a throttled disk, measured and foretold."""
    budget = int(fraction * bench.peak)
    rows = []
    for bandwidth in bandwidths:
        candidate = Candidate(bench, "hybrid", budget, bandwidth)
        ((row, eager),) = measured(bench, [candidate], repeats)
        more = candidate.foretold()
        if more is not None and math.isfinite(more):
            row["foretold / eager"] = 1 + more / eager
        rows.append({"bytes per second": bandwidth, **row})
    return rows


def slower_cells(rows: Sequence[Row]) -> list[str]:
    """Return the cells where the hybrid takes 1.05 of the better of its parts, or more."""
    cells: dict[tuple[str, float], dict[str, float]] = {}
    for row in rows:
        if "time / eager" in row and "MiB" in row:
            cells.setdefault((row["network"], row["budget"]), {})[row["way"]] = row["time / eager"]
    found = []
    for (name, budget), times in cells.items():
        parts = [times[way] for way in ("remat", "offload") if way in times]
        if parts and "hybrid" in times and times["hybrid"] > 1.05 * min(parts):
            found.append(f"{name} at {budget:g}: {times['hybrid']:.2f} beside {min(parts):.2f}")
    return found


def main() -> None:
    """Measure, save the tables and the picture; after each network, what there is so far."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--networks", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--budgets", type=float, nargs="+", default=[0.5, 0.3, 0.2, 0.1, 0.05])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--link", default="gpt", choices=[*CASES, "none"], help="what is throttled")
    parser.add_argument("--bandwidths", type=float, nargs="+", default=BANDWIDTHS)
    parser.add_argument("--quick", action="store_true", help="a tiny network, to see it work")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    cases: list[Network] = [TINY] if options.quick else [CASES[n] for n in options.networks]
    if options.quick:
        options.budgets, options.repeats, options.bandwidths = [0.5], 2, [1e8, 1e11]
    rows: list[Row] = []
    for case in cases:
        bench = Bench(case)
        for fraction in options.budgets:
            cell = budget_rows(case.name, bench, fraction, options.repeats)
            print(*cell, sep="\n", flush=True)  # all of them take long
            rows += cell
        rows.append(peer_row(case.name, bench, options.repeats))
        save("offload", "A disk beside a budget", rows, options.out)
    print("\n".join(slower_cells(rows)))
    if options.link != "none":
        bench = Bench(TINY if options.quick else CASES[options.link])
        link = link_rows(bench, 0.3, options.bandwidths, options.repeats)
        title = "The hybrid at 0.3 of the peak, on a throttled disk"
        save("offload-link", title, link, options.out)
        draw_link(options.out / "offload-link.png", link)


if __name__ == "__main__":
    main()
