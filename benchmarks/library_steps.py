# SPDX-License-Identifier: Apache-2.0
"""Training steps of libraries on data that differs from call to call, in every call another batch.

Random weights and random data: nothing is downloaded. Each step has a process to itself.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
import typing
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

os.environ.setdefault("KINETO_LOG_LEVEL", "5")  # the profiler is chatty

import torch
import torch.utils.data.dataloader
from measure import (
    RESULTS,
    OthersLoad,
    machine,
    measured_parts,
    print_found,
    section,
    write_document,
)
from torch import Tensor, nn

import rematfn
from rematfn.testing import MemoryTimeline

FRACTIONS = (0.5, 0.4, 0.3)
CALLS = 16
SETTLING = 2  # calls: the first is measured, and the second follows the first plan that fits
ABOUT = """\
A training step, loss and gradients, each with another batch: molecules of other sizes with other
neighbours, or fields of other sizes. 16 calls of each; the budget is a fraction of the largest peak
so far. *Exact*: loss and gradients of all calls are eager's, bit for bit. *Within*: no
call's peak is above its budget, as the profiler counts allocations, results aside. *Share*: the
least share of its own peak that a call had. *Replayed*: replayed cost over the step's, by the cost
model, of calls three to sixteen. *Time*: the same calls' wall time over that of eager's step with
that batch, the less of two; one thread. *Others' load*: how many cores others kept busy meanwhile.
"""
ABOUTS = {
    "PaiNN": "SchNetPack: energies and forces of eight molecules of 14 to 30 atoms.",
    "MACE": "mace-torch: energies and forces of two molecules of 8 to 16 atoms, correlation 3.",
    "TensorNet": "TorchMD-Net: energies and forces of two molecules of 10 to 20 atoms; some of its "
    "kernels are NVIDIA Warp's.",
    "FNO": "neuraloperator: six fields of 24 to 40 squared.",
}


@dataclass
class Step:
    """A loss of a batch, the parameters whose gradients are wanted, and how a batch is drawn."""

    loss: Callable[[dict[str, Any]], Tensor]
    parameters: list[nn.Parameter]
    batch: Callable[[], dict[str, Any]]


def molecules(count: int, atoms: int, box: float, cutoff: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return places, the molecule of each atom, and pairs that are near, of one molecule."""
    places, of = torch.rand(count * atoms, 3) * box, torch.arange(count * atoms) // atoms
    near = (torch.cdist(places, places) < cutoff) & (of[:, None] == of)
    return places, of, near.fill_diagonal_(False).nonzero().t()


def painn() -> Step:
    """Return SchNetPack's PaiNN with a loss of energies and forces."""
    # SchNetPack imports what torch 2.13 has no more.
    vars(torch.utils.data.dataloader).setdefault("T_co", typing.TypeVar("T_co", covariant=True))
    vars(torch.utils.data.dataloader).setdefault("_collate_fn_t", object)
    import schnetpack as library
    import schnetpack.properties as names

    net = nn.Sequential(
        library.atomistic.PairwiseDistances(),
        library.representation.PaiNN(
            n_atom_basis=64,
            n_interactions=3,
            radial_basis=library.nn.GaussianRBF(20, 5.0),
            cutoff_fn=library.nn.CosineCutoff(5.0),
        ),
        library.atomistic.Atomwise(n_in=64, output_key="energy"),
    )

    def batch() -> dict[str, Any]:
        atoms = random.randint(14, 30)
        places, of, (first, second) = molecules(8, atoms, 6.0, 5.0)
        return {
            names.Z: torch.randint(1, 9, (len(places),)),
            names.R: places,
            names.idx_m: of,
            names.idx_i: first,
            names.idx_j: second,
            names.offsets: torch.zeros(len(first), 3),
            names.n_atoms: torch.full((8,), atoms),
            "forces": torch.randn(len(places), 3),
        }

    def loss(data: dict[str, Any]) -> Tensor:
        places = data[names.R].detach().requires_grad_()
        energy = net({**data, names.R: places})["energy"]
        (slope,) = torch.autograd.grad(energy.sum(), places, create_graph=True)
        return energy.square().mean() + (slope + data["forces"]).square().mean()

    return Step(loss, list(net.parameters()), batch)


def mace() -> Step:
    """Return MACE with a loss of energies and forces."""
    torch.serialization.add_safe_globals([slice])  # e3nn loads its constants
    import numpy
    from e3nn.o3 import Irreps
    from mace import modules

    blocks = modules.interaction_classes
    net = modules.MACE(
        r_max=5.0,
        num_bessel=8,
        num_polynomial_cutoff=5,
        max_ell=2,
        interaction_cls=blocks["RealAgnosticResidualInteractionBlock"],
        interaction_cls_first=blocks["RealAgnosticInteractionBlock"],
        num_interactions=2,
        num_elements=3,
        hidden_irreps=Irreps("16x0e+16x1o"),
        MLP_irreps=Irreps("16x0e"),
        atomic_energies=numpy.zeros(3),
        avg_num_neighbors=8,
        atomic_numbers=[1, 6, 8],
        correlation=3,
        gate=nn.functional.silu,
    ).float()

    def batch() -> dict[str, Any]:
        atoms = random.randint(8, 16)
        places, of, pairs = molecules(2, atoms, 5.0, 4.0)
        kinds = nn.functional.one_hot(torch.randint(0, 3, (len(places),)), 3)
        return {
            "positions": places,
            "node_attrs": kinds.float(),
            "edge_index": pairs,
            "shifts": torch.zeros(pairs.shape[1], 3),
            "unit_shifts": torch.zeros(pairs.shape[1], 3),
            "cell": torch.zeros(6, 3),
            "batch": of,
            "ptr": torch.arange(3) * atoms,
            "head": torch.zeros(2, dtype=torch.long),
            "wanted": torch.randn(len(places), 3),
        }

    def loss(data: dict[str, Any]) -> Tensor:
        places = data["positions"].detach().requires_grad_()
        found = net({**data, "positions": places}, training=True, compute_force=True)
        return found["energy"].square().mean() + (found["forces"] - data["wanted"]).square().mean()

    return Step(loss, list(net.parameters()), batch)


def tensornet() -> Step:
    """Return TorchMD-Net's TensorNet with a loss of energies and forces."""
    from torchmdnet.models.model import create_model

    net = create_model(
        {
            "model": "tensornet",
            "embedding_dimension": 32,
            "num_layers": 2,
            "num_rbf": 16,
            "rbf_type": "expnorm",
            "trainable_rbf": False,
            "activation": "silu",
            "cutoff_lower": 0.0,
            "cutoff_upper": 4.0,
            "max_z": 20,
            "max_num_neighbors": 64,
            "equivariance_invariance_group": "O(3)",
            "prior_model": None,
            "atom_filter": -1,
            "derivative": True,
            "output_model": "Scalar",
            "reduce_op": "add",
            "precision": 32,
            "static_shapes": False,
            "check_errors": False,
        }
    )

    def batch() -> dict[str, Any]:
        places, of, _ = molecules(2, random.randint(10, 20), 5.0, 3.0)
        kinds, forces = torch.randint(1, 9, (len(places),)), torch.randn(len(places), 3)
        return {"kinds": kinds, "places": places, "of": of, "forces": forces}

    def loss(data: dict[str, Any]) -> Tensor:
        places = data["places"].detach().requires_grad_()
        energy, forces = net(data["kinds"], places, data["of"])
        return energy.square().mean() + (forces - data["forces"]).square().mean()

    return Step(loss, list(net.parameters()), batch)


def fno() -> Step:
    """Return neuraloperator's FNO."""
    from neuralop.models import FNO

    net = FNO(n_modes=(8, 8), in_channels=1, out_channels=1, hidden_channels=24, n_layers=4)

    def batch() -> dict[str, Any]:
        side = random.choice([24, 28, 32, 36, 40])
        return {"x": torch.randn(6, 1, side, side), "y": torch.randn(6, 1, side, side)}

    return Step(lambda d: (net(d["x"]) - d["y"]).square().mean(), list(net.parameters()), batch)


STEPS = {"PaiNN": painn, "MACE": mace, "TensorNet": tensornet, "FNO": fno}


def whole(step: Step) -> Callable[[dict[str, Any]], list[Any]]:
    """Return the step as a function of a batch: its loss and gradients."""

    def gradients(batch: dict[str, Any]) -> list[Any]:
        found = step.loss(batch)
        return [found.detach(), *torch.autograd.grad(found, step.parameters, allow_unused=True)]

    return gradients


def same(ours: list[Any], eagers: list[Any]) -> bool:
    """Return whether two steps have computed the same bits."""
    return all(
        a is b is None or torch.equal(a.flatten().view(torch.uint8), b.flatten().view(torch.uint8))
        for a, b in zip(ours, eagers, strict=True)
    )


def row(make: Callable[[], Step], fraction: float) -> dict[str, Any]:
    """Return the table's row for one step and fraction."""
    random.seed(0)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    step = make()
    eager, batches = whole(step), [step.batch() for _ in range(CALLS)]
    for _ in range(4):  # TorchScript compiles, after which a step's last bits are others
        eager(batches[0])
    exact, within = True, True
    watched = rematfn.remat(eager, fraction)
    for batch in batches:
        with MemoryTimeline() as timeline:
            found = watched(batch)
        exact &= same(found, eager(batch))
        budget = rematfn.stats(watched).budget
        within &= budget is None or timeline.peak_excluding_survivors <= budget
        del found
    timed = rematfn.remat(eager, fraction)
    shares, replayed, ratios = [], [], []
    with OthersLoad() as others:
        for batch in batches:
            seconds = [time_of(eager, batch) for _ in range(2)]
            seconds.append(time_of(timed, batch))
            stats = rematfn.stats(timed)
            shares.append((stats.budget or stats.unconstrained_bytes) / stats.unconstrained_bytes)
            replayed.append(stats.replayed_cost)
            ratios.append(seconds[-1] / min(seconds[:-1]))
    return {
        "budget": fraction,
        "exact": exact,
        "within": within,
        "share": min(shares),
        "replayed, mean": mean(replayed[SETTLING:]),
        "most": max(replayed[SETTLING:]),
        "time, median": median(ratios[SETTLING:]),
        "slowest": max(ratios[SETTLING:]),
        "others' load": others.cores,
    }


def time_of(step: Callable[[dict[str, Any]], list[Any]], batch: dict[str, Any]) -> float:
    """Return the seconds that a step takes."""
    began = time.perf_counter()
    step(batch)
    return time.perf_counter() - began


def measure(name: str) -> Iterator[dict[str, Any]]:
    """Yield the head of a step's record, and its rows."""
    yield {"about": ABOUTS[name], "machine": machine()}
    for fraction in FRACTIONS:
        with redirect_stdout(sys.stderr):  # some libraries print
            found = row(STEPS[name], fraction)
        yield found


def main() -> None:
    """Measure, and save after each row; what is not measured stays as it was."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", nargs="+", default=list(STEPS), choices=list(STEPS))
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--part", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part:
        return print_found(measure(options.part))
    path = options.out / "library_steps.json"
    results = measured_parts(__file__, options.parts, sys.argv[1:], path)
    parts = ["# Steps of libraries, each call with another batch", ABOUT.strip()]
    for name, record in results.items():
        parts += section(name, record)
    print(write_document(path.with_suffix(".md"), parts))


if __name__ == "__main__":
    main()
