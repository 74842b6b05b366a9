# SPDX-License-Identifier: Apache-2.0
"""The price of a level that has nothing to evict, as a ratio to plain eager.

A chain of additions, where nearly all the time is dispatch, as a loop in Python and as one in
TorchScript, where no Python object is made for a sum. And the gradient step of the demo's model,
where next to no time is dispatch.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from measure import interleaved, save
from torch import Tensor

import rematfn
from rematfn.demo.task import Task

NUMBERS = 256
ABOUT = """
What a level costs where it never evicts: *no cap* without a budget, *budget* with one that is
ample, *where=True* with a journal for `explain` and `timeline`. Microseconds are those of one
addition, or of one step; ratios are medians of those within a round.
"""
PLENTY = 2**50  # bytes: a budget with its bookkeeping, and never a reason to evict


def add_up(h: Tensor, c: Tensor, additions: int) -> Tensor:
    """Add ``c`` to ``h`` so often."""
    for _ in range(additions):
        h = h + c
    return h


def chain(
    add_up: Callable[[Tensor, Tensor, int], Tensor], additions: int
) -> Callable[[Tensor, Tensor], tuple[Tensor, float]]:
    """Return a function that adds so often, and tells how long the additions took.

    It looks at the clock inside, so that entering and leaving a level is not part of the figure.
    """

    def f(h: Tensor, c: Tensor) -> tuple[Tensor, float]:
        start = time.perf_counter()
        h = add_up(h, c, additions)
        return h, time.perf_counter() - start

    return f


def levels(f: Callable[..., Any]) -> dict[str, Callable[..., Any]]:
    """Return ``f`` plain, without cap, with a large budget, and with calls that say where."""
    return {
        "eager": f,
        "no cap": rematfn.remat(f),
        "budget": rematfn.remat(f, PLENTY),
        "budget, where=True": rematfn.remat(f, PLENTY, where=True),
    }


def measure_chain(
    add_up: Callable[[Tensor, Tensor, int], Tensor], additions: int, repeats: int
) -> dict[str, list[float]]:
    """Time the chain plain and under each of :func:`levels`."""
    f = chain(add_up, additions)
    h, c = torch.zeros(NUMBERS), torch.ones(NUMBERS)
    functions = levels(f)
    # Warms up, TorchScript's profiler too, and would show a chain that computes something else.
    for g in [*functions.values()] * 3:
        assert g(h, c)[0].tolist() == [additions] * NUMBERS
    return interleaved({k: lambda g=g: g(h, c)[1] for k, g in functions.items()}, repeats)


def measure_demo_step(layers: int, batch: int, repeats: int) -> dict[str, list[float]]:
    """Time the demo's gradient step plain and under each of :func:`levels`."""
    task = Task.of_python_manual(layers=layers, batch=batch)
    tokens = next(task.batches)
    steps = {
        name: torch.func.grad_and_value(loss_fn) for name, loss_fn in levels(task.loss_fn).items()
    }
    for step in steps.values():
        task.run(step, tokens, 0)
    return interleaved(
        {k: lambda s=s: task.run(s, tokens, 0)[1] for k, s in steps.items()}, repeats
    )


def rows(program: str, unit: float, seconds: dict[str, list[float]]) -> list[dict[str, object]]:
    """Return a row for each way to run a program; ``unit`` turns seconds into microseconds each."""
    return [
        {
            "program": program,
            "level": name,
            "microseconds": round(median(times) * unit, 3),
            "ratio to eager": round(
                median(t / e for t, e in zip(times, seconds["eager"], strict=True)), 3
            ),
        }
        for name, times in seconds.items()
    ]


def main() -> None:
    """Measure both programs and save the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--additions", type=int, default=500, help="in a call of the chain")
    parser.add_argument("--chain-repeats", type=int, default=60)
    parser.add_argument("--step-repeats", type=int, default=15)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--batch", type=int, default=8)
    options = parser.parse_args()
    scripted = torch.jit.script(add_up)
    table = []
    for where, loop in (("", add_up), (", in TorchScript", scripted)):
        seconds = measure_chain(loop, options.additions, options.chain_repeats)
        table += rows(f"an addition of {NUMBERS} numbers{where}", 1e6 / options.additions, seconds)
    stepped = measure_demo_step(options.layers, options.batch, options.step_repeats)
    table += rows("the demo's gradient step", 1e6, stepped)
    save("overhead", "Overhead of a level with nothing to evict", table, about=ABOUT)


if __name__ == "__main__":
    main()
