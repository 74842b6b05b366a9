# SPDX-License-Identifier: Apache-2.0
"""Training steps that differ from call to call: by what was learnt, or by plans of their own.

Calls of each step are recorded. Then they run within a fraction of the largest peak, and are
simulated: online, and by a plan that was made for that very call.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable
from statistics import mean
from typing import Any

import torch
import torch.nn.functional as F
from measure import save
from torch import Tensor, nn

import rematfn
from rematfn import _C
from rematfn._transform.recorded import finish_searches
from rematfn.policies import ON, Guided

FRACTIONS = (0.5, 0.4, 0.3)
SEARCH = 30_000  # operators simulated in vain, for each plan
ABOUT = """
Replayed cost over the program's, by the cost model: means over calls three to eight, all within a
fraction of the largest peak. The first two calls have the same sizes, but for neighbours; later
ones have others, which no call had before. *Guided*: `remat(f, bytes)`, called so, by what it has
learnt from earlier calls; between calls, searches come to their end. *Online*: `ON()`, simulated.
*Own*: by a plan made for that very call, simulated. *The most*: the total cost guided over that of
the better of the two others, in the worst call. *First*, *second*: what the first two calls replay.
"""
Calls = tuple[Callable[[Any], Any], list[Any]]  # a step, and its argument in each call


class Block(nn.Module):
    """A transformer's block, with dropout."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attend = nn.MultiheadAttention(width, 4, 0.1, batch_first=True)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        h = self.norms[0](x)
        x = x + self.attend(h, h, h, need_weights=False)[0]
        return x + F.dropout(self.narrow(F.gelu(self.wide(self.norms[1](x)))), 0.1)


class Experts(nn.Module):
    """Tokens go to the two experts that a router prefers; an expert without tokens does not run."""

    def __init__(self, width: int, count: int = 6) -> None:
        super().__init__()
        self.router = nn.Linear(width, count)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(count)
        )

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        h = x.flatten(0, 1)
        weight, chosen = self.router(h).softmax(-1).topk(2, -1)
        out = torch.zeros_like(h)
        for i, expert in enumerate(self.experts):
            rows, column = (chosen == i).nonzero(as_tuple=True)
            if len(rows) > 0:
                out = out.index_add(0, rows, expert(h[rows]) * weight[rows, column, None])
        return x + out.view_as(x)


def gradients(net: nn.Module, loss: Callable[[Any], Tensor]) -> Callable[[Any], Any]:
    """Return a step that makes the gradients of a loss."""
    parameters = list(net.parameters())
    return lambda batch: torch.autograd.grad(loss(batch), parameters, allow_unused=True)


def blocks(inputs: list[Tensor], dropped: float = 0.0, experts: bool = False) -> Calls:
    """Return the step of a stack of blocks; each of them is left out as often as ``dropped``."""
    kinds = [Block, Experts] if experts else [Block, Block]
    net = nn.ModuleList(kind(64) for _ in range(5) for kind in kinds)
    chance = random.Random(3)

    def loss(x: Tensor) -> Tensor:
        for block in net:
            if chance.random() >= dropped:
                x = block(x)
        return x.square().mean()

    return gradients(net, loss), inputs


def lengths() -> Calls:
    """Return a step and sequences of other lengths."""
    return blocks([torch.randn(4, n, 64) for n in (96, 96, 64, 128, 80, 120, 48, 104)])


def layer_drop() -> Calls:
    """Return a step in which a fifth of the blocks is left out."""
    return blocks([torch.randn(4, 96, 64)] * 8, dropped=0.2)


def routing() -> Calls:
    """Return the step of a mixture of experts."""
    # Tokens that are alike, so that some expert gets none.
    counts = (96, 96, 64, 128, 80, 120, 48, 104)
    inputs = [torch.randn(4, 1, 64) + torch.randn(4, n, 64) / 4 for n in counts]
    return blocks(inputs, experts=True)


def unrolled() -> Calls:
    """Return the step of a loop that runs more or less often."""
    cell = nn.LSTMCell(32, 64)

    def loss(xs: Tensor) -> Tensor:
        state = (torch.zeros(64, 64), torch.zeros(64, 64))
        for x in xs:
            state = cell(x, state)
        return state[0].square().mean()

    lengths = (40, 40, 60, 25, 50, 41, 90, 33)
    return gradients(cell, loss), [torch.randn(steps, 64, 32) for steps in lengths]


def optimizer_inside() -> Calls:
    """Return a step that updates the weights; its first call makes the optimiser's state."""
    layers = [m for _ in range(8) for m in (nn.Linear(128, 128), nn.GELU(), nn.LayerNorm(128))]
    net = nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(net.parameters())

    def step(x: Tensor) -> None:
        optimizer.zero_grad()
        net(x).square().mean().backward()
        optimizer.step()

    return step, [torch.randn(n, 128) for n in (1000, 1000, 800, 1200, 900, 1100, 700, 1050)]


def forces() -> Calls:
    """Return the step of a potential whose loss is of forces: a gradient inside a gradient."""
    filters, mix, out = nn.Linear(20, 64), nn.Linear(64, 64), nn.Linear(64, 1)
    net = nn.ModuleList([filters, mix, out])

    def loss(batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        places, first, second = batch
        places = places.detach().requires_grad_()
        away = (places[first] - places[second]).norm(dim=1, keepdim=True)
        weight = filters(torch.exp(-(away - torch.linspace(0, 5, 20)).square()))
        h = torch.ones(len(places), 64)
        for _ in range(3):
            messages = torch.zeros_like(h).index_add(0, first, weight * mix(h)[second])
            h = h + F.silu(messages) * 0.1
        energy = out(h).sum()
        (force,) = torch.autograd.grad(energy, places, create_graph=True)
        return energy.square() + force.square().sum()

    def molecule(atoms: int) -> tuple[Tensor, Tensor, Tensor]:
        places = torch.rand(atoms, 3) * 4
        near = (torch.cdist(places, places) < 3) & ~torch.eye(atoms, dtype=torch.bool)
        first, second = near.nonzero().t()
        return places, first, second

    return gradients(net, loss), [molecule(n) for n in (112, 112, 96, 128, 120, 80, 104, 116)]


STEPS = (lengths, layer_drop, routing, unrolled, optimizer_inside, forces)


def simulated(trace: rematfn.Trace, budget: int, *, planned: bool) -> float | None:
    """Return what a run replays, as a multiple of the program's cost; None if it does not fit."""
    core, program = trace._core, None
    if planned:
        program = _C.Program(core)
        Guided(search=SEARCH).begin(program, budget)
        program.finish()
    found: Any = _C.simulate(core, budget, ON().core(), program, "", 0)
    return found["replayed_cost"] if isinstance(found, dict) else None


def ran(step: Callable[[], Calls], budget: int) -> list[float]:
    """Return what each call replays within ``budget``, as a multiple of the call's cost."""
    torch.manual_seed(0)
    function, batches = step()
    inside, found = rematfn.remat(function, budget, policy=Guided(search=SEARCH)), []
    for batch in batches:
        inside(batch)
        finish_searches()
        found.append(rematfn.stats(inside).replayed_cost or 0.0)
    return found


def row(step: Callable[[], Calls], traces: list[rematfn.Trace], fraction: float) -> dict[str, Any]:
    """Return the table's row for one step and fraction."""
    budget = int(fraction * max(trace.peak_bytes for trace in traces))
    first, second, *guided = ran(step, budget)
    online = [simulated(trace, budget, planned=False) for trace in traces[2:]]
    own = [simulated(trace, budget, planned=True) for trace in traces[2:]]
    known = [
        [cost for cost in costs if cost is not None] for costs in zip(online, own, strict=True)
    ]
    return {
        "step": step.__name__,
        "budget": fraction,
        "first": first,
        "second": second,
        "online": mean(cost for cost in online if cost is not None),
        "guided": mean(guided),
        "own": mean(cost for cost in own if cost is not None),
        "the most": max((1 + a) / (1 + min(b)) for a, b in zip(guided, known, strict=True)),
    }


def main() -> None:
    """Make the table, or a part of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", help="the name of one step")
    only = parser.parse_args().only
    rows = []
    for step in STEPS:
        if only in (None, step.__name__):
            torch.manual_seed(0)
            function, batches = step()
            traces = [rematfn.record(function, batch) for batch in batches]
            rows += [row(step, traces, fraction) for fraction in FRACTIONS]
            print(rows[-len(FRACTIONS) :], flush=True)
    if only is None:
        save("varying", "Calls that differ, by what earlier ones taught", rows, about=ABOUT)


if __name__ == "__main__":
    main()
