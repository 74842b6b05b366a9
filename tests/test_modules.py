# SPDX-License-Identifier: Apache-2.0
"""An `nn.Module` under `remat` is the same module, whose forward runs in a level."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import torch
from helpers import Mode, Transform, assert_bitwise_equal, assert_same_as_eager
from torch import nn

import rematfn

remat = rematfn.remat


def test_a_module_becomes_a_module_of_the_same_parameters() -> None:
    net = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Dropout(0.3))
    g = remat(net, budget="1MiB")
    assert isinstance(g, nn.Module)
    assert isinstance(g, nn.Sequential)
    assert list(g.state_dict()) == list(net.state_dict())
    assert [id(p) for p in g.parameters()] == [id(p) for p in net.parameters()]
    assert [id(b) for b in g.buffers()] == [id(b) for b in net.buffers()]
    assert dict(g.named_modules()).keys() == dict(net.named_modules()).keys()
    assert g[0] is net[0]
    assert len(g) == 3
    g.eval()
    assert not net.training
    assert not net[2].training
    net.train()
    assert g.training
    g.load_state_dict({k: v * 0 + 2 for k, v in net.state_dict().items()})
    assert net[0].weight.unique().tolist() == [2.0]


def test_a_module_runs_and_trains_like_the_one_it_was_made_of(mode: Mode) -> None:
    def run(transform: Transform) -> Any:
        torch.manual_seed(3)
        block = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Dropout(0.3), nn.Linear(5, 4))
        calls: list[int] = []
        block.register_forward_hook(lambda module, args, out: calls.append(1))
        net = nn.Sequential(nn.Linear(3, 4), transform(block), nn.Linear(4, 1))
        sgd = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        losses = []
        for _ in range(3):
            sgd.zero_grad()
            loss = net(torch.randn(8, 3)).square().mean()
            loss.backward()
            sgd.step()
            losses.append(loss.detach())
        swapped = {k: v * 0.5 for k, v in block.state_dict().items()}
        called = torch.func.functional_call(transform(block), swapped, (torch.randn(8, 4),))
        return losses, net.state_dict(), called.detach(), len(calls)

    assert_same_as_eager(run, mode)


def test_a_transformed_module_can_be_copied_and_saved() -> None:
    net = remat(nn.Linear(4, 4), budget=1024)
    twin = copy.deepcopy(net)
    assert twin.weight is not net.weight
    x = torch.randn(2, 4)
    assert_bitwise_equal(twin(x), net(x))
    restored = pickle.loads(pickle.dumps(net.state_dict()))
    assert_bitwise_equal(restored, net.state_dict())
