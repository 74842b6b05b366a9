# SPDX-License-Identifier: Apache-2.0
"""What docs/ says of torch without a source, since it was tried: a change in torch is seen here."""

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import rematfn
from rematfn.testing import EvictEverything

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


def dropped_by(f: Any) -> tuple[int, int]:
    """How many elements the forward has dropped, and how many of these have a gradient."""
    torch.manual_seed(0)
    w = torch.eye(64, requires_grad=True)
    x = (torch.rand(16, 64) + 0.5).requires_grad_()  # no zeros of its own
    out = f(x, w)
    out.sum().backward()
    assert x.grad is not None
    return int((out == 0).sum()), int(((out == 0) & (x.grad != 0)).sum())


@pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="the page is of torch 2.13")
@pytest.mark.filterwarnings("ignore")  # torch's compiler warns about torch
@pytest.mark.usefixtures("nothing_compiled")
def test_dropout_within_the_compilers_budget() -> None:
    def block(x: Tensor, w: Tensor) -> Tensor:
        return F.dropout(torch.tanh(x @ w), 0.5)

    for budget, expected in (
        (1.0, (531, 0)),
        (0.9, (531, 267)),
        (0.5, (531, 267)),
        (0.0, (531, 267)),
    ):
        torch._dynamo.reset()
        with torch._functorch.config.patch(activation_memory_budget=budget):
            assert dropped_by(torch.compile(block, backend="inductor")) == expected
    torch._dynamo.reset()
    ours = torch.compile(block, backend="rematfn")
    assert dropped_by(rematfn.remat(ours, policy=EvictEverything())) == (531, 0)
