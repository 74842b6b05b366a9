# SPDX-License-Identifier: Apache-2.0
"""`rematfn.checkpoint` and `checkpoint_sequential`, side by side with those of torch."""

from __future__ import annotations

import gc
import inspect
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import test_peers as peers
import torch
import torch.utils.checkpoint as theirs
from helpers import (
    Transform,
    assert_bitwise_equal,
    assert_nothing_keyed,
    described,
    loss_of,
    untransformed,
)
from programs import Program
from torch import Tensor, nn

import rematfn
from rematfn._transform import checkpoint as checkpoints
from rematfn._transform.history import Ran
from rematfn.testing import MemoryTimeline

Checkpoint = Callable[..., Any]


def torchs(f: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return theirs.checkpoint(f, *args, use_reentrant=False, **kwargs)


def call(f: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return f(*args, **kwargs)


def ours(f: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: rematfn.checkpoint(f, *args, **kwargs)


# --- the same values ------------------------------------------------------------------------------


def test_any_program_and_its_gradients_are_bitwise_eager(differentiable: Program) -> None:
    def run(transform: Transform) -> Any:
        case = differentiable.make()
        loss = loss_of(case, transform)
        loss.backward()
        return loss, case.args, case.held, [t.grad for t in case.leaves()], torch.rand(2)

    found = run(ours)
    assert_nothing_keyed(found)
    assert_bitwise_equal(found, run(untransformed))


@pytest.mark.parametrize(
    ("option", "says"),
    [
        ({"context_fn": lambda: None}, r"context_fn.*keep\(x\).*Speed"),
        ({"debug": True}, "debug.*verify=True"),
        ({"determinism_check": "strict"}, "determinism_check.*none"),
        ({"use_reentrant": "no"}, "use_reentrant"),
        ({"preserve_rng_state": "no"}, "preserve_rng_state"),
        ({"respect_saved_tensors_hooks": "no"}, "respect_saved_tensors_hooks"),
        ({"budget": 0.5}, r"fraction.*remat\(function, 0.5\)"),
        ({"budget": -1}, "budget"),
    ],
    ids=described,
)
def test_options_that_cannot_be_meant_are_refused_with_the_way_out(
    option: dict[str, Any], says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        rematfn.checkpoint(torch.sin, torch.ones(3), **option)


def test_the_signatures_are_torchs() -> None:
    for name in ("checkpoint", "checkpoint_sequential"):
        torchs = inspect.signature(getattr(theirs, name)).parameters
        mine = inspect.signature(getattr(rematfn, name)).parameters
        for parameter in torchs.values():
            if parameter.kind is not parameter.VAR_KEYWORD:
                assert mine[parameter.name].kind is parameter.kind, parameter.name
        assert {"preserve_rng_state", "budget"} <= set(mine)
    with pytest.raises(TypeError, match="function"):
        rematfn.checkpoint(3)  # type: ignore[arg-type]
    x = torch.ones(3)
    with pytest.raises(TypeError, match=r"segments, \(a, b\)"):  # not taken for use_reentrant
        rematfn.checkpoint_sequential([torch.add], 1, x, x)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="surprise"):
        rematfn.checkpoint_sequential([torch.sin], 1, torch.ones(3), surprise=1)  # type: ignore[call-arg]


# --- where torch's goes wrong, or refuses ---------------------------------------------------------

HAZARDS = [
    peers.batch_norm,
    peers.own_generator,
    peers.side_effect,
    peers.changing_control_flow,
    peers.changing_length,
    peers.noise_saved_before_it_was_drawn,
    peers.writes_into_its_argument,
    peers.counted_in_a_buffer,
]


@pytest.mark.parametrize("hazard", HAZARDS, ids=lambda h: h.__name__)
def test_hazards_of_running_again(hazard: Callable[[Transform], list[Any]]) -> None:
    assert peers.agree(hazard, ours)


def test_what_is_overwritten_before_the_backward_is_an_error() -> None:
    with pytest.raises(rematfn.ReplayError, match="overwritten"):
        peers.overwritten(ours)


# --- bytes ----------------------------------------------------------------------------------------

WIDTH, DEPTH = 64, 16
UNIT = 4 * WIDTH * WIDTH


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x)).sin().exp().cos()


def sequential_step(forward: Callable[[nn.Sequential, Tensor], Tensor]) -> tuple[Any, int, int]:
    """Return the gradients, the peak of a step, and what it leaves."""
    torch.manual_seed(0)
    net = nn.Sequential(*(Layer() for _ in range(DEPTH)))
    x, one = torch.randn(WIDTH, WIDTH, requires_grad=True), torch.ones(())
    with MemoryTimeline() as timeline:
        forward(net, x).square().sum().backward(one)
    return [x.grad, *(p.grad for p in net.parameters())], timeline.peak, timeline.final


@pytest.mark.parametrize("segments", [2, 4, 8, DEPTH])
def test_a_sequence_in_segments_needs_no_more_bytes_than_torchs(segments: int) -> None:
    eager, unsaved, _ = sequential_step(call)
    expected, most, _ = sequential_step(
        lambda net, x: theirs.checkpoint_sequential(net, segments, x, use_reentrant=False)
    )
    found, peak, _ = sequential_step(lambda net, x: rematfn.checkpoint_sequential(net, segments, x))
    assert_bitwise_equal(found, expected)
    assert_bitwise_equal(found, eager)
    assert most < unsaved
    assert peak <= most


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


# --- what a budget remembers ----------------------------------------------------------------------


def kinds(anchor: Any) -> list[tuple[str, int]]:
    """Return what the last call for each budget was, and how much it has replayed."""
    _, histories = checkpoints._histories[id(anchor)]
    runs = [k.latest for history in histories.values() for k in history._keys.values()]
    return [(run.read()["call"], run.read()["replays"]) for run in runs if isinstance(run, Ran)]


def steps_of(run: Callable[[nn.Sequential, Tensor], Tensor], calls: int) -> nn.Sequential:
    torch.manual_seed(0)
    net = nn.Sequential(*(Layer() for _ in range(DEPTH)))
    for _ in range(calls):
        x = torch.randn(WIDTH, WIDTH, requires_grad=True)
        found = torch.autograd.grad(run(net, x).sum(), [x, *net.parameters()])
        assert_bitwise_equal(found, torch.autograd.grad(net(x).sum(), [x, *net.parameters()]))
    return net


WITH_A_BUDGET: dict[str, Callable[[nn.Sequential, Tensor], Tensor]] = {
    "module": lambda net, x: rematfn.checkpoint(net, x, budget=12 * UNIT),
    "method": lambda net, x: rematfn.checkpoint(net.forward, x, budget=12 * UNIT),
    "sequential": lambda net, x: rematfn.checkpoint_sequential(net, 2, x, budget=12 * UNIT),
}


@pytest.mark.parametrize("run", WITH_A_BUDGET.values(), ids=WITH_A_BUDGET.keys())
def test_with_a_budget_the_second_call_is_guided(run: Any) -> None:
    once, twice = steps_of(run, 1), steps_of(run, 2)
    ((first, before),), ((second, after),) = map(kinds, (once, twice))
    assert (first, second) == ("first", "guided")
    assert 0 < after <= before


def test_what_is_remembered_keeps_no_function_alive_and_goes_with_it() -> None:
    net: nn.Module | None = Layer()
    name, alive = id(net), weakref.ref(net)
    rematfn.checkpoint(net, torch.ones(WIDTH, WIDTH), budget="1MiB")
    assert name in checkpoints._histories
    del net
    gc.collect()
    assert alive() is None
    assert name not in checkpoints._histories


@pytest.mark.parametrize("segments", [0, -1, 5, 1.5, True])
def test_a_number_of_segments_that_cannot_be_is_refused(segments: Any) -> None:
    with pytest.raises(ValueError, match=r"segments.*from 1 to 4"):
        rematfn.checkpoint_sequential([torch.sin] * 4, segments, torch.ones(3))
