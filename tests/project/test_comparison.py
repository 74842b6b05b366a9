# SPDX-License-Identifier: Apache-2.0
"""What docs/ says of torch without a source, since it was tried: a change in torch is seen here."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

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
