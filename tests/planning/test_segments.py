# SPDX-License-Identifier: Apache-2.0
"""Plans that cut a recorded program: into segments, or where its graph hangs by one value."""

from collections.abc import Callable
from math import isqrt
from typing import Any

import pytest
import torch
from programs_traced import X as SQUARE
from programs_traced import rebuilt, step, weights
from torch import Tensor

import rematfn
from rematfn import _C, Trace
from rematfn.policies import ON, Memory, Policy, Sqrt


def chain(n: int) -> Trace:
    """Return `n` unit operators and their backward, which reads every value in reverse."""
    core = _C.Trace()

    def call(*reads: int, backward: bool = False) -> int:
        made: int = core.add_value(1, True)
        read = [(v, False) for v in reads]
        core.add_call("f", 1.0, 0.0, 1, 0, True, False, backward, read, [(made, -1)])
        return made

    values = [core.add_value(1, False)]
    for _ in range(n):
        values.append(call(values[-1]))
    gradient = call(values.pop())
    for value in reversed(values):
        last, gradient = gradient, call(gradient, value, backward=True)
        core.add_release(last)
        if value != 0:
            core.add_release(value)
    return Trace(core)


@pytest.mark.parametrize("policy", [Sqrt(), Memory()], ids=repr)
@pytest.mark.parametrize("n", [36, 100, 400])
def test_twice_the_root_of_a_chain_is_enough_to_run_each_operator_twice(
    n: int, policy: Policy
) -> None:
    budget = 2 * isqrt(n) + 3  # and the value at hand, with two gradients
    stats = rematfn.simulate(chain(n), budget, policy)
    assert stats.replays <= n
    assert stats.peak_bytes <= budget


# --- cut points -----------------------------------------------------------------------------------


def masked(ws: list[Tensor], x: Tensor) -> Any:
    """A mask made of no argument goes around every block."""
    mask = torch.ones(x.shape).tril()
    for w in ws:
        x = x + (x @ w * mask).tanh().sin().exp()
    return torch.autograd.grad(x.square().sum(), ws)


def forward_values(trace: Trace, name: str = "") -> set[int]:
    """Return what operators of that name make outside of the backward."""
    calls = [data for kind, data in trace._core.events() if kind == "call"]
    return {value for data in calls if name in data[0] and not data[7] for value, _ in data[-1]}


def kept(trace: Trace, budget: float, policy: Sqrt | Memory) -> set[int]:
    """Return which values of the forward the policy keeps, the loss left out."""
    program = _C.Program(trace._core)
    policy.begin(program, int(budget * trace.peak_bytes))
    program.finish()
    whole = {v for v, (nbytes, _) in enumerate(trace._core.values()) if nbytes > 4}
    found = {v for v, is_kept in enumerate(_C.testing.kept(program)) if is_kept}
    return found & whole & forward_values(trace)


@pytest.mark.parametrize("f", [step, masked])
def test_streams_between_residual_blocks_are_the_cut_points(f: Callable[..., Any]) -> None:
    trace = rebuilt(rematfn.record(f, weights(), SQUARE), marks=False)
    budget = 0.75  # the gradients alone are 0.57 of the peak
    found = kept(trace, budget, Memory())
    assert found
    assert found <= forward_values(trace, "aten::add")
    ours, online = (rematfn.simulate(trace, budget, policy) for policy in (Memory(), ON()))
    assert ours.replayed_cost < online.replayed_cost


@pytest.mark.parametrize("segments", [2, 4, 7])
def test_a_boundary_lies_where_little_crosses(segments: int) -> None:
    """Between two blocks one value crosses, within a block two do."""
    trace = rematfn.record(step, weights(14), SQUARE)
    found = kept(trace, 0.7, Sqrt(segments=segments))
    assert len(found) == segments - 1
    assert found <= forward_values(trace, "aten::add")
