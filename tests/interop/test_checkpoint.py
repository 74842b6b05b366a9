# SPDX-License-Identifier: Apache-2.0
"""`torch.utils.checkpoint` inside and around `remat`: both of its kinds, and selective ones."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import Transform, blocks, rows, same_as_eager, trained
from torch import Tensor
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

aten = torch.ops.aten


def keep_products(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    products = (aten.mm.default, aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if op in products else CheckpointPolicy.PREFER_RECOMPUTE


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
}


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
@same_as_eager
def test_checkpoint_inside(transform: Transform, kind: Wrap) -> Any:
    net = blocks()

    def f(x: Tensor) -> Tensor:
        for block in net:
            x = kind(block, x.sin())
        return x

    return trained(transform(f), net)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
@same_as_eager
def test_checkpoint_between_two_levels(transform: Transform, kind: Wrap) -> Any:
    net = blocks()
    parts = [transform(block) for block in net]

    def f(x: Tensor) -> Tensor:
        for part in parts:
            x = kind(part, x.sin())
        return x.exp()

    return trained(transform(f), net)


@pytest.mark.parametrize("name", [name for name in KINDS if name != "reentrant"])
@same_as_eager
def test_a_gradient_of_checkpoints_within_the_function(transform: Transform, name: str) -> Any:
    net = blocks()

    def gradient(x: Tensor) -> Any:
        out = KINDS[name](net, x.sin())
        return out, torch.autograd.grad(out.square().sum(), [x, *net.parameters()])

    torch.manual_seed(5)
    return transform(gradient)(rows()), torch.rand(2)
