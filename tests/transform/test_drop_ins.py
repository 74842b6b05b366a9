# SPDX-License-Identifier: Apache-2.0
"""`rematfn.checkpoint`, side by side with torch's."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils.checkpoint as theirs
from helpers import (
    assert_bitwise_equal,
    assert_nothing_keyed,
    described,
    stepped,
    untransformed,
)
from programs import Program
from torch import Tensor, nn

import rematfn
from rematfn.testing import MemoryTimeline

Checkpoint = Callable[..., Any]


def torchs(f: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return theirs.checkpoint(f, *args, use_reentrant=False, **kwargs)


def ours(f: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: rematfn.checkpoint(f, *args, **kwargs)


# --- the same values ------------------------------------------------------------------------------


def test_any_program_and_its_gradients_are_bitwise_eager(differentiable: Program) -> None:
    found = stepped(differentiable, ours)
    assert_nothing_keyed(found)
    assert_bitwise_equal(found, stepped(differentiable, untransformed))


@pytest.mark.parametrize(
    ("option", "says"),
    [
        ({"context_fn": lambda: None}, r"context_fn.*keep\(x\).*Speed"),
        ({"debug": True}, "debug.*verify=True"),
        ({"determinism_check": "strict"}, "determinism_check.*none"),
        ({"use_reentrant": "no"}, "use_reentrant"),
        ({"preserve_rng_state": "no"}, "preserve_rng_state"),
        ({"respect_saved_tensors_hooks": "no"}, "respect_saved_tensors_hooks"),
    ],
    ids=described,
)
def test_options_that_cannot_be_meant_are_refused_with_the_way_out(
    option: dict[str, Any], says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        rematfn.checkpoint(torch.sin, torch.ones(3), **option)


# --- bytes ----------------------------------------------------------------------------------------

WIDTH, DEPTH = 64, 16


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x)).sin().exp().cos()


@pytest.mark.parametrize("depth", [1, 4, DEPTH])
def test_without_a_budget_nothing_is_kept_as_with_torchs(depth: int) -> None:
    """What lives between the forward and the backward, and the peak of the whole step."""

    def held(checkpoint: Checkpoint) -> tuple[Any, int, int]:
        torch.manual_seed(0)
        net = nn.Sequential(*(Layer() for _ in range(depth)))
        x = torch.randn(WIDTH, WIDTH, requires_grad=True)
        with MemoryTimeline() as forward:
            out = checkpoint(net, x)
        with MemoryTimeline() as backward:
            out.sum().backward()
        return [x.grad, *(p.grad for p in net.parameters())], forward.final, backward.peak

    expected, left, peak = held(torchs)
    found, left_by_ours, peak_of_ours = held(rematfn.checkpoint)
    assert_bitwise_equal(found, expected)
    assert left_by_ours <= left
    assert peak_of_ours <= peak
