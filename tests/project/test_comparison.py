# SPDX-License-Identifier: Apache-2.0
"""What docs/ says of torch without a source, since it was tried: a change in torch is seen here."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import jvp
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    CheckpointError,
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import rematfn

SINE = torch.ops.aten.sin.default


class CountSines(TorchDispatchMode):
    sines = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.sines += func is SINE
        return func(*args, **(kwargs or {}))


def sines_under(policy: CheckpointPolicy) -> int:
    def choose(ctx: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return policy if operator is SINE else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = functools.partial(create_selective_checkpoint_contexts, choose)
    x = torch.linspace(0, 1, 4, requires_grad=True)
    with CountSines() as count:
        f = lambda x: x.sin().exp().cos()  # noqa: E731
        checkpoint(f, x, use_reentrant=False, context_fn=contexts).sum().backward()
    return count.sines


def test_a_policy_of_offloading_recomputes_in_eager() -> None:
    moved = sines_under(CheckpointPolicy.MUST_CPU_OFFLOAD)
    assert moved > sines_under(CheckpointPolicy.MUST_SAVE)
    assert moved == sines_under(CheckpointPolicy.PREFER_RECOMPUTE)


def gradient_of_a_loss_with_a_jvp(transform: Any) -> Tensor:
    w = torch.linspace(-1, 1, 9).view(3, 3).requires_grad_()
    x = torch.linspace(0, 1, 6).view(2, 3)
    block = transform(lambda x: torch.tanh(x @ w).exp())
    u, du = jvp(lambda x: block(block(x)), (x,), (torch.ones_like(x),))
    (grad,) = torch.autograd.grad((u - du).square().sum(), w)
    return grad


def test_a_jvp_within_a_loss_ends_checkpointing() -> None:
    def checkpointed(reentrant: bool) -> Any:
        return lambda f: functools.partial(checkpoint, f, use_reentrant=reentrant)

    with pytest.raises(CheckpointError, match="different number of tensors"):
        gradient_of_a_loss_with_a_jvp(checkpointed(False))
    with pytest.raises(RuntimeError, match="setup_context"):
        gradient_of_a_loss_with_a_jvp(checkpointed(True))
    expected = gradient_of_a_loss_with_a_jvp(lambda f: f)
    mine = gradient_of_a_loss_with_a_jvp(lambda f: functools.partial(rematfn.checkpoint, f))
    assert torch.equal(mine, expected)
