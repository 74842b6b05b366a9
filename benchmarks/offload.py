# SPDX-License-Identifier: Apache-2.0
"""Moving to a disk, computing again, and the choice between the two, beside eager.

Each network runs in a process of its own. In a round eager and all candidates take turns, and times
are medians of the ratios of a round. Of the peers, `checkpoint` of each block saves memory here.
`save_on_cpu` moves to the CPU what is there already; `OffloadActivations` of torchtune needs an
accelerator. Both are asked all the same.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from cells import Bench, Row
from measure import (
    RESULTS,
    compared,
    machine,
    measured_parts,
    place,
    print_found,
    section,
    table,
    write_document,
)
from moving import MIB, WAYS, Candidate, DiskSpeed, below_floor, measured, times
from networks import (
    TINY,
    State,
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
from peers import PEERS, Peer
from picture import draw_link

# Larger than those of the other benchmarks: there is something to move, and time to do it.
CASES = {
    n.name: n
    for n in [
        network("gpt", "GPT, 9 layers, width 384", plain, lambda: gpt(9, 384, 6, 256, 8)),
        network("resnet", "ResNet, 9 blocks", plain, lambda: resnet((3, 3, 3), 32, 64, 48)),
        network("unet", "U-Net, 3 halvings", plain, lambda: unet(3, 32, 128, 12)),
        network("lstm", "LSTM, 128 steps of a cell", plain, lambda: lstm(128, 256, 512)),
        network("densenet", "DenseNet, 3 x 8 layers", plain, lambda: densenet(8, 12, 64, 32)),
        network("maml", "MAML, 10 inner steps", inner_loop, lambda: mlp(4, 512, 2048), steps=10),
        network("hvp", "CNN, 8 layers", hessian_vector_product, lambda: cnn(8, 32, 64, 32)),
        TINY,
    ]
}
LINK = "link"  # the part of the results that is about a throttled disk
PARTS = [name for name in CASES if name != TINY.name] + [LINK]
BUDGETS = (0.5, 0.3, 0.2, 0.1)
BANDWIDTHS = (1e7, 3e7, 1e8, 3e8, 1e9, 3e9, 1e10, 1e11)  # bytes per second

ALTERNATIVE = (
    "Three curves over the disk's bandwidth: the time of a step, measured and predicted; the MiB "
    "moved out; and the operators replayed"
)
ABOUT = """
*remat* computes again, *offload* moves, *hybrid* does either, value by value. Each holds the
budget, a fraction of eager's peak. In the last budget of some networks each operator fits, but
computing again does not. Where a budget does not fit, the `BudgetError` says what it takes.

- *Time* is the median over rounds of the ratio to eager, with the least and the most. *Others* is
  how many cores other processes kept busy meanwhile. Rounds that were disturbed are run again.
- *Time / better* is the median over rounds of the hybrid's ratio to the better of the other two.
  Where that is above 1.03, there are seven times as many rounds, and all count.
- *Peak* is counted at the allocator.
- *Exposed* is what a step took beyond eager's time and beyond what was computed again.
- *Bytes / bandwidth* is how long this disk takes for the bytes while nothing is computed, as
  measured in the same process.
"""


def _save_on_cpu(blocks: Sequence[Callable[..., State]], state: State) -> State:
    with torch.autograd.graph.save_on_cpu():
        return in_order(blocks, state)


def _offload_activations(blocks: Sequence[Callable[..., State]], state: State) -> State:
    with contextlib.redirect_stdout(sys.stderr):  # what it lacks it prints; rows go there
        torchtune = importlib.import_module("torchtune.training._activation_offloading")
    with torchtune.OffloadActivations():
        return in_order(blocks, state)


MOVERS = [
    Peer("save_on_cpu", run=_save_on_cpu),
    Peer("torchtune, OffloadActivations", run=_offload_activations),
]


def peer_row(bench: Bench, peer: Peer, repeats: int) -> Row:
    """Return the row of a peer, which has no budget: the peak that it comes to."""
    step = bench.program.make_step(peer.transform, peer.run)
    row: Row = {"way": peer.name}
    try:
        bench.run(step)
        results, memory = bench.count(step)
    except Exception as error:  # whatever it refuses with is its answer
        return {**row, "refused": f"{type(error).__name__}: {str(error).splitlines()[0][:80]}"}
    row |= {"budget": memory.peak / bench.peak, "exact": bench.is_exact(results)}
    del results
    seconds, others = times(bench, {"peer": step}, repeats)
    row |= compared(seconds["peer"], seconds["eager"])
    return row | {"eager, s": statistics.median(seconds["eager"]), "others, cores": others}


def disk_speed(options: argparse.Namespace) -> DiskSpeed:
    """Return what the disk carries, measured with few bytes where little is asked for."""
    return DiskSpeed.measured(8 * MIB) if options.quick else DiskSpeed.measured()


def measure_network(name: str, options: argparse.Namespace) -> Iterator[Row]:
    """Yield what there is to say of one network, and then its rows."""
    bench = Bench(CASES[name])
    speed = disk_speed(options)
    about = f"{CASES[name].about}. Eager's peak: {bench.peak / MIB:.0f} MiB. The disk: {speed}."
    yield {"about": about, "peak": bench.peak, "machine": machine()}
    for peer in (PEERS[0], *MOVERS):
        yield peer_row(bench, peer, options.repeats)
    budgets = [int(fraction * bench.peak) for fraction in options.budgets]
    below = None if options.quick else below_floor(bench)
    if below is not None:
        budgets.append(below)
    for budget in budgets:
        candidates = [Candidate(bench, way, budget) for way in WAYS]
        for row in measured(bench, candidates, options.repeats, speed):
            yield {"budget": budget / bench.peak, "MiB": budget / MIB, **row}


def measure_link(options: argparse.Namespace) -> Iterator[Row]:
    """Yield what the hybrid does on a disk that is made slower."""
    case = CASES[options.throttled]
    bench = Bench(case)
    speed = disk_speed(options)
    about = (
        f"{case.about}, within {options.fraction:g} of its peak, on a disk that carries at most so"
        f" many MB/s each way; 0: computing again alone. As fast as it goes, the disk carries"
        f" {speed}."
    )
    yield {"about": about, "disk": min(speed.out, speed.into), "machine": machine()}
    budget = int(options.fraction * bench.peak)
    (alone,) = measured(bench, [Candidate(bench, "remat", budget)], options.repeats, speed)
    yield {"MB/s": 0.0, **alone}
    for bandwidth in options.bandwidths:
        candidate = Candidate(bench, "hybrid", budget, bandwidth)
        (row,) = measured(bench, [candidate], options.repeats, speed)
        yield {"MB/s": bandwidth / 1e6, **row, "predicted, s": candidate.predicted()}


def slower(records: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return a line for each cell whose hybrid takes 1.05 of the better of its parts, or more."""
    return [
        f"- {name} at {row['budget']:.3g}: {row['time / better']:.3f}"
        for name, record in records.items()
        for row in record["rows"]
        if row.get("time / better", 0.0) >= 1.05
    ]


def write(folder: Path, results: Mapping[str, Any]) -> str:
    """Write the document and the picture into ``folder``; return the document."""
    parts = ["# A disk beside a budget (`python benchmarks/offload.py`)", ABOUT.strip()]
    networks = {name: results[name] for name in results if name != LINK}
    lines = slower(networks) or ["- none"]
    parts += ["Where the hybrid takes 1.05 of the better of the two, or more:", "\n".join(lines)]
    for name, record in networks.items():
        rows = sorted(record["rows"], key=lambda row: "MiB" not in row)  # peers come last
        parts += section(name, {**record, "rows": rows})
    if LINK in results:
        record = results[LINK]
        draw_link(folder / "offload-link.png", record)
        parts += ["## A throttled disk", record["about"], f"![{ALTERNATIVE}](offload-link.png)"]
        parts += [table(record["rows"]), place(record["machine"])]
    return write_document(folder / "offload.md", parts)


def main() -> None:
    """Measure, and save after each part; what is not measured stays as it was."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", nargs="+", default=PARTS, choices=PARTS)
    parser.add_argument("--budgets", type=float, nargs="+", default=BUDGETS)
    parser.add_argument("--repeats", type=int, default=3, help="timed rounds for each cell")
    parser.add_argument("--throttled", default="gpt", choices=CASES, help="on a throttled disk")
    parser.add_argument("--fraction", type=float, default=0.3, help="of its peak, there")
    parser.add_argument("--bandwidths", type=float, nargs="+", default=BANDWIDTHS)
    parser.add_argument("--quick", action="store_true", help="a tiny network, to see it work")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--part", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.quick:
        options.parts, options.budgets, options.repeats = [TINY.name, LINK], [0.5], 2
        options.throttled, options.fraction, options.bandwidths = TINY.name, 0.5, [1e8, 1e11]
    if options.part:
        is_link = options.part == LINK
        return print_found(
            measure_link(options) if is_link else measure_network(options.part, options)
        )
    results = measured_parts(__file__, options.parts, sys.argv[1:], options.out / "offload.json")
    print(write(options.out, results))


if __name__ == "__main__":
    main()
