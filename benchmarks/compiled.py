# SPDX-License-Identifier: Apache-2.0
"""Compiled blocks inside of budgets, beside the compiler's own budget and `checkpoint`.

A transformer's blocks are compiled one by one, and trained by each contender in turn, in one
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

BUDGETS = (1.0, 0.8, 0.6, 0.5, 0.4, 0.3, 0.2)
COMPILED_BUDGETS = (0.75, 0.5, 0.25, 0.0)
ABOUT = """
A step of {blocks} transformer blocks with dropout, width {width}, length {length}, batch {batch}:
forward and backward. *Peak*: the most bytes of tensors at once, parameters' gradients included, as
torch's profiler counts allocations, in MiB and over eager's. *Time*: the median, over {repeats}
rounds, of the ratio to eager in the same round, and the least and the most of them. *Exact*: loss
and gradients are bitwise those of the same blocks, compiled by the same backend, without a budget.
*rematfn, compiled, 0.4*: `remat(net, 0.4)` of blocks of `torch.compile(block, backend="rematfn")`.
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


class Checkpointed(nn.Module):
    """A block around which is `torch.utils.checkpoint`."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        result: Tensor = checkpoint(self.block, x, use_reentrant=False)
        return result


def contenders(make: Callable[[], nn.Sequential]) -> dict[str, tuple[Any, nn.Module, str]]:
    """Return, by name: what is called, the net, and whose bits it has to have."""
    found: dict[str, tuple[Any, nn.Module, str]] = {}

    def compiled(**how: Any) -> nn.Sequential:
        net = make()
        for block in net:
            block.compile(**how)
        return net

    def add(name: str, net: nn.Module, whose: str, f: Any = None) -> None:
        found[name] = (net if f is None else f, net, whose)

    add("eager", make(), "eager")
    for budget in BUDGETS[2::2]:
        net = make()
        add(f"rematfn, eager, {budget:g}", net, "eager", rematfn.remat(net, budget))
    add("inductor", compiled(backend="inductor"), "inductor")
    net = nn.Sequential(*(Checkpointed(block) for block in compiled(backend="inductor")))
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
    for name, default in (("blocks", 8), ("width", 128), ("length", 128), ("batch", 8)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args()

    def make() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(*(Block(options.width) for _ in range(options.blocks)))

    torch._dynamo.config.recompile_limit = 64  # all nets are of one class
    x = torch.randn(options.batch, options.length, options.width)
    steps: dict[str, Step] = {}
    rows: dict[str, dict[str, object]] = {}
    bits: dict[str, list[Tensor]] = {}
    peaks: dict[str, float] = {}
    for name, (f, net, whose) in contenders(make).items():
        step = step_of(f, net, x)
        rows[name] = {"contender": name}
        try:
            for _ in range(3):
                bits[name] = step()
        except rematfn.BudgetError as error:
            rows[name]["note"] = f"BudgetError: {str(error).splitlines()[0].split(': ', 1)[1]}"
            continue
        with MemoryTimeline() as timeline:
            step()
        peaks[name] = timeline.peak / 2**20
        rows[name] |= {"peak, MiB": peaks[name], "peak / eager": peaks[name] / peaks["eager"]}
        rows[name]["exact"] = all(map(torch.equal, bits[name], bits[whose]))
        steps[name] = step
        print(rows[name], flush=True)
    with OthersLoad() as load:
        seconds = interleaved(
            {name: functools.partial(timed, step) for name, step in steps.items()}, options.repeats
        )
    for name in steps:
        rows[name] |= compared(seconds[name], seconds["eager"])
    load_ = "an unknown number" if load.cores is None else f"{load.cores:.1f}"
    save(
        "compiled",
        "Compiled blocks inside of budgets",
        list(rows.values()),
        about=ABOUT.format(**vars(options), load=load_),
    )


if __name__ == "__main__":
    main()
