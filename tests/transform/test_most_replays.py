# SPDX-License-Identifier: Apache-2.0
"""A call that replays far more than it computes says so, with a budget in which it does not."""

from __future__ import annotations

import re
import types
import warnings
from typing import Any

import pytest
import torch
from helpers import assert_bitwise_equal
from torch import Tensor, nn

import rematfn
from rematfn import _C
from rematfn._transform.thrash import Thrash
from rematfn.policies import ON, Guided

X = torch.linspace(-1, 1, 4096)
TIGHT = 90_000  # of 1.2 MB
PLANNED = Guided(search=0)


def chain(x: Tensor) -> Tensor:
    for _ in range(12):
        x = (x.sin() * x).exp().tanh()
    return x.square().sum()


GRADIENT = torch.func.grad(chain)


def replayed(budget: Any, policy: rematfn.policies.Policy, calls: int = 1) -> float:
    """Return what the last of so many calls replays, unasked."""
    g = rematfn.remat(GRADIENT, budget, policy=policy, most_replays=float("inf"))
    for _ in range(calls):
        g(X)
    cost = rematfn.stats(g).replayed_cost
    assert cost is not None
    return cost


def bytes_in(message: str) -> int:
    found = re.search(r"Raise the budget to about (?:[\d.]+ of the peak, )?([\d.]+) (\w+)", message)
    assert found, message
    budget = rematfn._transform.budget.parse_budget("".join(found.groups())).bytes
    assert budget is not None
    return budget


@pytest.mark.parametrize("policy", [ON(), PLANNED], ids=repr)
def test_a_first_call_that_passes_the_limit_is_refused_and_the_figure_is_enough(
    policy: rematfn.policies.Policy,
) -> None:
    most = replayed(TIGHT, policy) / 2
    assert most > 0
    g = rematfn.remat(GRADIENT, TIGHT, policy=policy, most_replays=most)
    with pytest.raises(rematfn.BudgetError, match=r"remat\(chain, budget=.*most_replays") as error:
        g(X)
    assert _C.stack_depth() == 0
    enough = bytes_in(str(error.value))
    peak = rematfn.record(GRADIENT, X).peak_bytes
    assert TIGHT < enough <= peak
    again = rematfn.remat(GRADIENT, enough, policy=policy, most_replays=most)
    for _ in range(3):
        assert_bitwise_equal(again(X), GRADIENT(X))
        assert rematfn.stats(again).replayed_cost <= most


# --- without a limit, a warning -------------------------------------------------------------------


def selective_scan() -> tuple[Any, tuple[Any, ...]]:
    """Return a Mamba's scan as its reference writes it, a loop over time, and arguments."""
    draw = torch.Generator().manual_seed(0)
    steps, channels, state = 24, 16, 8
    u = torch.randn(2, channels, steps, generator=draw)
    delta = torch.rand(2, channels, steps, generator=draw)
    a = -torch.rand(channels, state, generator=draw)
    b, c = torch.randn(2, 2, state, steps, generator=draw).unbind()

    def loss(u: Tensor, delta: Tensor, a: Tensor) -> Tensor:
        decay = torch.exp(torch.einsum("bdl,dn->bdln", delta, a))
        inputs = torch.einsum("bdl,bnl,bdl->bdln", delta, b, u)
        h = u.new_zeros(2, channels, state)
        outputs = []
        for t in range(steps):
            h = decay[:, :, t] * h + inputs[:, :, t]
            outputs.append(torch.einsum("bdn,bn->bd", h, c[:, :, t]))
        return (torch.stack(outputs, 2) * u).square().sum()

    return torch.func.grad(loss, argnums=(0, 1, 2)), (u, delta, a)


def parameters_of(net: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in net.named_parameters()}


def third_derivatives() -> tuple[Any, tuple[Any, ...]]:
    """Return the gradient of a PINN's loss, for the equation of Korteweg and de Vries."""
    torch.manual_seed(0)
    hidden = [m for _ in range(3) for m in (nn.Linear(24, 24), nn.Tanh())]
    net = nn.Sequential(nn.Linear(2, 24), nn.Tanh(), *hidden, nn.Linear(24, 1))

    def loss(params: dict[str, Tensor], points: Tensor) -> Tensor:
        def u(p: Tensor) -> Tensor:
            return torch.func.functional_call(net, params, (p,)).squeeze()

        def along_x(f: Any) -> Any:
            return lambda p: torch.func.grad(f)(p)[0]

        def residual(p: Tensor) -> Tensor:
            u_xxx = along_x(along_x(along_x(u)))
            return torch.func.grad(u)(p)[1] + 6 * u(p) * along_x(u)(p) + u_xxx(p)

        return torch.func.vmap(residual)(points).square().mean()

    return torch.func.grad(loss), (parameters_of(net), torch.rand(64, 2))


class Residual(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.inside = nn.Sequential(
            *(nn.GroupNorm(2, inputs), nn.SiLU(), nn.Conv2d(inputs, outputs, 3, padding=1)),
            *(nn.GroupNorm(2, outputs), nn.SiLU(), nn.Conv2d(outputs, outputs, 3, padding=1)),
        )
        self.beside = nn.Conv2d(inputs, outputs, 1)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.inside(x) + self.beside(x)
        return found


def u_net() -> tuple[Any, tuple[Any, ...]]:
    """Return the gradient of a U-Net of two sizes, residual blocks and skips."""
    torch.manual_seed(0)
    blocks = nn.ModuleList(Residual(4 if k < 8 else 8, 4) for k in range(16))
    params = parameters_of(blocks)

    def loss(params: dict[str, Tensor], x: Tensor) -> Tensor:
        skips = []
        for k in range(8):
            x = nn.functional.avg_pool2d(x, 2) if k == 4 else x
            x = torch.func.functional_call(blocks[k], of(k, params), (x,))
            skips.append(x)
        for k in range(8, 16):
            x = nn.functional.interpolate(x, scale_factor=2.0) if k == 12 else x
            x = torch.cat([x, skips.pop()], 1)
            x = torch.func.functional_call(blocks[k], of(k, params), (x,))
        return x.square().mean()

    def of(k: int, params: dict[str, Tensor]) -> dict[str, Tensor]:
        return {n.split(".", 1)[1]: p for n, p in params.items() if n.split(".")[0] == str(k)}

    return torch.func.grad(loss), (params, torch.randn(1, 4, 8, 8))


CASES = {"scan": (selective_scan, 0.4), "PINN": (third_derivatives, 0.07), "U-Net": (u_net, 0.12)}


@pytest.mark.parametrize("case", CASES)
def test_a_budget_a_little_too_small_is_warned_of_with_one_that_is_not(case: str) -> None:
    make, fraction = CASES[case]
    f, args = make()
    expected = f(*args)
    peak = rematfn.record(f, *args).peak_bytes
    tight = rematfn.remat(f, int(fraction * peak))
    with pytest.warns(rematfn.ThrashingWarning, match="allows 4 times by default") as caught:
        assert_bitwise_equal(tight(*args), expected)
    assert len(caught) == 1
    assert rematfn.stats(tight).replayed_cost > 4
    enough = bytes_in(str(caught[0].message))
    assert fraction * peak < enough < peak
    ample = rematfn.remat(f, enough)
    with warnings.catch_warnings():
        warnings.simplefilter("error", rematfn.ThrashingWarning)
        for _ in range(3):
            assert_bitwise_equal(ample(*args), expected)
            assert_bitwise_equal(tight(*args), expected)  # it has been said


@pytest.mark.filterwarnings("error::rematfn.ThrashingWarning")
def test_who_sets_a_limit_or_evicts_everything_is_not_warned() -> None:
    for options in ({"most_replays": float("inf")}, {"policy": rematfn.testing.EvictEverything()}):
        g = rematfn.remat(GRADIENT, TIGHT, **options)
        assert_bitwise_equal(g(X), GRADIENT(X))
        assert rematfn.stats(g).replayed_cost > 4


def test_a_guided_call_is_warned_of_before_it_runs() -> None:
    f, args = selective_scan()
    fraction = 0.4
    g = rematfn.remat(f, fraction, policy=PLANNED)
    g(*args)  # has no cap yet
    with pytest.warns(rematfn.ThrashingWarning, match="the call, by its plan") as caught:
        assert_bitwise_equal(g(*args), f(*args))
    found = re.search(r"about ([\d.]+) of the peak", str(caught[0].message))
    assert found
    assert fraction < float(found[1]) <= 1


# --- with one, an error ---------------------------------------------------------------------------


def test_a_first_call_that_thrashes_is_stopped_while_it_runs() -> None:
    f, args = selective_scan()
    peak = rematfn.record(f, *args).peak_bytes
    patient = rematfn.remat(f, int(0.4 * peak), most_replays=float("inf"))
    patient(*args)
    full = rematfn.stats(patient)
    assert full.replayed_cost > 20
    g = rematfn.remat(f, int(0.4 * peak), most_replays=4)
    with pytest.raises(rematfn.BudgetError, match="by now the call has replayed") as error:
        g(*args)
    assert _C.stack_depth() == 0
    assert rematfn.stats(g).replays < full.replays / 2
    again = rematfn.remat(f, bytes_in(str(error.value)), most_replays=4)
    assert_bitwise_equal(again(*args), f(*args))


def test_a_guided_call_is_judged_before_it_runs() -> None:
    by_plan = replayed(TIGHT, PLANNED, calls=2)
    ran = []

    def f(x: Tensor) -> Tensor:
        ran.append(x)
        return chain(x)

    fraction = TIGHT / rematfn.record(GRADIENT, X).peak_bytes
    g = rematfn.remat(torch.func.grad(f), fraction, policy=PLANNED, most_replays=0.9 * by_plan)
    g(X)  # has no cap yet
    for _ in range(2):
        with pytest.raises(rematfn.BudgetError, match="by its plan"):
            g(X)
    assert len(ran) == 1
    assert _C.stack_depth() == 0


def test_a_limit_above_is_no_limit() -> None:
    most = 1.01 * replayed(TIGHT, PLANNED)
    g = rematfn.remat(GRADIENT, TIGHT, policy=PLANNED, most_replays=most)
    for _ in range(3):
        assert_bitwise_equal(g(X), GRADIENT(X))


def test_a_backward_that_comes_after_the_call_is_judged_at_the_next_call() -> None:
    x = X.clone().requires_grad_()
    g = rematfn.remat(chain, TIGHT, policy=ON(), most_replays=float("inf"))
    g(x).backward()
    x.grad = None
    g = rematfn.remat(chain, TIGHT, policy=ON(), most_replays=0.99 * rematfn.stats(g).replayed_cost)
    g(x).backward()
    expected, x.grad = x.grad, None
    chain(x).backward()
    assert_bitwise_equal(x.grad, expected)
    with pytest.warns(rematfn.ThrashingWarning, match="the last call replays") as caught:
        g(x)
    assert bytes_in(str(caught[0].message)) > TIGHT


def test_a_fraction_is_answered_by_a_fraction() -> None:
    g = rematfn.remat(GRADIENT, 0.3, policy=PLANNED, most_replays=0.01)
    g(X)  # has no cap yet
    with pytest.raises(rematfn.BudgetError, match=r"about (0\.\d+|1) of the peak") as error:
        g(X)
    found = re.search(r"about ([\d.]+) of the peak", str(error.value))
    assert found
    fraction = float(found[1])
    assert 0.3 < fraction <= 1
    h = rematfn.remat(GRADIENT, fraction, policy=PLANNED, most_replays=0.01)
    for _ in range(3):
        assert_bitwise_equal(h(X), GRADIENT(X))


@pytest.mark.parametrize("wrong", [True, "4", [4]])
def test_a_limit_of_the_wrong_type_is_refused(wrong: Any) -> None:
    with pytest.raises(TypeError, match=r"most_replays=.*a number is needed"):
        rematfn.remat(chain, TIGHT, most_replays=wrong)


@pytest.mark.parametrize("wrong", [0, -1.0, float("nan")])
def test_a_limit_that_means_nothing_is_refused(wrong: Any) -> None:
    with pytest.raises(ValueError, match="above 0"):
        rematfn.remat(chain, TIGHT, most_replays=wrong)


def test_a_budget_in_which_the_record_does_not_thrash_is_not_to_be_raised() -> None:
    """Where values move, times decide what goes: a call may thrash, and its record not."""
    program: Any = types.SimpleNamespace(enough_for=lambda policy, least, most, link: least)
    history: Any = types.SimpleNamespace(has_warned=False)
    thrash = Thrash("remat(f)", 4.2, TIGHT, 4.0, True, None, ON(), None, history)
    likely = "later calls are likely to replay less"
    with pytest.warns(rematfn.ThrashingWarning, match=likely) as told:
        thrash.report("the last call", program, done=True)
    assert "Raise the budget" not in str(told[0].message)
