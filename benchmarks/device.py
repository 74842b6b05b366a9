# SPDX-License-Identifier: Apache-2.0
"""On an accelerator: moved to the host, computed again, or chosen, beside what torch has.

Each network is trained for a step, in bfloat16 by autocast: by eager, by `torch.utils.checkpoint`
of each block, by `save_on_cpu(pin_memory=True)`, and by ours within half of eager's peak and within
the peak of the checkpointed step, as the device's own allocator counts them. With `--largest`, each
is asked for the largest batch that it trains in the memory that eager takes for the first.
`--device fake` runs all of it, small, on a device that is made for tests: its figures say nothing
but that it runs.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from measure import interleaved, save
from networks import (
    Chain,
    Runner,
    Step,
    Transform,
    gpt,
    in_order,
    plain,
    resnet,
    untransformed,
)
from peers import PEERS
from torch.autograd.graph import save_on_cpu

import rematfn

ABOUT = """
Peaks are counted by the device's own allocator: beyond a budget are what the step returns and the
workspaces of libraries. *Time* is over eager's, call by call; *calls 2 to 8* the mean of these.
*Largest batch*: in the memory that eager takes for the first.
"""
Row = dict[str, object]
WARM_UP = 24  # calls of ours: the first is recorded, then times are learnt and plans get better


@dataclass(frozen=True)
class Network:
    """A step by batch size, at the size for a real device and at one for the device of tests."""

    name: str
    batch: int
    make: Callable[[int], Any]


REAL = [
    Network("GPT, 24 layers of 1024, 302 M", 16, lambda b: gpt(24, 1024, 16, 1024, b)),
    Network("ResNet, 3-4-6-3 blocks, 224 x 224", 128, lambda b: resnet((3, 4, 6, 3), 64, 224, b)),
]
SMALL = [
    Network("GPT, 4 layers of 64", 4, lambda b: gpt(4, 64, 2, 64, b)),
    Network("ResNet, 2-2 blocks, 16 x 16", 4, lambda b: resnet((2, 2), 16, 16, b)),
]


@dataclass(frozen=True)
class Way:
    """How a step is trained."""

    name: str
    transform: Callable[[int, rematfn.Host], Transform]  # given the budget
    run: Runner = in_order
    budget: str | float = 0.0  # the way whose peak it is, or a fraction of eager's


def saved_on_host(f: Callable[..., Any]) -> Callable[..., Any]:
    """Keep what autograd saves in `f` in pinned memory of the host."""

    def wrapped(*args: Any) -> Any:
        with save_on_cpu(pin_memory=True):
            return f(*args)

    return wrapped


WAYS = [
    Way("eager", lambda budget, host: untransformed),
    Way(
        "checkpoint, each block",
        lambda budget, host: untransformed,
        next(p.run for p in PEERS if p.name == "checkpoint, each block"),
    ),
    Way("save_on_cpu, pinned", lambda budget, host: saved_on_host),
]
for within in (0.5, "checkpoint, each block"):
    of = "half of the peak" if within == 0.5 else "checkpoint's peak"
    WAYS += [
        Way(
            f"remat, {of}",
            lambda budget, host: lambda f: rematfn.remat(f, budget),
            budget=within,
        ),
        Way(
            f"remat and offload, {of}",
            lambda budget, host: lambda f: rematfn.remat(f, budget, offload=host),
            budget=within,
        ),
        Way(
            f"offload, {of}",
            lambda budget, host: lambda f: rematfn.offload(f, budget, to=host),
            budget=within,
        ),
    ]


def main() -> None:
    """Measure, print and save."""
    options = arguments()
    if options.device == "fake":
        sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
        import fake_device

        fake_device.load()
    device = torch.device(options.device)
    networks = SMALL if options.device == "fake" else REAL
    module = torch.get_device_module(device)
    name = "fake" if options.device == "fake" else module.get_device_name(device)
    title = f"On one {name} (`python benchmarks/device.py --device {options.device}`)"
    rows: list[Row] = []
    for network in networks:
        rows += rows_of(network, device, options.repeats)
        if options.largest:
            rows += largest_batches(network, device)
        save(f"device-{options.device}", title, rows, about=ABOUT)


def arguments() -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__)
    found = torch.accelerator.current_accelerator()
    parser.add_argument("--device", default="fake" if found is None else found.type)
    parser.add_argument("--repeats", type=int, default=5, help="rounds, after the warm-up")
    parser.add_argument("--largest", action="store_true", help="the largest batches, too")
    return parser.parse_args()


def rows_of(network: Network, device: torch.device, repeats: int) -> Iterator[Row]:
    """Yield a row for each way."""
    made = on(device, network.make(network.batch))
    peaks: dict[str, int] = {}
    steps: dict[str, Step] = {}
    hosts = {way.name: rematfn.Host() for way in WAYS}
    refused: dict[str, str] = {}
    early: dict[str, float] = {}
    for way in WAYS:
        # Of a step's peak, what a level counts is what the step makes.
        of = way.budget
        budget = peaks.get(of, 0) if isinstance(of, str) else int(of * peaks.get("eager", 0))
        steps[way.name] = plain(*made).make_step(way.transform(budget, hosts[way.name]), way.run)
        try:
            run = timed(steps[way.name], device)
            taken = [run() for _ in range(WARM_UP if way.budget else 4)]
            early[way.name] = statistics.mean(taken[1:8])
            peaks[way.name] = peak_of(steps[way.name], device)
        except (RuntimeError, rematfn.BudgetError) as error:
            refused[way.name] = str(error).splitlines()[0][:120]
            del steps[way.name]
    before = {name: host.waited for name, host in hosts.items()}
    moved = {name: host.bytes_out + host.bytes_in for name, host in hosts.items()}
    seconds = interleaved({n: timed(s, device) for n, s in steps.items()}, repeats)
    calls = 2 * repeats  # of each, one before each that counts
    for way in WAYS:
        row: Row = {"network": network.name, "batch": network.batch, "way": way.name}
        if way.name in refused:
            yield {**row, "refused": refused[way.name]}
            continue
        own = [a / b for a, b in zip(seconds[way.name], seconds["eager"], strict=True)]
        row |= {"peak, MiB": peaks[way.name] / 2**20, "time / eager": statistics.median(own)}
        row["calls 2 to 8"] = early[way.name] / early["eager"]
        row["eager, s"] = statistics.median(seconds["eager"])
        host = hosts[way.name]
        if host.bytes_out:
            each = (host.bytes_out + host.bytes_in - moved[way.name]) / calls
            waited = (host.waited - before[way.name]) / calls
            rate = 2 / (1 / host.bandwidth_out + 1 / host.bandwidth_in)
            row |= {
                "MiB moved": each / 2**20,
                "hidden": 1 - waited / (each / rate) if each else 1.0,
                "pinned / held": host.pinned_bytes / host.peak_bytes,
                "GB/s out": host.bandwidth_out / 1e9,
                "GB/s in": host.bandwidth_in / 1e9,
            }
        yield row


def largest_batches(network: Network, device: torch.device) -> Iterator[Row]:
    """Yield the largest batch, by doubling, that each way trains in eager's memory."""
    made = on(device, network.make(network.batch))
    memory = peak_of(plain(*made).make_step(untransformed, in_order), device)
    for way in WAYS:
        batch = 0
        for factor in (1, 2, 4, 8, 16):
            made = on(device, network.make(network.batch * factor))
            step = plain(*made).make_step(way.transform(memory, rematfn.Host()), way.run)
            try:
                peak = max(peak_of(step, device) for _ in range(2))
            except (RuntimeError, rematfn.BudgetError):
                break
            finally:
                del made, step
            if peak > memory:
                break
            batch = network.batch * factor
        yield {
            "network": network.name,
            "way": way.name,
            "largest batch": batch,
            "in, MiB": memory / 2**20,
        }


def on(device: torch.device, made: tuple[Chain, Any, Any]) -> tuple[Chain, Any, Any]:
    """Put a network and its data on the device, and a real device's into bfloat16 by autocast."""
    chain, x, y = made
    if device.type != "fake":
        autocast = torch.autocast(device.type, torch.bfloat16)
        chain.forward = autocast(chain.forward)  # type: ignore[method-assign]
    return chain.to(device), x.to(device), y.to(device)


@contextmanager
def counted(device: torch.device) -> Iterator[list[int]]:
    """Give, at the end, the most bytes that were allocated beyond those at the beginning."""
    found: list[int] = []
    gc.collect()
    torch.accelerator.synchronize()
    torch.accelerator.reset_peak_memory_stats()
    before = torch.accelerator.memory_allocated()
    yield found
    torch.accelerator.synchronize()
    found.append(torch.accelerator.max_memory_allocated() - before)


def peak_of(step: Step, device: torch.device) -> int:
    """Return what the step takes, as the device's allocator counts."""
    with counted(device) as found:
        step()
    return found[0]


def timed(step: Step, device: torch.device) -> Callable[[], float]:
    """Return a call that runs the step to its end and returns the seconds."""

    def run() -> float:
        torch.accelerator.synchronize()
        start = time.perf_counter()
        step()
        torch.accelerator.synchronize()
        return time.perf_counter() - start

    return run


if __name__ == "__main__":
    main()
