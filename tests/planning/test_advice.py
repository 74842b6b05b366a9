# SPDX-License-Identifier: Apache-2.0
"""The figure of a BudgetError is tried out: Note [The figure is tried out]."""

import contextlib
import itertools
import random
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from helpers import EXHAUSTIVE, asked_for, assert_bitwise_equal, described, refusal_of, some
from steps import NEW, VIEWS, WRITES, obey
from torch import Tensor, nn

import rematfn
from rematfn.policies import ON, Policy

Function = Callable[[Tensor], Tensor]


def spread(x: Tensor) -> Tensor:
    """One unit of bytes, then eight: the forward needs sixteen at once, its backward 24."""
    return x.tanh().repeat(8).exp().sum()


def with_autograd(f: Function, x: Tensor) -> Tensor:
    x = x.requires_grad_()
    return torch.autograd.grad(f(x), x)[0]


def with_grad(f: Function, x: Tensor) -> Tensor:
    with torch.no_grad():  # of which torch.func.grad takes no notice
        return torch.func.grad(f)(x)


def with_vjp(f: Function, x: Tensor) -> Tensor:
    value, pull = torch.func.vjp(f, x)
    return pull(torch.ones_like(value))[0]


def with_vmap(f: Function, x: Tensor) -> Tensor:
    return torch.func.vmap(torch.func.grad(f))(x.view(4, -1))


@pytest.mark.parametrize("policy", [ON(), rematfn.policies.Guided(search=0)], ids=["on", "guided"])
@pytest.mark.parametrize("gradient", [with_autograd, with_grad, with_vjp, with_vmap])
def test_in_a_forward_the_figure_allows_for_its_backward(
    gradient: Callable[[Function, Tensor], Tensor],
    policy: Policy,
) -> None:
    """See Note [What a forward holds, a backward reads]."""
    x = torch.linspace(-1, 1, 4096)
    error = refusal_of(lambda: gradient(rematfn.remat(spread, 10 * x.nbytes, policy=policy), x))
    assert error is not None
    assert "up to here, and a backward from here" in str(error)
    assert 24 * x.nbytes <= asked_for(error) < 26 * x.nbytes
    enough = rematfn.remat(spread, asked_for(error), policy=policy)
    assert_bitwise_equal(gradient(enough, x), gradient(spread, x))


PROFILE = "rematfn.profile(step, ...).min_budget tells what a whole step needs."


@pytest.mark.parametrize("where", ["alone", "inside", "shared"])
def test_where_a_figure_is_not_for_the_whole_step_a_profile_has_it(where: str) -> None:
    torch.manual_seed(0)
    network = nn.GRU(32, 64, 2, batch_first=True)
    x = torch.randn(16, 16, 32)

    def step(budget: int | None) -> list[Tensor]:
        capped = rematfn.Budget(budget) if where == "shared" and budget else budget
        bounded = rematfn.remat(network, capped)
        loss = bounded(x)[0].square().mean()
        return list(torch.autograd.grad(loss, list(network.parameters())))

    def run(budget: int | None) -> list[Tensor]:
        return rematfn.remat(step)(budget) if where == "inside" else step(budget)

    found = rematfn.profile(step, None, budgets=["60%"])
    error = refusal_of(lambda: run(found.min_budget // 2))
    assert error is not None
    assert PROFILE in str(error)
    assert_bitwise_equal(run(found.min_budget), step(None))


POLICIES: list[Policy] = [
    rematfn.policies.Guided(search=0),
    rematfn.policies.Guided(search=20_000),
    ON(),
    rematfn.policies.Sqrt(),
    rematfn.policies.Memory(),
    rematfn.policies.Speed(),
    rematfn.testing.EvictEverything(),
]
KINDS = ["drop", "swap", *NEW, *NEW, *NEW, *VIEWS, *VIEWS, *WRITES]


class RandomProgram:
    """A loss, its gradients inside or outside, and what calls of it return."""

    def __init__(self, seed: int) -> None:
        draw = random.Random(seed)
        length = draw.randrange(8, 30)
        steps = [(draw.choice(KINDS), draw.randrange(8), draw.randrange(8)) for _ in range(length)]
        self.inside = seed % 2 == 0
        self.turned = False

        def f(x: Tensor, y: Tensor) -> Any:
            pool = [x.exp(), y.cos()]
            for step in steps:
                obey(pool, step)
            loss = sum((t * t).sum() for t in pool)
            return self.gradients(loss, x, y) if self.inside else loss

        self.f = f

    def gradients(self, loss: Any, x: Tensor, y: Tensor) -> Any:
        self.turned = True  # the forward is over
        return torch.autograd.grad(loss, [x, y], allow_unused=True)

    def run(self, transformed: Callable[..., Any], *, whole: bool = False) -> Any:
        torch.manual_seed(5)
        self.turned = False
        x = torch.linspace(-1, 1, 40).view(8, 5).requires_grad_()
        y = torch.linspace(0, 1, 24).requires_grad_()
        out = transformed(x, y)
        return out if whole or self.inside else self.gradients(out, x, y)

    def step(self, x: Tensor, y: Tensor) -> Any:
        out = self.f(x, y)
        return out if self.inside else self.gradients(out, x, y)


def runnable(seed: int) -> Iterator[tuple[RandomProgram, Any]]:
    """Yield programs, and what they return; some write to what autograd has saved."""
    for program in map(RandomProgram, itertools.count(100 * seed)):
        with contextlib.suppress(RuntimeError):
            yield program, program.run(program.f)


@pytest.mark.parametrize("policy", POLICIES, ids=described)
@pytest.mark.parametrize("part", some(range(4), 4))
def test_of_random_programs_a_figure_for_the_whole_call_is_enough_at_once(
    part: int, policy: Policy
) -> None:
    """In a new function, in its first call and in its second; in `simulate`, too."""
    followed = 0
    for program, expected in itertools.islice(runnable(100 * POLICIES.index(policy) + part), 6):
        measured = rematfn.remat(program.f, 1e-6, policy=policy)
        program.run(measured)
        error = refusal_of(lambda: program.run(measured))  # noqa: B023
        assert error is not None
        assert "in which the whole call fits" in str(error)
        figure = asked_for(error)
        fraction = re.search(r"Raise the budget to ([\d.]+) of", str(error))
        assert fraction, str(error)
        assert rematfn.stats(measured).min_budget <= figure
        for budget in (figure, float(fraction[1])):
            enough = rematfn.remat(program.f, budget, policy=policy)
            for _ in range(2):
                assert_bitwise_equal(program.run(enough), expected)
            assert rematfn.stats(enough).peak_bytes <= figure
        trace = program.run(lambda x, y: rematfn.record(program.step, x, y), whole=True)  # noqa: B023
        for budget in (2, trace.peak_bytes // 3):
            error = refusal_of(lambda: rematfn.simulate(trace, budget, policy))  # noqa: B023
            if error is not None:
                enough = rematfn.simulate(trace, asked_for(error), policy)
                assert enough.min_budget <= asked_for(error)
                followed += 1
    assert followed >= 6


def test_of_another_branch_than_the_recorded_one_no_figure_is_promised() -> None:
    def f(x: Tensor, branch: int) -> Tensor:
        y = x.sin()  # a unit
        if branch:
            y = torch.cat([y, y, y, y])
        return y.exp().sum()

    x = torch.linspace(0, 1, 256).requires_grad_()
    g = rematfn.remat(f, 3 * x.nbytes + 64)
    g(x, 0).backward()
    error = refusal_of(lambda: g(x, 1))
    assert "Raise the budget to at least" in str(error)


@pytest.mark.parametrize("policy", [ON(), rematfn.policies.Guided(search=0)], ids=["on", "guided"])
def test_in_a_first_calls_backward_the_figure_allows_for_the_rest(
    policy: Policy,
) -> None:
    """Which is mirrored, and so a guess: of some hundred programs it may be too little for one."""
    followed, count = 0, 40 if EXHAUSTIVE else 16
    for program, expected in itertools.islice(runnable(7), count):
        free = rematfn.remat(program.f)
        program.run(free)
        budget = float(rematfn.stats(free).peak_bytes)
        error = None
        while error is None:
            budget *= 0.9
            bounded = rematfn.remat(program.f, int(budget), policy=policy)
            error = refusal_of(lambda: program.run(bounded))  # noqa: B023
        if not program.turned:
            continue
        assert "about" in str(error)
        rest = "" if "what it returns" in str(error) else ", and the rest of the backward"
        assert f"in which all fits up to here{rest}. {PROFILE}" in str(error)
        enough = rematfn.remat(program.f, asked_for(error), policy=policy)
        assert_bitwise_equal(program.run(enough), expected)
        followed += 1
    assert followed >= 3 * count // 4


def quantiser() -> Callable[[], list[Tensor]]:
    """Return a step of a residual vector quantiser, whose codebooks follow what they encode."""
    torch.manual_seed(0)
    books = [torch.randn(64, 32) for _ in range(6)]
    weight = torch.randn(32, 32, requires_grad=True)
    x = torch.randn(128, 32)

    def step() -> list[Tensor]:
        rest = encoded = x @ weight
        chosen: list[Tensor] = []
        for book in books:
            nearest = torch.cdist(rest.detach(), book).argmin(-1)
            found = rest + (book[nearest] - rest).detach()
            ones = nn.functional.one_hot(nearest, 64).float()
            book.data.lerp_(ones.T @ rest.detach(), 0.1)
            chosen.append(found)
            rest = torch.tanh(rest - found.detach() * 0.5)
        loss = (torch.stack(chosen).sum(0) - x).square().mean() + (rest - encoded).square().mean()
        return list(torch.autograd.grad(loss, [weight]))

    return step


def test_the_figure_allows_for_copies_of_what_is_overwritten() -> None:
    """Of buffers of the caller's, which a call has read and then overwrites beside autograd."""
    trace = rematfn.record(quantiser())
    real = rematfn.remat(quantiser(), "1GiB", policy=ON())
    real()
    assert trace.peak_bytes == rematfn.stats(real).peak_bytes
    figures = set()
    for budget in range(trace.peak_bytes // 4, trace.peak_bytes, trace.peak_bytes // 16):
        try:
            figures.add(rematfn.simulate(trace, budget, ON()).budget)
        except rematfn.BudgetError as error:
            figures.add(asked_for(error))
    for figure in figures:
        enough = rematfn.remat(quantiser(), figure, policy=ON())
        assert_bitwise_equal(enough(), quantiser()())
        assert rematfn.stats(enough).peak_bytes <= figure


def recurrent(x: Tensor) -> Tensor:
    """A loop whose gradients are added up: near its floor each is replayed by most others."""
    decay, h, outputs = torch.exp(-x), torch.zeros(32), []
    for now, stays in zip(x.unbind(), decay.unbind(), strict=True):
        h = stays * h + now
        outputs.append(h * now)
    return torch.stack(outputs).square().sum()


def test_a_budget_in_which_nothing_fits_is_not_searched_for_long() -> None:
    """Operators simulated are counted: a call that will be refused waits for them."""
    trace = rematfn.record(torch.func.grad(recurrent), torch.rand(128, 32))
    program = rematfn._C.Program(trace._core)
    program.search(int(0.4 * trace.peak_bytes), 1 << 40, 1 << 40, online=ON().core())
    program.follow()
    assert program.overhead() == float("inf")
    assert not program.is_settled()  # it goes on, and nobody waits for it


@pytest.mark.parametrize("budget", [16_600, 17_000, 17_400, 17_979])
def test_gradients_that_a_forward_reads(budget: int) -> None:
    """An unrolled step: the backward that is foreseen reads what an earlier backward has made."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(32, 32),
        nn.Tanh(),
        nn.BatchNorm1d(32, track_running_stats=False),
        nn.Linear(32, 8),
    )
    x, y = torch.randn(32, 32), torch.randn(32, 8)

    def unrolled() -> Any:
        p = dict(net.named_parameters())
        for _ in range(2):
            loss = nn.functional.mse_loss(torch.func.functional_call(net, p, (x,)), y)
            gradients = torch.autograd.grad(loss, list(p.values()), create_graph=True)
            p = {name: w - 0.1 * g for (name, w), g in zip(p.items(), gradients, strict=True)}
        return p

    with pytest.raises(rematfn.BudgetError, match="needs"):
        rematfn.remat(unrolled, budget)()
