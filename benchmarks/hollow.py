# SPDX-License-Identifier: Apache-2.0
"""Budgets as CUDA's own allocator counts, without a GPU.

`hollow.cpp` takes the place of CUDA's runtime and of cuBLAS: torch's code for CUDA runs, kernels
compute nothing. So the memory of a step is what it would be on a GPU, byte for byte, and so is what
the host does; its values are not, nor is its time. It needs a build of torch for CUDA 13, and its
networks take no memory of this machine.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import optree
import torch
from device import REAL, SMALL, on
from measure import save, table
from networks import Program, Step, functional, in_order, plain, untransformed

import rematfn
from rematfn import _C
from rematfn.testing._timeline import finish_on

MIB = 2**20
ABOUT = """
`peak`: `torch.cuda.max_memory_allocated()` above the start of a call. `results`: gradients, which
are the caller's one by one, as soon as each is complete; they come on top of the budget, as do the
workspaces of cuBLAS in the call that makes them. `in a graph`: of a fifth call, captured by
`torch.cuda.graph()`. `own`: what rematfn counts. `reserved`: what the driver sees above the start,
after `empty_cache()`; `expandable`: the same with
`PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True`. *Half* is a device that has half of eager's peak
for the step. None of this is a GPU's figure: kernels compute nothing.
"""
Row = dict[str, object]


def build(folder: Path) -> Path:
    """Compile the runtime; torch's package for CUDA has the headers, and triton what they lack."""
    site = Path(torch.__file__).parents[1]
    headers = [site / "nvidia/cu13/include", site / "triton/backends/nvidia/include"]
    if missing := [str(path) for path in headers if not path.exists()]:
        sys.exit(f"hollow.py: {', '.join(missing)}: not found; a build for CUDA 13 brings them.")
    library = folder / "libcuda.so.1"
    source = Path(__file__).with_name("hollow.cpp")
    command = [*shlex.split(os.environ.get("CXX", "c++")), "-std=c++20", "-O1", "-fPIC", "-shared"]
    command += [*(f"-isystem{path}" for path in headers), str(source), "-o", str(library)]
    subprocess.run([*command, "-pthread", f"-Wl,-soname,{library.name}"], check=True)
    return library


def empty_device() -> None:
    """Have freed what nobody holds any more, and given back to the driver."""
    finish_on(torch.device("cuda"))
    gc.collect()
    torch.cuda.empty_cache()


def peak_of(step: Step) -> tuple[int, int]:
    """Return what the step takes at the allocator and at the driver, in bytes."""
    empty_device()
    torch.cuda.reset_peak_memory_stats()
    before, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    step()
    return (
        torch.cuda.max_memory_allocated() - before,
        torch.cuda.max_memory_reserved() - reserved,
    )


def peak_in_graph(step: Step) -> int:
    """Return what the step takes at the allocator while a graph captures it, in bytes."""
    graph = torch.cuda.CUDAGraph()

    def captured() -> object:
        with torch.cuda.graph(graph):
            return step()

    return peak_of(captured)[0]


def bytes_of(results: object) -> int:
    """Return what the tensors in the results hold."""
    tensors: list[torch.Tensor] = optree.tree_leaves(results)  # type: ignore[arg-type]
    return sum(t.untyped_storage().nbytes() for t in tensors)


def in_budgets(name: str, made: Program) -> Iterator[Row]:
    """Yield a row for eager, and one for each budget."""
    eager = made.make_step(untransformed, in_order)
    results = bytes_of(eager())
    most, reserved = peak_of(eager)
    yield {
        "network": name,
        "way": "eager",
        "peak, calls 1 to 4, MiB": f"{most / MIB:.1f}",
        "in a graph, MiB": peak_in_graph(eager) / MIB,
        "results, MiB": results / MIB,
        "reserved, MiB": reserved / MIB,
    }
    for fraction in (0.6, 0.4):
        budget = int(fraction * most)
        found: list[Callable[..., object]] = []

        def remat(f: Callable[..., object]) -> Callable[..., object]:
            found.append(rematfn.remat(f, budget))  # noqa: B023
            return found[0]  # noqa: B023

        step = made.make_step(remat, in_order)
        workspaces = _C.workspace_bytes()
        row: Row = {"network": name, "way": f"remat, {fraction}", "budget, MiB": budget / MIB}
        try:
            counts = [peak_of(step) for _ in range(4)]
            in_graph = peak_in_graph(step)
        except rematfn.BudgetError:
            yield row | {"peak, calls 1 to 4, MiB": "BudgetError"}
            continue
        stats = rematfn.stats(found[0])
        peaks = [peak for peak, _ in counts]
        yield row | {
            "peak, calls 1 to 4, MiB": ", ".join(f"{peak / MIB:.1f}" for peak in peaks),
            "in a graph, MiB": in_graph / MIB,
            "own, MiB": (stats.peak_bytes or 0) / MIB,
            "reserved, MiB": counts[-1][1] / MIB,
            "replayed": stats.replayed_cost,
            "within": max(*peaks, in_graph) <= budget + results + _C.workspace_bytes() - workspaces,
        }


def in_half(name: str, made: Program) -> Iterator[Row]:
    """Yield rows for a device that has half of eager's peak for the step."""
    most, _ = peak_of(made.make_step(untransformed, in_order))
    empty_device()
    limit = torch.cuda.memory_allocated() + most // 2
    torch.cuda.set_per_process_memory_fraction(
        limit / torch.cuda.get_device_properties(0).total_memory
    )
    for way, transform in {"eager": untransformed, "remat, no budget": rematfn.remat}.items():
        step = made.make_step(transform, in_order)
        try:
            peaks = [peak_of(step)[0] for _ in range(4)]
            told = ", ".join(f"{peak / MIB:.1f}" for peak in peaks)
        except torch.OutOfMemoryError:
            told = "out of memory"
        yield {"network": name, "way": f"{way}, half", "peak, calls 1 to 4, MiB": told}
        empty_device()
    torch.cuda.set_per_process_memory_fraction(1.0)


def measure(small: bool) -> Iterator[Row]:
    """Yield the rows of all networks, in a process that has the hollow device."""
    torch.backends.cudnn.enabled = False
    torch.backends.cuda.enable_cudnn_sdp(False)
    for network in SMALL if small else REAL:
        chain, x, y = on(torch.device("cuda"), network.make(network.batch))
        programs = {network.name: plain(chain, x, y)}
        if "GPT" in network.name:  # batch norms write to what torch.func captures
            programs[f"{network.name}, torch.func"] = functional(chain, x, y)
        for name, program in programs.items():
            yield from in_budgets(name, program)
            if not small:  # a segment of the allocator's is larger than these
                yield from in_half(name, program)


def measured(library: Path, *, small: bool, allocator: str) -> list[Row]:
    """Return the rows of a process that has the device, and these settings of the allocator."""
    found = library.with_name("rows.json")
    extra = {"LD_PRELOAD": str(library), "PYTORCH_CUDA_ALLOC_CONF": allocator}
    # For segments that other processes may map, torch 2.15 asks NVML how, which is not here.
    extra["TORCH_CUDA_EXPANDABLE_SEGMENTS_IPC"] = "0"
    command = [sys.executable, __file__, "--rows", str(found), *(["--small"] if small else [])]
    subprocess.run(command, env=os.environ | extra, check=True)
    rows: list[Row] = json.loads(found.read_text())
    return rows


def main() -> None:
    """Measure with segments of either kind, print and save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true", help="small networks, nothing is saved")
    parser.add_argument("--rows", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if torch.version.cuda is None:
        sys.exit("hollow.py: this torch is built for CPUs; a build for CUDA 13 is needed.")
    if options.rows:
        options.rows.write_text(json.dumps(list(measure(options.small))))
        return
    with tempfile.TemporaryDirectory() as folder:
        library = build(Path(folder))
        rows = measured(library, small=options.small, allocator="")
        other = measured(library, small=options.small, allocator="expandable_segments:True")
    for row, its in zip(rows, other, strict=True):
        if "reserved, MiB" in row:
            row["expandable, MiB"] = its["reserved, MiB"]
    if options.small:
        print(table(rows))
    else:
        save("hollow", "On CUDA without a GPU (`benchmarks/hollow.py`)", rows, about=ABOUT)
    if any(row.get("within") is False for row in rows + other):
        sys.exit("hollow.py: a peak is above its budget.")


if __name__ == "__main__":
    main()
