# SPDX-License-Identifier: Apache-2.0
"""Beside `torch.utils.checkpoint`: hazards of running the function again, and `rematfn.checkpoint`.

Each test of a hazard shows first what torch's (non-reentrant) does, so that the day on which torch
does otherwise is noticed, and then that `remat` gives the bits of the function itself.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import (
    EVERYTHING,
    Transform,
    assert_bitwise_equal,
    assert_nothing_keyed,
    assert_same_as_eager,
    described,
    difference,
    stepped,
    untransformed,
)
from programs import Program
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointError, checkpoint

import rematfn
from rematfn.testing import MemoryTimeline


def checkpointed(f: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: checkpoint(f, *args, use_reentrant=False)


def agree(run: Callable[[Transform], list[Any]], transform: Transform) -> bool:
    actual, expected = run(transform), run(untransformed)
    return not any(difference(a, e) for a, e in zip(actual, expected, strict=True))


def backward(f: Callable[..., Tensor], transform: Transform) -> Tensor:
    torch.manual_seed(3)
    x = torch.randn(6, 5, requires_grad=True)
    transform(f)(x).square().sum().backward()
    assert x.grad is not None
    return x.grad


def batch_norm(transform: Transform) -> list[Any]:
    norm = nn.BatchNorm1d(5)
    grad = backward(lambda x: norm(x.sin()).exp(), transform)
    return [grad, *norm.buffers()]


def own_generator(transform: Transform) -> list[Any]:
    generator = torch.Generator().manual_seed(5)

    def f(x: Tensor) -> Tensor:
        return x.exp() * torch.bernoulli(torch.full_like(x, 0.5), generator=generator)

    return [backward(f, transform), generator.get_state()]


def side_effect(transform: Transform) -> list[Any]:
    calls: list[int] = []

    def f(x: Tensor) -> Tensor:
        calls.append(1)
        return x.sin().exp()

    return [backward(f, transform), len(calls)]


def changed(f: Transform, change: Callable[[], Any], transform: Transform) -> list[Any]:
    """Return the gradient if something is changed before the backward."""
    torch.manual_seed(3)
    x = torch.randn(6, 5, requires_grad=True)
    out = transform(f)(x).sum()
    change()
    out.backward()
    return [x.grad]


def changing_control_flow(transform: Transform) -> list[Any]:
    state = {"training": True}

    def f(x: Tensor) -> Tensor:
        return (x.sin() if state["training"] else x.cos()).exp()

    return changed(f, lambda: state.update(training=False), transform)


def changing_length(transform: Transform) -> list[Any]:
    depth = [3]

    def f(x: Tensor) -> Tensor:
        for _ in range(depth[0]):
            x = x.sin()
        return x

    return changed(f, lambda: depth.append(depth.pop() - 1), transform)


def noise_saved_before_it_was_drawn(transform: Transform) -> list[Any]:
    rrelu = nn.RReLU(0.1, 0.9)
    torch.use_deterministic_algorithms(
        True
    )  # fills raw memory, so that the peer's luck is the same
    try:
        return [backward(lambda x: rrelu(x.sin()), transform)]
    finally:
        torch.use_deterministic_algorithms(False)


def writes_into_its_argument(transform: Transform) -> list[Any]:
    torch.manual_seed(3)
    leaf = torch.randn(6, 5, requires_grad=True)
    transform(lambda x: x.mul_(2).sin())(leaf * 1).sum().backward()
    return [leaf.grad]


def counted_in_a_buffer(transform: Transform) -> list[Any]:
    steps = torch.zeros(())

    def f(x: Tensor) -> Tensor:
        steps.add_(1)
        return (x * steps.clone()).exp()

    return [backward(f, transform), steps]


def overwritten_by_an_optimiser(transform: Transform) -> list[Any]:
    x, w = torch.linspace(-1, 1, 12).requires_grad_(), torch.linspace(0.5, 1.5, 12)
    loss = transform(lambda x: ((x + w).sin() * 2).exp().sum())(x)
    w.grad = torch.ones(12)
    torch.optim.SGD([w], lr=0.5, fused=True).step()
    loss.backward()
    return [x.grad]


# What torch raises where the second run differs; None: values differ, and nothing is said.
HAZARDS: dict[Callable[[Transform], list[Any]], tuple[type[Exception], str] | None] = {
    batch_norm: None,
    own_generator: None,
    side_effect: None,
    changing_control_flow: None,
    changing_length: (CheckpointError, "number of tensors"),
    noise_saved_before_it_was_drawn: None,
    # Run again, the function writes into it again; autograd finds it changed.
    writes_into_its_argument: (RuntimeError, "modified by an inplace operation"),
    counted_in_a_buffer: None,
    overwritten_by_an_optimiser: None,
}


@pytest.mark.parametrize("hazard", HAZARDS, ids=lambda h: h.__name__)
def test_a_hazard_of_running_again(hazard: Callable[[Transform], list[Any]]) -> None:
    raised = HAZARDS[hazard]
    if raised is None:
        assert not agree(hazard, checkpointed)
    else:
        with pytest.raises(raised[0], match=raised[1]):
            hazard(checkpointed)
    assert_same_as_eager(hazard)


def overwritten(transform: Transform) -> list[Any]:
    """Autograd saves the exponential alone; a recomputation reads `w`."""
    w = torch.linspace(-1, 1, 30).view(6, 5)
    return changed(lambda x: (x + w).exp().sum(), lambda: w.mul_(0.5), transform)


def test_a_captured_tensor_that_is_overwritten_before_the_backward() -> None:
    """Silently wrong there, an error here: no replay can make it again."""
    assert not agree(overwritten, checkpointed)
    assert agree(overwritten, rematfn.remat)  # nothing was evicted
    with pytest.raises(rematfn.ReplayError, match="overwritten"):
        overwritten(EVERYTHING)


REFUSED: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "grad": torch.func.grad,
    "vjp": lambda f: lambda x: torch.func.vjp(f, x)[1](torch.ones(()))[0],
    "jacrev": torch.func.jacrev,
    "hessian": torch.func.hessian,
    "vmap of grad": lambda f: torch.func.vmap(torch.func.grad(f)),
}


@pytest.mark.parametrize("transform", REFUSED.values(), ids=REFUSED.keys())
def test_transforms_of_torch_func(
    transform: Callable[[Callable[..., Any]], Callable[..., Any]],
) -> None:
    def run(around: Transform) -> list[Any]:
        x = torch.linspace(0.1, 1, 12).view(3, 4)
        return [transform(around(lambda x: x.sin().exp().prod()))(x)]

    # torch 2.11 names the function of its checkpoint instead.
    with pytest.raises(RuntimeError, match=r"saved tensor hooks|_NoopSaveInputs"):
        run(checkpointed)
    assert_same_as_eager(run)


# --- rematfn.checkpoint, in the place of torch's --------------------------------------------------


def ours(f: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: rematfn.checkpoint(f, *args)


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


WIDTH, DEPTH = 64, 16


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x)).sin().exp().cos()


@pytest.mark.parametrize("depth", [1, 4, DEPTH])
def test_without_a_budget_nothing_is_kept_as_with_theirs(depth: int) -> None:
    """What lives between the forward and the backward, and the peak of the whole step."""

    def held(transform: Transform) -> tuple[Any, int, int]:
        torch.manual_seed(0)
        net = nn.Sequential(*(Layer() for _ in range(depth)))
        x = torch.randn(WIDTH, WIDTH, requires_grad=True)
        with MemoryTimeline() as forward:
            out = transform(net)(x)
        with MemoryTimeline() as backward:
            out.sum().backward()
        return [x.grad, *(p.grad for p in net.parameters())], forward.final, backward.peak

    expected, left, peak = held(checkpointed)
    found, left_by_ours, peak_of_ours = held(ours)
    assert_bitwise_equal(found, expected)
    assert left_by_ours <= left
    assert peak_of_ours <= peak
