# SPDX-License-Identifier: Apache-2.0
"""The price of a level that has nothing to evict, as a ratio to plain eager.

A chain of additions, where nearly all the time is dispatch, as a loop in Python and as one in
TorchScript, where no Python object is made for a sum. Gradient steps of networks so small that most
of their time is the host's, on one thread. And that of the demo's model, where next to no time is
dispatch.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from measure import interleaved, save
from torch import Tensor, nn
from torch.nn import functional as F

import rematfn
from rematfn.demo.task import Task

NUMBERS = 256
ABOUT = """
What a level costs where it never evicts: *no cap* without a budget, *budget* with one that is
ample, *where=True* with a journal for `explain` and `timeline`. For small networks, on one
thread, also what a step takes in *0.6 of its peak*, replays and all. Microseconds are those of
one addition, or of one step; ratios are medians of those within a round.
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


class Attention(nn.Module):
    """Causal attention of four heads, as a GPT has it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Attend."""
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(attended.transpose(1, 2).flatten(2))


class Residual(nn.Module):
    """What the layers make of a normalised input, added to the input."""

    def __init__(self, width: int, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.LayerNorm(width), *layers)

    def forward(self, x: Tensor) -> Tensor:
        """Add."""
        return x + self.layers(x)


class LastOf(nn.LSTM):
    """An LSTM's last output."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        """Return it."""
        return super().forward(x)[0][:, -1]


def small_networks() -> dict[str, tuple[nn.Module, Tensor]]:
    """Return networks whose operators take microseconds, each with an input."""
    wide = 32
    gpt = []
    for _ in range(8):
        mlp = nn.Linear(wide, 4 * wide), nn.GELU(), nn.Linear(4 * wide, wide)
        gpt += [Residual(wide, Attention(wide)), Residual(wide, *mlp)]
    convolutions = []
    for inputs in (3, *[8] * 9):
        convolution = nn.Conv2d(inputs, 8, 3, padding=1, bias=False)
        convolutions += [convolution, nn.BatchNorm2d(8), nn.ReLU(inplace=True)]
    hooked = nn.Sequential(*[nn.Sequential(nn.Linear(wide, wide), nn.ReLU()) for _ in range(10)])
    for parameter in hooked.parameters():
        parameter.register_hook(lambda gradient: gradient * 0.5)
    return {
        "a GPT, 8 layers of width 32": (
            nn.Sequential(nn.Embedding(64, wide), *gpt, nn.LayerNorm(wide), nn.Linear(wide, 64)),
            torch.randint(64, (2, 16)),
        ),
        "10 x convolution, BatchNorm, in-place ReLU": (
            nn.Sequential(*convolutions),
            torch.randn(2, 3, 8, 8),
        ),
        "an LSTM, 2 layers of width 32, 16 steps": (
            LastOf(wide, wide, num_layers=2, batch_first=True),
            torch.randn(2, 16, wide),
        ),
        "an MLP, 10 layers of width 32, hooks on its weights": (hooked, torch.randn(8, wide)),
    }


def measure_small_step(
    network: nn.Module, x: Tensor, autocast: bool, repeats: int
) -> dict[str, list[float]]:
    """Time a gradient step plain, under each of :func:`levels`, and in 0.6 of its peak, if any."""

    def loss(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return network(x).float().square().mean()

    def step(loss: Callable[[Tensor], Tensor]) -> float:
        start = time.perf_counter()
        torch.autograd.grad(loss(x), [*network.parameters()])
        return time.perf_counter() - start

    functions, tight = levels(loss), rematfn.remat(loss, 0.6)
    with contextlib.suppress(rematfn.BudgetError):
        step(tight)
        step(tight)
        functions["0.6 of its peak"] = tight
    for f in [*functions.values()] * 30:  # until the search for a plan is over
        step(f)
    return interleaved({k: lambda f=f: step(f) for k, f in functions.items()}, repeats)


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
    parser.add_argument("--small-repeats", type=int, default=200)
    parser.add_argument("--step-repeats", type=int, default=15)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument(
        "--profile", action="store_true", help="run each small network some times, for `make fast`"
    )
    options = parser.parse_args()
    if options.profile:
        torch.set_num_threads(1)
        for network, x in small_networks().values():
            measure_small_step(network, x, autocast=False, repeats=20)
        return
    scripted = torch.jit.script(add_up)
    table = []
    for where, loop in (("", add_up), (", in TorchScript", scripted)):
        seconds = measure_chain(loop, options.additions, options.chain_repeats)
        table += rows(f"an addition of {NUMBERS} numbers{where}", 1e6 / options.additions, seconds)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for name, (network, x) in small_networks().items():
        for autocast in (False, True) if "GPT" in name or "BatchNorm" in name else (False,):
            seconds = measure_small_step(network, x, autocast, options.small_repeats)
            table += rows(name + ", autocast" * autocast, 1e6, seconds)
    torch.set_num_threads(threads)
    stepped = measure_demo_step(options.layers, options.batch, options.step_repeats)
    table += rows("the demo's gradient step", 1e6, stepped)
    save("overhead", "Overhead of a level with nothing to evict", table, about=ABOUT)


if __name__ == "__main__":
    main()
