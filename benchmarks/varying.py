# SPDX-License-Identifier: Apache-2.0
"""Training steps that differ from call to call: by the record of the first, or a plan of their own.

Six calls of each step are recorded. Within a fraction of the largest peak each is then run in the
simulator: online, guided by a plan that was made of the first call's record, and by one that was
made for it.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Iterator
from functools import partial
from statistics import mean
from typing import Any

import torch
import torch.nn.functional as F
from measure import save
from torch import Tensor, nn

import rematfn
from rematfn import _C
from rematfn._transform.recorded import RecordedProgram
from rematfn.policies import ON, Guided

FRACTIONS = (0.5, 0.4, 0.3)
SEARCH = 30_000  # operators simulated in vain, for each plan
ABOUT = """
Replayed cost over the program's, in the simulator, by the cost model: means over calls two to six,
all within a fraction of the largest peak. *Online*: `ON()`. *Guided*: by a plan that was made of
the first call's record, for the share of its peak that the call has of its own. *Own*: by a plan
made for that very call. *The most*: the total cost guided over that of the better of the two
others, in the worst call. Calls that do not fit online are left out, and counted.
"""
Step = Callable[[], Any]


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


def gradients(net: nn.Module, loss: Callable[[], Tensor]) -> Step:
    """Return a step that makes the gradients of a loss."""
    parameters = list(net.parameters())
    return lambda: torch.autograd.grad(loss(), parameters, allow_unused=True)


def blocks(inputs: list[Tensor], dropped: float = 0.0, experts: bool = False) -> Iterator[Step]:
    """Yield the steps of a stack of blocks; each of them is left out as often as ``dropped``."""
    kinds = [Block, Experts] if experts else [Block, Block]
    net = nn.ModuleList(kind(64) for _ in range(5) for kind in kinds)
    chance = random.Random(3)

    def loss(x: Tensor) -> Tensor:
        for block in net:
            if chance.random() >= dropped:
                x = block(x)
        return x.square().mean()

    for x in inputs:
        yield gradients(net, partial(loss, x))


def lengths() -> Iterator[Step]:
    """Yield steps on sequences of other lengths."""
    yield from blocks([torch.randn(4, n, 64) for n in (96, 64, 128, 80, 120, 48)])


def layer_drop() -> Iterator[Step]:
    """Yield steps in which a fifth of the blocks is left out."""
    yield from blocks([torch.randn(4, 96, 64)] * 6, dropped=0.2)


def routing() -> Iterator[Step]:
    """Yield steps of a mixture of experts."""
    # Tokens that are alike, so that some expert gets none.
    inputs = [torch.randn(4, 1, 64) + torch.randn(4, n, 64) / 4 for n in (96, 64, 128, 80, 120, 48)]
    yield from blocks(inputs, experts=True)


def unrolled() -> Iterator[Step]:
    """Yield steps of a loop that runs more or less often."""
    cell = nn.LSTMCell(32, 64)

    def loss(xs: Tensor) -> Tensor:
        state = (torch.zeros(64, 64), torch.zeros(64, 64))
        for x in xs:
            state = cell(x, state)
        return state[0].square().mean()

    for steps in (40, 60, 25, 50, 41, 90):
        yield gradients(cell, partial(loss, torch.randn(steps, 64, 32)))


def optimizer_inside() -> Iterator[Step]:
    """Yield steps of which the first makes the optimiser's state."""
    layers = [m for _ in range(8) for m in (nn.Linear(128, 128), nn.GELU(), nn.LayerNorm(128))]
    net = nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(net.parameters())

    def step(x: Tensor) -> None:
        optimizer.zero_grad()
        net(x).square().mean().backward()
        optimizer.step()

    for rows in (1000, 1000, 800, 1200, 900, 1100):
        yield partial(step, torch.randn(rows, 128))


def forces() -> Iterator[Step]:
    """Yield steps of a potential whose loss is of forces: a gradient inside a gradient."""
    filters, mix, out = nn.Linear(20, 64), nn.Linear(64, 64), nn.Linear(64, 1)
    net = nn.ModuleList([filters, mix, out])

    def loss(places: Tensor, first: Tensor, second: Tensor) -> Tensor:
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

    for atoms in (112, 96, 128, 120, 80, 112):
        places = torch.rand(atoms, 3) * 4
        near = (torch.cdist(places, places) < 3) & ~torch.eye(atoms, dtype=torch.bool)
        first, second = near.nonzero().t()
        yield gradients(net, partial(loss, places, first, second))


STEPS = (lengths, layer_drop, routing, unrolled, optimizer_inside, forces)


def replayed(trace: _C.Trace, budget: int, program: _C.Program | None) -> float | None:
    """Return what a run replays, as a multiple of the program's cost; None if it does not fit."""
    found: Any = _C.simulate(trace, budget, ON().core(), program, "", 0)
    return found["replayed_cost"] if isinstance(found, dict) else None


def planned(trace: _C.Trace, budget: int) -> _C.Program:
    """Return the program with a plan for ``budget``."""
    program = _C.Program(trace)
    Guided(search=SEARCH).begin(program, budget)
    program.finish()
    return program


def row(name: str, traces: list[rematfn.Trace], fraction: float) -> dict[str, Any]:
    """Return the table's row for one step and fraction."""
    first, *others = traces
    budget = int(fraction * max(trace.peak_bytes for trace in traces))
    recorded = RecordedProgram(first._core, budget, first.peak_bytes, makes_state=False)
    cells = []
    for trace in others:
        core = trace._core
        online = replayed(core, budget, None)
        if online is None:
            continue
        plan = recorded.for_another(Guided(search=SEARCH), budget, trace.peak_bytes)
        assert plan is not None
        plan.finish()
        guided, own = replayed(core, budget, plan), replayed(core, budget, planned(core, budget))
        assert guided is not None, f"{name} at {fraction}: it fits online, and not guided"
        cells.append((online, guided, online if own is None else own))
    found = {"step": name, "budget": fraction, "calls": f"{len(cells)} of {len(others)}"}
    if not cells:
        return found
    means = {
        kind: mean(cell[i] for cell in cells) for i, kind in enumerate(("online", "guided", "own"))
    }
    worst = max((1 + guided) / (1 + min(online, own)) for online, guided, own in cells)
    return found | means | {"the most": worst}


def main() -> None:
    """Make the table, or a part of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", help="the name of one step")
    only = parser.parse_args().only
    rows = []
    for step in STEPS:
        if only in (None, step.__name__):
            torch.manual_seed(0)
            traces = [rematfn.record(call) for call in step()]
            rows += [row(step.__name__, traces, fraction) for fraction in FRACTIONS]
            print(rows[-len(FRACTIONS) :], flush=True)
    if only is None:
        save("varying", "Calls that differ, by the record of one", rows, about=ABOUT)


if __name__ == "__main__":
    main()
