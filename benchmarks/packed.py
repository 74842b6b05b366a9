# SPDX-License-Identifier: Apache-2.0
"""Packing what waits, beside computing it again and beside a disk.

Each network runs in a process of its own. Counts are of one guided call; times are medians of the
ratios to eager of rounds in which all take turns.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from cells import Bench, Row
from measure import (
    RESULTS,
    OthersLoad,
    compared,
    interleaved,
    machine,
    measured_parts,
    print_found,
    section,
    write_document,
)
from networks import Chain, Layers, Network, Step, in_order, plain, resnet, unet
from networks import _network as network
from torch import Tensor, nn

import rematfn
from rematfn._transform.recorded import finish_searches

MIB = 1 << 20


class Block(nn.Module):
    """A transformer's block with dropout, which masks what is to come, or what is padding."""

    def __init__(self, width: int, heads: int, activation: type[nn.Module], padding: bool) -> None:
        super().__init__()
        self.heads, self.padding = heads, padding
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), activation(), nn.Linear(4 * width, width), nn.Dropout(0.1)
        )

    def forward(self, x: Tensor) -> tuple[Tensor]:
        """Return the block's output, of the shape of ``x``: batch, length, width."""
        batch, length, width = x.shape
        qkv = self.qkv(self.norms[0](x)).view(batch, length, 3, self.heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-1, -2) / (width // self.heads) ** 0.5
        if self.padding:
            lengths = torch.linspace(length // 4, length, batch).long()
            masked = (torch.arange(length) >= lengths[:, None])[:, None, None]
        else:
            masked = torch.ones(length, length, dtype=torch.bool).triu(1)
        weights = F.dropout(scores.masked_fill(masked, float("-inf")).softmax(-1), 0.1)
        mixed = (weights @ v).transpose(1, 2).reshape(batch, length, width)
        x = x + F.dropout(self.out(mixed), 0.1)
        return (x + self.mlp(self.norms[1](x)),)


class Experts(nn.Module):
    """A mixture of experts: each row goes to one, and the others see zeros."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))
            for _ in range(experts)
        )

    def forward(self, x: Tensor) -> tuple[Tensor]:
        """Return the rows, each with its expert's output added."""
        weights = self.gate(x).softmax(-1)
        chosen = F.one_hot(weights.argmax(-1), len(self.experts)).to(x.dtype)
        y = x
        for i, expert in enumerate(self.experts):
            y = y + chosen[:, i : i + 1] * weights[:, i : i + 1] * expert(chosen[:, i : i + 1] * x)
        return (y,)


class Words(nn.Module):
    """Embeddings of many words, summed."""

    def __init__(self, words: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)

    def forward(self, x: Tensor) -> tuple[Tensor]:
        """Return the means over the words of each row, of neighbouring ones, too."""
        pairs = (x[:, 1:] * 31 + x[:, :-1]) % self.embedding.num_embeddings
        return (torch.cat([self.embedding(x), self.embedding(pairs)], 1).mean(1),)


def _squares(output: Tensor, _: Tensor) -> Tensor:
    return output.square().mean()


def transformer(layers: int, activation: type[nn.Module], padding: bool) -> Any:
    """Return a row of blocks, an input and a target that nothing reads."""
    blocks = [Block(256, 8, activation, padding) for _ in range(layers)]
    return Chain(blocks, _squares), torch.randn(8, 128, 256), torch.zeros(())


def layers(count: int, width: int, batch: int) -> Any:
    """Return linear layers with ReLU and dropout, an input and a target that nothing reads."""
    blocks = [Layers(nn.Linear(width, width), nn.ReLU(), nn.Dropout(0.5)) for _ in range(count)]
    return Chain(blocks, _squares), torch.randn(batch, width), torch.zeros(())


def experts(count: int) -> Any:
    """Return a row of mixtures of experts, an input and a target that nothing reads."""
    blocks = [Experts(256, 8) for _ in range(count)]
    return Chain(blocks, _squares), torch.randn(2048, 256), torch.zeros(())


def words() -> Any:
    """Return an embedding and layers on top, indices and a target that nothing reads."""
    blocks = [Words(50_000, 64), Layers(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))]
    return Chain(blocks, _squares), torch.randint(0, 50_000, (512, 256)), torch.zeros(())


CASES: dict[str, Network] = {
    n.name: n
    for n in [
        network("mlp", "8 layers with ReLU and dropout", plain, lambda: layers(8, 512, 2048)),
        network("resnet", "ResNet, 9 blocks", plain, lambda: resnet((3, 3, 3), 32, 64, 24)),
        network("unet", "U-Net, 3 halvings", plain, lambda: unet(3, 32, 128, 6)),
        network("gpt", "GPT, 6 layers, dropout", plain, lambda: transformer(6, nn.GELU, False)),
        network(
            "bert", "BERT, 6 layers, ReLU, padding", plain, lambda: transformer(6, nn.ReLU, True)
        ),
        network("moe", "3 mixtures of 8 experts", plain, lambda: experts(3)),
        network("words", "embeddings of 512 x 256 words", plain, words),
    ]
}
QUICK = network("mlp", "3 layers with ReLU and dropout", plain, lambda: layers(3, 256, 1024))


def step_of(bench: Bench, transform: Any) -> tuple[Step, list[Any]]:
    """Return the step under ``transform``, and a list that has what that returned."""
    made: list[Any] = []

    def note(f: Any) -> Any:
        made.append(transform(f))
        return made[-1]

    return bench.program.make_step(note, in_order), made


def measure(name: str, options: argparse.Namespace) -> Iterator[Row]:
    """Yield what there is to say of a network, and then its rows."""
    bench = Bench(QUICK if options.quick else CASES[name])
    about = f"{bench.network.about}. Eager's peak: {bench.peak / MIB:.0f} MiB."
    yield {"about": about, "machine": machine()}
    ways: list[tuple[str, float | None, Any, Any]] = []
    packed = rematfn.Packed()
    ways.append(("offload, Packed()", None, lambda f: rematfn.offload(f, to=packed), packed))
    for fraction in options.budgets:
        budget = int(fraction * bench.peak)
        beside, disk = rematfn.Packed(), rematfn.Disk()
        for way, tier in (("remat", None), ("remat, Packed()", beside), ("remat, a disk", disk)):
            given = {} if tier is None else {"offload": tier}
            ways.append(
                (way, fraction, lambda f, b=budget, g=given: rematfn.remat(f, b, **g), tier)
            )
    for way, fraction, transform, tier in ways:
        row: Row = {"way": way, "budget": fraction}
        step, made = step_of(bench, transform)
        try:
            for _ in range(options.calls):
                bench.run(step)
                finish_searches()
            results, memory = bench.count(step)
        except rematfn.BudgetError as error:
            yield {**row, "refused": str(error).splitlines()[0][:80]}
            continue
        stats = rematfn.stats(made[0])
        row |= {"peak / eager's": memory.peak / bench.peak, "exact": bench.is_exact(results)}
        del results
        row |= {"replayed": stats.replayed_cost, "call": stats.call}
        if tier is not None:
            row |= {"MiB moved": (stats.moved_bytes or 0) / MIB, "of them": stats.moves}
        with OthersLoad() as others:
            seconds = interleaved(
                {
                    "eager": lambda: bench.run(bench.eager)[1],
                    "ours": lambda s=step: bench.run(s)[1],
                },
                options.repeats,
            )
        row |= compared(seconds["ours"], seconds["eager"])
        row |= {"eager, s": median(seconds["eager"]), "others, cores": others.cores}
        if isinstance(tier, rematfn.Packed) and tier.bandwidth_out and tier.bandwidth_in:
            row["s a GiB, there and back"] = (1 << 30) * (
                1 / tier.bandwidth_out + 1 / tier.bandwidth_in
            )
        yield row


ABOUT = """
*Peak* is counted at the allocator. *Replayed* is the cost of replays as a multiple of the step's:
by the cost model, and where values may be packed or written by how long the step's operators took.
*MiB moved* are the bytes of the values that were packed or written. *Time* is
the median over rounds of the ratio to eager, with the least and the most; *others* is how many
cores other processes kept busy meanwhile.
"""


def main() -> None:
    """Measure, and save after each row; what is not measured stays as it was."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--budgets", type=float, nargs="+", default=[0.5, 0.3])
    parser.add_argument("--calls", type=int, default=8, help="before the one that is counted")
    parser.add_argument("--repeats", type=int, default=5, help="timed rounds for each row")
    parser.add_argument("--quick", action="store_true", help="a tiny network, to see it work")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--part", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.quick:
        options.parts, options.budgets, options.repeats = ["mlp"], [0.5], 2
    if options.part:
        return print_found(measure(options.part, options))
    results = measured_parts(__file__, options.parts, sys.argv[1:], options.out / "packed.json")
    parts = ["# Packing beside a budget (`python benchmarks/packed.py`)", ABOUT.strip()]
    for name, record in results.items():
        parts += section(name, record)
    print(write_document(options.out / "packed.md", parts))


if __name__ == "__main__":
    main()
