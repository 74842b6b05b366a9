# SPDX-License-Identifier: Apache-2.0
"""`torch.utils.checkpoint` inside and around `remat`: both of its kinds, and selective ones."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import Transform, same_as_eager
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

aten = torch.ops.aten


def keep_products(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    products = (aten.mm.default, aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if op in products else CheckpointPolicy.PREFER_RECOMPUTE


def offload_products(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    kept = keep_products(ctx, op)
    return CheckpointPolicy.PREFER_SAVE if kept is CheckpointPolicy.MUST_SAVE else kept


Wrap = Callable[..., Any]
KINDS: dict[str, Wrap] = {
    "reentrant": functools.partial(checkpoint, use_reentrant=True),
    "non-reentrant": functools.partial(checkpoint, use_reentrant=False),
    "without-early-stop": functools.partial(checkpoint, use_reentrant=False, early_stop=False),
    "selective": functools.partial(
        checkpoint,
        use_reentrant=False,
        context_fn=functools.partial(create_selective_checkpoint_contexts, keep_products),
    ),
    "selective-list": functools.partial(
        checkpoint,
        use_reentrant=False,
        context_fn=functools.partial(
            create_selective_checkpoint_contexts, [aten.addmm.default, aten.exp.default]
        ),
    ),
    "selective-prefer": functools.partial(
        checkpoint,
        use_reentrant=False,
        context_fn=functools.partial(create_selective_checkpoint_contexts, offload_products),
    ),
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 4)
        self.dropout = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.second(self.dropout(torch.tanh(self.first(x))))
        return h.exp().cos() * x + h


def model() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(*(Block() for _ in range(3)))


def start() -> Tensor:
    return torch.linspace(-1, 1, 12).view(3, 4).requires_grad_()


def trained(f: Callable[[Tensor], Tensor], net: nn.Module) -> Any:
    x = start()
    torch.manual_seed(5)
    out = f(x)
    out.square().sum().backward()
    return out, x.grad, [p.grad for p in net.parameters()], torch.rand(2)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
@same_as_eager
def test_checkpoint_inside(transform: Transform, kind: Wrap) -> Any:
    net = model()

    def f(x: Tensor) -> Tensor:
        for block in net:
            x = kind(block, x.sin())
        return x

    return trained(transform(f), net)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
@same_as_eager
def test_checkpoint_between_two_levels(transform: Transform, kind: Wrap) -> Any:
    net = model()
    blocks = [transform(block) for block in net]

    def f(x: Tensor) -> Tensor:
        for block in blocks:
            x = kind(block, x.sin())
        return x.exp()

    return trained(transform(f), net)


@pytest.mark.parametrize("name", [name for name in KINDS if name != "reentrant"])
@same_as_eager
def test_a_gradient_of_checkpoints_within_the_function(transform: Transform, name: str) -> Any:
    net = model()

    def gradient(x: Tensor) -> Any:
        out = KINDS[name](net, x.sin())
        return out, torch.autograd.grad(out.square().sum(), [x, *net.parameters()])

    torch.manual_seed(5)
    return transform(gradient)(start()), torch.rand(2)
