# SPDX-License-Identifier: Apache-2.0
"""The demo's job: train a GPT inside a budget and compare it with eager on the way."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import torch
from torch import Tensor
from tqdm import tqdm

import rematfn
from rematfn.demo.chargpt import Params
from rematfn.demo.plot import plot_step
from rematfn.demo.report import Report
from rematfn.demo.task import Gradients, Held, Step, Task


@dataclass(frozen=True)
class Options:
    """What to train, how long, and inside which budget."""

    budget: int | float | str | None = 0.3
    steps: int = 60
    pairs: int = 20  # of steps that eager takes as well
    layers: int = 6
    batch: int = 8
    width: int = 384
    heads: int = 6
    context: int = 256
    device: str = "cpu"
    seed: int = 0
    learning_rate: float = 1e-3
    png: Path | None = None
    offload: bool | Path = False  # True: to the folder for temporary files


@dataclass
class Comparison:
    """A running bitwise comparison with eager."""

    tensors: int = 0
    unequal: list[str] = field(default_factory=list)

    def add(self, where: str, got: Gradients, expected: Gradients) -> None:
        """Compare the loss and each gradient of a step."""
        pairs = [("loss", got[1], expected[1])]
        pairs += [(name, got[0][name], gradient) for name, gradient in expected[0].items()]
        self.tensors += len(pairs)
        self.unequal += [f"{where}: {name}" for name, a, b in pairs if not bitwise_equal(a, b)]


def bitwise_equal(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors hold the same bits, those of NaNs and of a zero's sign too."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def run_demo(options: Options) -> Report:
    """Train inside the budget, with eager steps in between to compare with; save the picture."""
    task = Task.of_python_manual(
        layers=options.layers,
        width=options.width,
        heads=options.heads,
        context=options.context,
        batch=options.batch,
        device=options.device,
        seed=options.seed,
    )
    disk = None
    if options.offload is not False:
        disk = rematfn.Disk(None if options.offload is True else options.offload)
    rematted_loss = rematfn.remat(task.loss_fn, options.budget, offload=disk)
    rematted: Step = torch.func.grad_and_value(rematted_loss)
    eager: Step = torch.func.grad_and_value(task.loss_fn)

    # The first step, three times over. A budget given as a fraction is measured in the first call
    # and holds from the second on. Gradients are dropped early, as in training, where no step
    # starts with those of the one before.
    comparison = Comparison()
    tokens = next(task.batches)
    expected, _ = task.run(eager, tokens, 0)
    got, _ = task.run(rematted, tokens, 0)
    comparison.add("call 1", got, expected)
    del got
    got, _ = task.run(rematted, tokens, 0)
    comparison.add("call 2", got, expected)
    del got, expected

    own_peak = rematfn.stats(rematted_loss).peak_bytes or 0
    losses: list[float] = []
    ratios: list[float] = []
    eager_seconds: list[float] = []
    pair_every = max(1, options.steps // options.pairs)
    update = _adam(task.params, options.learning_rate)
    for number in (bar := tqdm(range(options.steps), unit="step", file=sys.stderr)):
        tokens = next(task.batches)
        paired = number % pair_every == 0
        runs = {}
        # They take turns in going first, so that neither always runs on a warmer machine. A step
        # that counts comes after one of its kind, as in training: it finds that one's memory.
        order = [eager, rematted] if number // pair_every % 2 else [rematted, eager]
        for step in order if paired else [rematted]:
            if paired:
                task.run(step, tokens, number)
            runs[step] = task.run(step, tokens, number)
        results, seconds = runs[rematted]
        stats = rematfn.stats(rematted_loss)
        if paired:
            ratios.append(seconds / runs[eager][1])
            eager_seconds.append(runs[eager][1])
            comparison.add(f"step {number}", results, runs[eager][0])
        own_peak = max(own_peak, stats.peak_bytes or 0)
        gradients, loss = results
        update(gradients)
        losses.append(loss.item())
        bar.set_postfix_str(f"loss {losses[-1]:.3f}")
        del runs, results, gradients

    # Another step, counted and drawn now that no thread looks for a better plan beside it.
    tokens = next(task.batches)
    expected, eager_memory = task.count(eager, tokens, options.steps)
    with Held(disk) as held:
        got, rematted_memory = task.count(rematted, tokens, options.steps)
    comparison.add("the last call", got, expected)
    del expected, got
    eager_resident = task.count_resident(eager, tokens, options.steps)
    rematted_resident = task.count_resident(rematted, tokens, options.steps)
    stats = rematfn.stats(rematted_loss)
    if options.png is not None:
        plot_step(options.png, eager_memory, rematted_memory, stats.budget, held)

    return Report(
        device=options.device,
        parameters=sum(p.numel() for p in task.params.values()),
        stats=stats,
        own_peak=max(own_peak, stats.peak_bytes or 0),
        counted_peak=rematted_memory.peak,
        eager_peak=eager_memory.peak,
        resident=rematted_resident,
        eager_resident=eager_resident,
        time_ratios=ratios,
        eager_seconds=median(eager_seconds),
        unequal=comparison.unequal,
        compared=comparison.tensors,
        losses=losses,
        disk=disk,
    )


def _adam(params: Params, learning_rate: float, warm_up: int = 10) -> Callable[[Params], None]:
    """Return a function of gradients that updates ``params`` in place, gently in the beginning."""
    optimizer = torch.optim.AdamW(params.values(), lr=learning_rate, betas=(0.9, 0.99))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: min(1.0, (n + 1) / warm_up))

    def update(gradients: Params) -> None:
        for name, p in params.items():
            p.grad = gradients[name]
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()  # to None: the next step's gradients take their place

    return update
