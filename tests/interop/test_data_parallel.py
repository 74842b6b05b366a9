# SPDX-License-Identifier: Apache-2.0
"""The wrappers that replicate a module, around a transformed one, in a single process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from helpers import Mode, Transform, assert_same_as_eager
from torch import distributed, nn


@pytest.fixture
def _alone(tmp_path: Any) -> Iterator[None]:
    distributed.init_process_group("gloo", f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def trained(wrap: Any, transform: Transform) -> Any:
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 4))
    model = wrap(transform(net))
    optimiser = torch.optim.AdamW(net.parameters(), lr=0.1)
    losses = []
    for k in range(3):
        optimiser.zero_grad()
        loss = model(torch.linspace(-1, 1, 12).view(3, 4) * (k + 1)).square().sum()
        loss.backward()
        optimiser.step()
        losses.append(loss.detach())
    state = {name: t.detach() for name, t in net.state_dict().items()}
    return losses, state, [p.grad for p in net.parameters()]


@pytest.mark.usefixtures("_alone")
@pytest.mark.parametrize("buckets", [False, True], ids=["copies", "views-of-buckets"])
def test_distributed_data_parallel(buckets: bool, mode: Mode) -> None:
    def wrap(module: nn.Module) -> nn.Module:
        return nn.parallel.DistributedDataParallel(module, gradient_as_bucket_view=buckets)

    assert_same_as_eager(lambda transform: trained(wrap, transform), mode)


def test_data_parallel(mode: Mode) -> None:
    assert_same_as_eager(lambda transform: trained(nn.DataParallel, transform), mode)
