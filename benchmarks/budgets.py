# SPDX-License-Identifier: Apache-2.0
"""What a budget costs: the demo's gradient step at several fractions of its unconstrained peak.

Rematted and eager steps take turns in one process. The peaks are those of the allocator, counted
over one step without rematfn's help; every gradient is compared with eager's, bit by bit.
"""

from __future__ import annotations

import argparse
from statistics import median

import torch
from measure import interleaved, save

import rematfn
from rematfn._errors import BudgetError
from rematfn.demo.task import Gradients, Step, Task
from rematfn.demo.train import Comparison


def measure_budget(
    task: Task, tokens: torch.Tensor, expected: Gradients, fraction: float, repeats: int
) -> dict[str, object]:
    """Return the row of one budget."""
    loss_fn = rematfn.remat(task.loss_fn, fraction)
    rematted: Step = torch.func.grad_and_value(loss_fn)
    eager: Step = torch.func.grad_and_value(task.loss_fn)
    task.run(rematted, tokens, 0)  # measures the peak that the fraction is of
    try:
        got, memory = task.count(rematted, tokens, 0)
    except BudgetError as error:
        return {"budget": fraction, "error": str(error).splitlines()[0]}
    comparison = Comparison()
    comparison.add(str(fraction), got, expected)
    stats = loss_fn.stats
    row: dict[str, object] = {
        "budget": fraction,
        "budget, bytes": stats.budget,
        "peak, allocator": memory.peak,
        "peak, own count": stats.peak_bytes,
        "replayed cost": round(stats.replayed_cost, 4),
        "replays": stats.replays,
        "evictions": stats.evictions,
        "operators": stats.operators,
        "bitwise": "no" if comparison.unequal else "yes",
    }
    del got
    seconds = interleaved(
        {
            f"budget {fraction}": lambda: task.run(rematted, tokens, 0)[1],
            "eager": lambda: task.run(eager, tokens, 0)[1],
        },
        repeats,
    )
    mine, plain = seconds.values()
    row["time ratio"] = round(median(m / p for m, p in zip(mine, plain, strict=True)), 3)
    row["eager seconds"] = round(median(plain), 3)
    return row


def main() -> None:
    """Measure each budget and save the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--budgets", type=float, nargs="+", default=[0.5, 0.3, 0.2, 0.15])
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--batch", type=int, default=8)
    options = parser.parse_args()
    task = Task.of_python_manual(layers=options.layers, batch=options.batch)
    tokens = next(task.batches)
    eager: Step = torch.func.grad_and_value(task.loss_fn)
    expected, _ = task.run(eager, tokens, 0)
    _, memory = task.count(eager, tokens, 0)
    rows: list[dict[str, object]] = [{"budget": "eager", "peak, allocator": memory.peak}]
    rows += [
        measure_budget(task, tokens, expected, fraction, options.repeats)
        for fraction in options.budgets
    ]
    save("budgets", "The demo's gradient step inside a budget", rows)


if __name__ == "__main__":
    main()
