# SPDX-License-Identifier: Apache-2.0
"""The benchmark of library models on a toy: what a row says, and that it sees a broken promise."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

pytest.importorskip("matplotlib")
sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import library_models


class Toy(nn.Module):
    """Blocks with a batch norm each, which its own checkpointing updates twice."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32), nn.GELU()) for _ in range(8)
        )
        self.checkpointing = False

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointing else block(x)
        return x.square().mean()

    def set_checkpointing(self, on: bool) -> None:
        self.checkpointing = on


def toy() -> library_models.Model:
    module = Toy()
    return library_models.Model(module, module, (torch.randn(256, 32),), module.set_checkpointing)


@pytest.fixture(scope="module")
def row() -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(library_models.MODELS, "toy", ("torch", toy))
        patch.setattr(library_models, "without_torchvision_operators", lambda: None)
        return library_models.measure("toy", repeats=1)


def test_a_row_has_both_at_the_librarys_peak(row: dict[str, Any]) -> None:
    assert row["exact"] is True
    assert row["within"] is True
    assert row["library's exact"] is False, "its batch norms saw the batch twice"
    assert row["ours"] <= row["library's"] < row["plain peak, MiB"]
    assert 0 < row["floor"] <= row["of plain's"]
    assert row["ours / library"] > 0


def test_what_breaks_a_promise_is_listed(row: dict[str, Any]) -> None:
    kept = {**row, "ours / library": 0.9}
    assert library_models.broken([kept]) == []
    bad = {**row, "exact": False, "within": False, "ours / library": 1.1}
    assert [line.partition(": ")[2] for line in library_models.broken([bad])] == [
        "not bitwise the plain model's",
        "a peak above the budget",
        "slower than its library's own checkpointing",
    ]
