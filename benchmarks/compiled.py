# SPDX-License-Identifier: Apache-2.0
"""Compiled blocks inside of budgets, beside the compiler's own budget and `checkpoint`.

The blocks of a network are compiled one by one, and trained by each contender in turn, in one
process. Peaks are those of torch's allocator, counted alike for all.
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from measure import OthersLoad, compared, interleaved, save
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import rematfn
from rematfn.testing import MemoryTimeline

BUDGETS = (0.8, 0.6, 0.5, 0.4, 0.3, 0.2)
EAGER_BUDGETS = (0.6, 0.4, 0.3)
COMPILED_BUDGETS = (0.75, 0.5, 0.25, 0.0)
ABOUT = """
A step, forward and backward. Of {blocks} blocks in a row: a *transformer*'s with dropout, width
{width}, length {width}, batch {batch}; or *residual* ones of two convolutions with batch norms,
{channels} channels, {size} x {size} pixels, batch {batch}. Of a *u-net* whose five stages are
compiled, from {channels} channels and {size} x {size} pixels, batch {batch}. Of an *lstm* of width
{width}, batch {batch}, whose cell is compiled and called {steps} times. And of *maml*: {blocks}
steps of gradient descent for a perceptron, width {width}, batch {rows}. Each of these steps is
compiled, its gradient in it. *Peak*: the most bytes of tensors at once,
parameters' gradients included, as torch's profiler counts allocations, in MiB and over eager's.
*Time*: the median, over {repeats} rounds, of the ratio to eager in the same round, and the least
and the most of them. *Exact*: loss and gradients are bitwise those of the same blocks, compiled by
the same backend, without a budget.
*rematfn, compiled, 0.4*: `remat(net, 0.4)` of blocks of `torch.compile(block, backend="rematfn")`;
the fraction is one of the peak of these blocks without a budget.
The loss is computed outside of the budget, and comes on top of it.
*inductor, 0.5*: blocks that were compiled with `activation_memory_budget` 0.5, the fraction of what
each block saves. Others kept {load} of the machine's cores busy meanwhile.
"""
Step = Callable[[], Any]


class Block(nn.Module):
    """A transformer's block, with dropout."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.three, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        batch, length, width = x.shape
        heads = [
            t.view(batch, length, 4, width // 4).transpose(1, 2)
            for t in self.three(self.before(x)).chunk(3, -1)
        ]
        y = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + F.dropout(self.out(y.transpose(1, 2).reshape(x.shape)), 0.1)
        return x + F.dropout(self.down(F.gelu(self.up(self.after(x)))), 0.1)


class Residual(nn.Module):
    """A residual block of two convolutions with batch norms."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first, self.second = (
            nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2)
        )
        self.norm_1, self.norm_2 = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        y = self.norm_1(self.first(x)).relu()
        return (x + self.norm_2(self.second(y))).relu()


class Stage(nn.Module):
    """A convolution with a norm and a nonlinearity."""

    def __init__(self, channels: int, made: int) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(channels, made, 3, padding=1)
        self.norm = nn.GroupNorm(8, made)

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        return F.silu(self.norm(self.convolution(x)))


class UNet(nn.Module):
    """Stages at three resolutions, down and up again."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        c = channels
        self.down = nn.ModuleList([Stage(c, c), Stage(c, 2 * c)])
        self.middle = Stage(2 * c, 4 * c)
        self.up = nn.ModuleList([Stage(6 * c, 2 * c), Stage(3 * c, c)])
        self.blocks = [*self.down, self.middle, *self.up]

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        skipped = []
        for stage in self.down:
            skipped.append(stage(x))
            x = F.avg_pool2d(skipped[-1], 2)
        x = self.middle(x)
        for stage in self.up:
            x = stage(torch.cat([F.interpolate(x, scale_factor=2.0), skipped.pop()], 1))
        return x


class Cell(nn.Module):
    """An LSTM's cell. Torch's compiler leaves `nn.LSTMCell` by itself to eager."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gates = nn.Linear(2 * width, 4 * width)

    def forward(self, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:  # noqa: D102
        write, keep, new, show = self.gates(torch.cat([x, h], -1)).chunk(4, -1)
        c = keep.sigmoid() * c + write.sigmoid() * new.tanh()
        return show.sigmoid() * c.tanh(), c


class Recurrent(nn.Module):
    """A cell, called step by step."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.cell = Cell(width)
        self.blocks = [self.cell]

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        h, c = torch.zeros_like(x[0]), torch.zeros_like(x[0])
        outputs = []
        for row in x:
            h, c = self.cell(row, h, c)
            outputs.append(h)
        return torch.stack(outputs)


class GradientStep(nn.Module):
    """A perceptron's weights, one gradient step later."""

    def forward(self, x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:  # noqa: D102
        def loss(weights: tuple[Tensor, ...]) -> Tensor:
            return (perceptron(x, weights) - x).square().mean()

        gradients = torch.func.grad(loss)(weights)
        return tuple(w - 0.1 * g for w, g in zip(weights, gradients, strict=True))


class Adapted(nn.Module):
    """A perceptron that has been trained for a few steps, which are differentiated (MAML)."""

    def __init__(self, width: int, steps: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(width, width) / width**0.5 for _ in range(3))
        self.blocks = [GradientStep() for _ in range(steps)]

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        weights = tuple(self.weights)
        for block in self.blocks:
            weights = block(x, *weights)
        return perceptron(x, weights)


def perceptron(x: Tensor, weights: tuple[Tensor, ...]) -> Tensor:
    """Return what layers of these weights make of `x`."""
    for weight in weights:
        x = F.gelu(x @ weight)
    return x


def contenders(make: Callable[[], Any]) -> dict[str, tuple[Any, nn.Module, str]]:
    """Return, by name: what is called, the net, and whose bits it has to have."""
    found: dict[str, tuple[Any, nn.Module, str]] = {}

    def compiled(is_checkpointed: bool = False, **how: Any) -> nn.Module:
        net = make()
        for block in net.blocks:
            block.compile(dynamic=False, **how)
            if is_checkpointed:
                call = block._compiled_call_impl
                block._compiled_call_impl = functools.partial(checkpoint, call, use_reentrant=False)
        return net

    def add(name: str, net: nn.Module, whose: str, f: Any = None) -> None:
        found[name] = (net if f is None else f, net, whose)

    add("eager", make(), "eager")
    for budget in EAGER_BUDGETS:
        net = make()
        add(f"rematfn, eager, {budget:g}", net, "eager", rematfn.remat(net, budget))
    add("inductor", compiled(backend="inductor"), "inductor")
    net = compiled(is_checkpointed=True, backend="inductor")
    add("inductor, checkpoint around each block", net, "inductor")
    for budget in COMPILED_BUDGETS:
        add(f"inductor, {budget:g}", compiled(backend=inductor_within(budget)), "inductor")
    add("rematfn, compiled", compiled(backend="rematfn"), "rematfn, compiled")
    for budget in BUDGETS:
        net = compiled(backend="rematfn")
        name = f"rematfn, compiled, {budget:g}"
        add(name, net, "rematfn, compiled", rematfn.remat(net, budget))
    return found


def inductor_within(budget: float) -> Callable[..., Any]:
    """Return inductor with a budget of its own; of each budget another, so that none is reused."""

    def backend(gm: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        from torch._inductor.compile_fx import compile_fx

        with torch._functorch.config.patch(activation_memory_budget=budget):
            return compile_fx(gm, inputs)

    return backend


def step_of(f: Any, net: nn.Module, x: Tensor) -> Step:
    """Return a step of training, which returns the loss and the gradients."""
    parameters = list(net.parameters())

    def step() -> list[Tensor]:
        torch.manual_seed(7)
        loss = f(x).square().mean()
        return [loss.detach(), *torch.autograd.grad(loss, parameters)]

    return step


def timed(step: Step) -> float:
    """Return the seconds that a step takes."""
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def main() -> None:
    """Measure, print, and write the document."""
    parser = argparse.ArgumentParser(description=__doc__)
    sizes = {"blocks": 8, "width": 256, "batch": 8, "channels": 64, "size": 32, "steps": 32}
    for name, default in {**sizes, "rows": 1024, "repeats": 9}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--nets", nargs="*", help="those whose names are given, or all")
    options = parser.parse_args()
    torch._dynamo.config.recompile_limit = 256  # all nets are of a few classes
    torch._dynamo.config.accumulated_recompile_limit = 1024
    width, channels, pixels = options.width, options.channels, (options.size, options.size)

    def row(block: Callable[[], nn.Module]) -> nn.Module:
        net = nn.Sequential(*(block() for _ in range(options.blocks)))
        net.blocks = list(net)
        return net

    images = torch.randn(options.batch, channels, *pixels)
    nets: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
        "transformer": (
            lambda: row(lambda: Block(width)),
            torch.randn(options.batch, width, width),
        ),
        "residual": (lambda: row(lambda: Residual(channels)), images),
        "u-net": (lambda: UNet(channels), images),
        "lstm": (lambda: Recurrent(width), torch.randn(options.steps, options.batch, width)),
        "maml": (lambda: Adapted(width, options.blocks), torch.randn(options.rows, width)),
    }
    rows: list[dict[str, object]] = []
    with OthersLoad() as load:
        for name in options.nets or nets:
            rows += measured(name, *nets[name], options.repeats)
    save(
        "compiled",
        "Compiled blocks inside of budgets",
        rows,
        about=ABOUT.format(
            **vars(options), load="an unknown number" if load.cores is None else f"{load.cores:.1f}"
        ),
    )


def measured(
    name: str, net_of: Callable[[], nn.Module], x: Tensor, repeats: int
) -> list[dict[str, object]]:
    """Return a row for each contender."""

    def make() -> nn.Module:
        torch.manual_seed(0)
        return net_of()

    steps: dict[str, Step] = {}
    rows: dict[str, dict[str, object]] = {}
    bits: dict[str, list[Tensor]] = {}
    peaks: dict[str, float] = {}
    for contender, (f, net, whose) in contenders(make).items():
        step = step_of(f, net, x)
        rows[contender] = {"net": name, "contender": contender}
        try:
            for _ in range(3):
                bits[contender] = step()
        except rematfn.BudgetError as error:
            note = str(error).splitlines()[0].split(": ", 1)[1]
            rows[contender]["note"] = f"BudgetError: {note}"
            continue
        with MemoryTimeline() as timeline:
            step()
        peaks[contender] = timeline.peak / 2**20
        rows[contender] |= {
            "peak, MiB": peaks[contender],
            "peak / eager": peaks[contender] / peaks["eager"],
            "exact": all(map(torch.equal, bits[contender], bits[whose])),
        }
        steps[contender] = step
        print(rows[contender], flush=True)
    seconds = interleaved(
        {contender: functools.partial(timed, step) for contender, step in steps.items()}, repeats
    )
    for contender in steps:
        rows[contender] |= compared(seconds[contender], seconds["eager"])
    return list(rows.values())


if __name__ == "__main__":
    main()
