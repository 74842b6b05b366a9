# SPDX-License-Identifier: Apache-2.0
"""Training steps with their optimiser inside take the memory that they take without us.

What an optimiser overwrites was read by all of forward and backward; it is not copied for what
nobody has any more. Bytes are counted at the allocator.
"""

import functools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import EVERYTHING, assert_bitwise_equal, refusal_of, same_as_untransformed, some
from test_optimisers import OPTIMISERS, Build, held
from torch import Tensor, nn

import rematfn
from rematfn.testing import MemoryTimeline

CALLS = 2  # an optimiser makes its state in the first
Step = Callable[[], Any]
MakeStep = Callable[[], tuple[Step, list[Any]]]  # the step, and what has its state


def deep() -> nn.Module:
    """Return a network whose gradients are most of what a step holds."""
    layers = [layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.Tanh())]
    return nn.Sequential(*layers)


def plain(build: Build) -> tuple[Step, list[Any]]:
    torch.manual_seed(3)
    net, x = deep(), torch.randn(16, 64)
    optimiser = build(list(net.parameters()))

    def step() -> None:
        optimiser.zero_grad()
        net(x).square().mean().backward()
        optimiser.step()

    return step, [net, optimiser]


def peaks_of(step: Step) -> list[int]:
    found = []
    for _ in range(CALLS):
        with MemoryTimeline() as timeline:
            kept = step()
        found.append(timeline.peak)
        del kept
    return found


def assert_takes_no_more(make: MakeStep) -> None:
    step, state = make()
    expected = peaks_of(step)
    for budget in (None, max(expected)):
        once, other = make()
        peaks = peaks_of(rematfn.remat(once, budget))
        assert all(a <= 1.05 * b for a, b in zip(peaks, expected, strict=True))
        assert budget is None or max(peaks) <= budget
        assert_bitwise_equal(held(*other), held(*state))
    rematfn.testing.check()


@pytest.mark.parametrize("name", some([name for name in OPTIMISERS if "maximise" not in name], 3))
def test_a_step_with_its_optimiser_inside(name: str) -> None:
    assert_takes_no_more(functools.partial(plain, OPTIMISERS[name]))


@pytest.mark.parametrize("share", [0.66, 0.74, 0.78, 0.82, 0.86])
def test_a_first_call_that_makes_the_state_fits(share: float) -> None:
    """What it stores away does not take the room of the gradients that it is about to hand out.

    The rest of it is handed out when these have left, so that the allocator's peak may be higher.
    """

    def make() -> tuple[Step, list[Any]]:
        torch.manual_seed(3)
        blocks = [(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.GELU()) for _ in range(4)]
        net, x = nn.Sequential(*(layer for block in blocks for layer in block)), torch.randn(64, 64)
        optimiser = torch.optim.AdamW(net.parameters())

        def step() -> Tensor:
            optimiser.zero_grad()
            loss = net(x).square().mean()
            loss.backward()
            optimiser.step()
            return loss.detach().clone()

        return step, [net, optimiser]

    step, state = make()
    budget = int(share * max(peaks_of(step)))
    once, other = make()
    g = rematfn.remat(once, budget)
    for counted in ("peak_excluding_survivors", "peak"):
        with MemoryTimeline() as timeline:
            loss = g()
        assert getattr(timeline, counted) <= budget
        assert rematfn.stats(g).peak_bytes <= budget
        del loss
    assert_bitwise_equal(held(*other), held(*state))


@pytest.mark.parametrize("budget", [None, 2**30], ids=str)
def test_a_batch_norm_copies_no_statistics(budget: int | None) -> None:
    norm, x = nn.BatchNorm1d(20_000), torch.randn(2, 20_000)
    assert peaks_of(rematfn.remat(lambda: norm(x), budget)) == peaks_of(lambda: norm(x))


def microbatches(build: Build, to_none: bool) -> tuple[Step, list[Any]]:
    torch.manual_seed(3)
    net, xs = deep(), torch.randn(5, 16, 64)
    optimiser = build(list(net.parameters()))

    def step() -> Tensor:
        optimiser.zero_grad(set_to_none=to_none)
        total = torch.zeros(())
        for x in xs:
            loss = net(x).square().mean()
            loss.backward()
            total = total + loss.detach()
        optimiser.step()
        return total

    return step, [net, optimiser]


STEPS: dict[str, Callable[[Build], tuple[Step, list[Any]]]] = {
    "microbatches": lambda build: microbatches(build, to_none=True),
    "microbatches, zeroed": lambda build: microbatches(build, to_none=False),
}


@pytest.mark.parametrize("make", STEPS.values(), ids=STEPS.keys())
@pytest.mark.parametrize("name", ["SGD, momentum, foreach", "AdamW, fused", "Adam"])
def test_a_step_of_another_kind(name: str, make: Callable[[Build], Any]) -> None:
    assert_takes_no_more(functools.partial(make, OPTIMISERS[name]))


# --- what an old value is needed for --------------------------------------------------------------


@pytest.mark.parametrize("retain", [False, True], ids=["freed", "retained"])
@pytest.mark.parametrize(
    "transform",
    [
        rematfn.remat,
        EVERYTHING,
        functools.partial(rematfn.remat, budget="160KiB"),
    ],
    ids=["plain", "everything", "tight"],
)
@same_as_untransformed
def test_what_is_held_of_an_old_value_stays_as_it_was(transform: Any, retain: bool) -> Any:
    """Logits, a view, a figure and a graph, all made from parameters that are overwritten."""

    torch.manual_seed(3)
    net, x = deep(), torch.randn(16, 64, requires_grad=True)
    optimiser = OPTIMISERS["SGD"](list(net.parameters()))
    frozen = nn.Linear(64, 64)

    def step() -> Any:
        optimiser.zero_grad()
        logits = net(x)
        hidden = frozen(logits).tanh()
        loss = hidden.square().mean()
        figure = net[0].weight.detach().t()[1:3] * 2
        loss.backward(retain_graph=retain)
        optimiser.step()
        again = net(x).sum()
        with torch.no_grad():
            frozen.bias.mul_(2)
        extra = torch.autograd.grad(again, x)[0]
        return logits.detach() * 2, hidden.detach()[2:], figure + 1, loss.detach(), extra

    step = transform(step)
    return [[t.clone() for t in step()] for _ in range(CALLS)], held(net, optimiser)


def test_a_constant_goes_when_the_program_drops_it() -> None:
    """It is kept for nothing: what was made from it is here."""
    w, x = torch.randn(1 << 16), torch.randn(1 << 16)

    def f() -> Tensor:
        gradient = x * w
        figure = gradient.norm()
        w.add_(1)  # the product is a constant from now on
        del gradient
        return figure + (x * 2).norm() + (x.sin() * 2).norm()

    def peak(f: Callable[[], Tensor]) -> int:
        with MemoryTimeline() as timeline:
            f()
        return timeline.peak

    assert peak(rematfn.remat(f)) == peak(f)


# --- refusals -------------------------------------------------------------------------------------


def test_a_refusal_after_writes_says_so() -> None:
    step = rematfn.remat(plain(OPTIMISERS["SGD"])[0], "6KiB")
    with pytest.raises(rematfn.BudgetError) as caught:
        step()
    assert "of the caller's" not in str(caught.value), "nothing had been written"
    del caught
    net, x = nn.Linear(64, 64), torch.randn(64, 64)

    def writes_and_needs() -> Tensor:
        with torch.no_grad():
            net.bias.add_(1)
            net.weight.add_(1)
        a = x + 1
        return a @ a @ (a @ a)

    with pytest.raises(rematfn.BudgetError, match=r"had written to 2 tensors of the caller's"):
        rematfn.remat(writes_and_needs, "34KiB")()


def test_a_call_is_known_by_those_with_other_numbers() -> None:
    """A step takes its number: what the first two needed, each of them needs."""
    torch.manual_seed(3)
    step, (net, _) = microbatches(OPTIMISERS["SGD"], to_none=True)
    numbered = rematfn.remat(lambda number: step(), 0.5)
    numbered(0)  # is measured
    numbered(1)
    for number in (2, 3):
        before = [p.detach().clone() for p in net.parameters()]
        with pytest.raises(rematfn.BudgetError, match=r"refused before it begins"):
            numbered(number)
        assert all(torch.equal(a, p) for a, p in zip(before, net.parameters(), strict=True))


# --- what does not fit is refused before it writes ------------------------------------------------


@pytest.mark.parametrize("name", ["SGD", "SGD, momentum", "Adam", "AdamW, foreach", "AdamW, fused"])
def test_a_step_that_does_not_fit_changes_nothing(name: str) -> None:
    """The first call makes the state, the second is recorded, and the third refused by that."""
    step, (net, _) = plain(OPTIMISERS[name])
    bounded = rematfn.remat(step, 0.02)
    for _ in range(1 if name == "SGD" else 2):  # which has no state
        bounded()
    for _ in range(2):
        before = [p.detach().clone() for p in net.parameters()]
        with pytest.raises(rematfn.BudgetError, match="nothing has been changed"):
            bounded()
        assert_bitwise_equal([p.detach() for p in net.parameters()], before)


@pytest.mark.parametrize("share", [0.64, 0.68, 0.72, 0.745])
def test_the_fraction_that_a_refusal_names_is_enough(share: float) -> None:
    """As it is written: what it comes to, once it is rounded, was tried out."""
    torch.manual_seed(0)
    x, target = torch.randn(40, 8), torch.randint(0, 3, (40,))

    def calls_of_a_step(budget: float) -> None:
        layers = nn.Linear(8, 24), nn.Tanh(), nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, 3)
        net = nn.Sequential(nn.Linear(8, 8, bias=False), *layers)
        optimiser = torch.optim.SGD(net.parameters(), 1e-2)

        def step() -> None:
            optimiser.zero_grad()
            nn.functional.cross_entropy(net(x), target).backward()
            optimiser.step()

        bounded = rematfn.remat(step, budget)
        for _ in range(3):
            bounded()

    with pytest.raises(rematfn.BudgetError, match="the whole call fits") as caught:
        calls_of_a_step(share)
    found = re.search(r"Raise the budget to ([\d.]+) of the unconstrained", str(caught.value))
    assert found
    calls_of_a_step(float(found[1]))


@pytest.mark.parametrize("share", [0.6, 0.5, 0.4])
@pytest.mark.parametrize("name", ["SGD", "SGD, momentum", "RMSprop"])
def test_a_record_tells_whether_later_steps_fit(name: str, share: float) -> None:
    """What is written must be known for what was read, or the record has no copies of it."""
    torch.manual_seed(3)
    layers = [layer for _ in range(6) for layer in (nn.Tanh(), nn.Linear(128, 128))]
    net, x = nn.Sequential(nn.Linear(32, 128), *layers), torch.randn(256, 32)
    optimiser = OPTIMISERS[name](list(net.parameters()))

    def step() -> None:
        net(x).square().mean().backward()
        optimiser.step()
        optimiser.zero_grad()

    bounded = rematfn.remat(step, share)
    for _ in range(1 if name == "SGD" else 2):
        bounded()
    for _ in range(3):
        before = [p.detach().clone() for p in net.parameters()]
        error = refusal_of(bounded)
        if error is not None:
            assert "nothing has been changed" in str(error)
            assert_bitwise_equal([p.detach() for p in net.parameters()], before)
