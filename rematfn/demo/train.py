# SPDX-License-Identifier: Apache-2.0
"""The demo's job: train a GPT inside a budget and compare it with eager on the way."""

import sys
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

import rematfn
from rematfn._transform.budget import BudgetLike
from rematfn.demo.report import Report, plot_step
from rematfn.demo.task import Gradients, Step, Task


def bitwise_equal(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors hold the same bits, those of NaNs and of a zero's sign too."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def run_demo(
    *,
    budget: BudgetLike,
    steps: int,
    png: Path,
    pairs: int = 20,
    learning_rate: float = 1e-3,
    offload: bool | Path = False,
    **of_task: Any,
) -> Report:
    """Train inside the budget, with eager steps in between to compare with; save the picture.

    Eager takes about so many of the steps, in ``pairs``, as well. ``offload`` is as
    `remat` takes it, ``of_task`` as `Task.of_python_manual`.
    """
    task = Task.of_python_manual(**of_task)
    bounded_loss = rematfn.remat(task.loss_fn, budget, offload=offload)
    bounded: Step = torch.func.grad_and_value(bounded_loss)
    eager: Step = torch.func.grad_and_value(task.loss_fn)
    unequal: list[str] = []
    compared = 0

    def compare(where: str, got: Gradients, expected: Gradients) -> None:
        nonlocal compared
        pairs = [("loss", got[1], expected[1])]
        pairs += [(name, got[0][name], gradient) for name, gradient in expected[0].items()]
        compared += len(pairs)
        unequal.extend(f"{where}: {name}" for name, a, b in pairs if not bitwise_equal(a, b))

    # The first step, three times over. A budget given as a fraction is measured in the first call
    # and holds from the second on. Gradients are dropped early, as in training, where no step
    # starts with those of the one before.
    tokens = next(task.batches)
    expected, _ = task.run(eager, tokens, 0)
    for call in ("call 1", "call 2"):
        got, _ = task.run(bounded, tokens, 0)
        compare(call, got, expected)
        del got
    del expected

    own_peak = rematfn.stats(bounded_loss).peak_bytes or 0
    losses: list[float] = []
    ratios: list[float] = []
    eager_seconds: list[float] = []
    pair_every = max(1, steps // pairs)
    optimizer = torch.optim.AdamW(task.params.values(), lr=learning_rate, betas=(0.9, 0.99))
    for number in (bar := tqdm(range(steps), unit="step", file=sys.stderr)):
        tokens = next(task.batches)
        paired = number % pair_every == 0
        runs = {}
        # They take turns in going first, so that neither always runs on a warmer machine. A step
        # that counts comes after one of its kind, as in training: it finds that one's memory.
        order = [eager, bounded] if number // pair_every % 2 else [bounded, eager]
        for step in order if paired else [bounded]:
            if paired:
                task.run(step, tokens, number)
            runs[step] = task.run(step, tokens, number)
        results, seconds = runs[bounded]
        stats = rematfn.stats(bounded_loss)
        if paired:
            ratios.append(seconds / runs[eager][1])
            eager_seconds.append(runs[eager][1])
            compare(f"step {number}", results, runs[eager][0])
        own_peak = max(own_peak, stats.peak_bytes or 0)
        gradients, loss = results
        for name, p in task.params.items():
            p.grad = gradients[name]
        optimizer.step()
        optimizer.zero_grad()  # to None: the next step's gradients take their place
        losses.append(loss.item())
        bar.set_postfix_str(f"loss {losses[-1]:.3f}")
        del runs, results, gradients

    # Another step, counted and drawn now that no thread looks for a better plan beside it.
    tokens = next(task.batches)
    expected, eager_memory = task.count(eager, tokens, steps)
    got, bounded_memory = task.count(bounded, tokens, steps)
    compare("the last call", got, expected)
    del expected, got
    eager_resident = task.count_resident(eager, tokens, steps)
    bounded_resident = task.count_resident(bounded, tokens, steps)
    stats = rematfn.stats(bounded_loss)
    plot_step(png, eager_memory, bounded_memory, stats.budget)

    return Report(
        device=str(task.device),
        parameters=sum(p.numel() for p in task.params.values()),
        stats=stats,
        own_peak=max(own_peak, stats.peak_bytes or 0),
        counted_peak=bounded_memory.peak,
        eager_peak=eager_memory.peak,
        resident=bounded_resident,
        eager_resident=eager_resident,
        time_ratios=ratios,
        eager_seconds=median(eager_seconds),
        unequal=unequal,
        compared=compared,
        losses=losses,
    )
