# SPDX-License-Identifier: Apache-2.0
"""A long chain in a small budget: N values, all held, then read from the last to the first.

That is the order in which a backward pass reads them. The budget has room for 2 * sqrt(N) of the
values, so nearly all are evicted and replayed; the classic schedule for such a budget replays each
about once. What one operator costs should hardly depend on N.
"""

from __future__ import annotations

import argparse
import time

import torch
from measure import save
from torch import Tensor

import rematfn

ABOUT = """
N values, all held, then read from the last to the first, as a backward does, in a budget that has
room for 2 sqrt(N) of them. *No cap*: the same without a budget.
"""


def write_then_read_backwards(x: Tensor, n: int) -> Tensor:
    """Make a chain of ``n`` values, hold all, and add them up from the last to the first."""
    held = []
    for _ in range(n):
        x = x.sin()  # stays away from 0, and slow denormals, for long
        held.append(x)
    total = held.pop()
    while held:
        total = total + held.pop()
    return total


def measure(n: int, elements: int) -> dict[str, object]:
    """Return the row of one length."""
    x = torch.linspace(1.0, 2.0, elements)
    expected = write_then_read_backwards(x, n)
    budget = int(2 * n**0.5) * x.nbytes
    free = rematfn.remat(write_then_read_backwards)
    start = time.perf_counter()
    free(x, n)
    uncapped = time.perf_counter() - start
    capped = rematfn.remat(write_then_read_backwards, budget)
    start = time.perf_counter()
    got = capped(x, n)
    seconds = time.perf_counter() - start
    assert torch.equal(got, expected), f"a chain of {n} came out differently"
    stats = rematfn.stats(capped)
    assert stats.peak_bytes <= budget, f"{stats.peak_bytes} bytes in a budget of {budget}"
    run = stats.operators + stats.replays
    return {
        "N": n,
        "budget, values": budget // x.nbytes,
        "operators": stats.operators,
        "evictions": stats.evictions,
        "replays": stats.replays,
        "replays / N": round(stats.replays / n, 2),
        "seconds": round(seconds, 3),
        "microseconds per operator or replay": round(seconds / run * 1e6, 2),
        "microseconds per operator, no cap": round(uncapped / stats.operators * 1e6, 2),
    }


def main() -> None:
    """Measure each length and save the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=[10**3, 10**4, 10**5])
    parser.add_argument("--elements", type=int, default=256, help="floats in a value")
    options = parser.parse_args()
    measure(100, options.elements)  # what the process does once, shape inference's set-up above all
    rows = []
    for n in options.lengths:
        rows.append(measure(n, options.elements))
        print(rows[-1], flush=True)  # the longest may take a while
    save("chain", "A chain in a budget of 2 * sqrt(N) values", rows, about=ABOUT)


if __name__ == "__main__":
    main()
