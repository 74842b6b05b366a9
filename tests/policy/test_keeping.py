# SPDX-License-Identifier: Apache-2.0
"""Policies that keep values for what they are: by the operator that made them, or by name."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import assert_bitwise_equal, described
from nesting import spell
from programs_traced import UNIT, X, block, loss, rebuilt, step, weights
from torch import Tensor

import rematfn
from rematfn import Trace, keep
from rematfn._transform.recorded import finish_searches
from rematfn.policies import ON, Custom, Guided, Manual, Memory, Policy, Speed, Sqrt
from rematfn.policies.reference import DTR, LRU, MSPS, Largest, Local

PRODUCTS = ("aten::mm", "aten::convolution", "aten::convolution_backward")


def images(x: Tensor) -> Any:
    filters = [torch.full((4, 4, 3, 3), 0.1 * k, requires_grad=True) for k in range(1, 7)]
    for w in filters:
        x = torch.nn.functional.conv2d(x, w, padding=1).tanh().sin()
    return torch.autograd.grad(x.square().sum(), filters)


PROGRAMS: dict[str, Callable[[], Trace]] = {
    "blocks": lambda: rematfn.record(step, weights(), X),
    "images": lambda: rematfn.record(images, torch.linspace(-1, 1, 8 * 256).view(2, 4, 16, 16)),
}


EPSILON = 2.0**-20


def tell_apart(trace: Trace, is_kept: Callable[[str, list[int]], bool]) -> Trace:
    """Return the trace with costs that are all but equal, and tell what was replayed."""
    return rebuilt(trace, lambda name, made: 1.0 if is_kept(name, made) else 1.0 + EPSILON)


def counts(trace: Trace, budget: float, policy: Policy) -> tuple[int, int]:
    """Return how many operators whose results are kept were replayed, and how many others."""
    stats = rematfn.simulate(trace, budget, policy)
    others = round((stats.replayed_cost * trace.cost - stats.replays) / EPSILON)
    return stats.replays - others, others


def assert_others_go(
    trace: Trace, budget: float, policy: Policy, is_kept: Callable[[str, list[int]], bool]
) -> None:
    """Assert that operators are replayed, and none whose result is kept."""
    those, others = counts(tell_apart(trace, is_kept), budget, policy)
    assert those == 0
    assert others > 0


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS.keys())
def test_speed_replays_no_product_while_anything_else_can_go(
    program: Callable[[], Trace],
) -> None:
    def is_product(name: str, _: object) -> bool:
        return name in PRODUCTS

    trace = rebuilt(program(), marks=False)
    assert_others_go(trace, 0.8, Speed(), is_product)
    assert counts(tell_apart(trace, is_product), 0.75, LRU())[0] > 0


def marked(trace: Trace, names: tuple[str, ...]) -> set[int]:
    return {data[0] for kind, data in trace._core.events() if kind == "mark" and data[1] in names}


@pytest.mark.parametrize(
    ("policy", "kept", "budget"),
    [
        (Manual(), ("up", "act", "down"), 24 * UNIT),
        (Manual(only=("act",)), ("act",), 0.7),
        (Manual(only=("up", "down")), ("up", "down"), 0.8),
        (Manual(but=("act",)), ("up", "down"), 0.8),
    ],
    ids=repr,
)
def test_only_what_is_not_kept_is_replayed(
    policy: Policy, kept: tuple[str, ...], budget: float
) -> None:
    recorded = rematfn.record(step, weights(), X)
    values = marked(recorded, kept)
    assert len(values) == 6 * len(kept)
    assert_others_go(recorded, budget, policy, lambda _, made: bool(values & set(made)))


RESIDENT = {
    Manual(): 18,
    Manual(only=("act",)): 6,
    Manual(only=("act", "down")): 12,
    Manual(but=("act", "up")): 6,
    Manual(only=("nobody",)): 0,
    Speed(): 18,
}


@pytest.mark.parametrize(("policy", "units"), RESIDENT.items(), ids=repr)
def test_without_a_budget_the_rest_goes_when_the_function_returns(
    policy: Policy, units: int
) -> None:
    """Autograd saves no product that goes into a tanh: a kept one outlives its use in `f`."""
    ws = weights()

    def f(x: Tensor) -> Tensor:
        for w, v in zip(ws[::2], ws[1::2], strict=True):
            x = block(x, w, v)
        return x.square().sum()

    g = rematfn.remat(f, policy=policy)
    out = g(X)
    assert rematfn.stats(g).resident_bytes == units * UNIT
    assert rematfn.stats(g).replays == 0
    expected = torch.autograd.grad(loss(ws, X), ws)
    found = torch.autograd.grad(out, ws)
    assert_bitwise_equal(found, expected)
    assert rematfn.stats(g).replays > 0
    assert rematfn.stats(g).resident_bytes == 0


# --- keep() ---------------------------------------------------------------------------------------


WORDS = ["grad", "vmap", "vmap-grad", "grad-vmap", "jvp", "jacfwd", "hessian"]


@pytest.mark.parametrize("inside", [True, False], ids=["inside", "outside"])
@pytest.mark.parametrize("word", WORDS)
def test_keep_finds_the_innermost_tensor_of_any_transform(word: str, inside: bool) -> None:
    """Under a policy that evicts all but one value, that one is there in the end."""
    x = torch.linspace(0.1, 1, 12).view(3, 4)

    def f(x: Tensor) -> Tensor:
        return keep(x.sin(), "s").exp().prod()

    letters = tuple(word.split("-"))
    g = spell(letters, f, {})
    expected = g(x)
    for policy in (Manual(), Manual(only=("s",)), Manual(drop=("s",))):
        remat = functools.partial(rematfn.remat, policy=policy)
        h = remat(g) if inside else spell(letters, remat(f), {})
        assert_bitwise_equal(h(x), expected)
    recorded = rematfn.record(g, x)
    marks = [data[1] for kind, data in recorded._core.events() if kind == "mark"]
    assert set(marks) == {"s"}


# --- under every policy ---------------------------------------------------------------------------

RESPECTING: list[Policy] = [
    ON(),
    Guided(search=20_000),
    Guided(first=LRU(), search=0),
    Sqrt(),
    Memory(),
    Speed(),
    Custom(lambda c: -c.age),
    Custom(lambda c: c.nbytes),
    DTR(),
    Local(),
    MSPS(),
    LRU(),
    Largest(),
]


@pytest.mark.parametrize("policy", RESPECTING, ids=described)
def test_a_marked_value_goes_only_when_nothing_else_can(policy: Policy) -> None:
    """Every fourth of a chain, in the simulator; the engine then does what that says."""

    def f(x: Tensor, mark: Callable[[Tensor], Tensor]) -> Any:
        for i in range(16):
            x = x.sin() * x
            if i % 4 == 1:
                mark(x)
        return torch.autograd.grad(x.sum(), leaf)

    leaf = X.clone().requires_grad_()

    recorded = rematfn.record(f, leaf, keep)
    values = marked(recorded, ("",))
    assert len(values) == 4
    assert_others_go(recorded, 0.75, policy, lambda _, made: bool(values & set(made)))
    expected = f(leaf, keep)
    g = rematfn.remat(f, 12 * UNIT, policy=policy)
    for _ in range(3):
        assert_bitwise_equal(g(leaf, keep), expected)
        assert rematfn.stats(g).peak_bytes <= 12 * UNIT
        finish_searches()
    g(leaf, keep)
    simulated = rematfn.simulate(recorded, 12 * UNIT, policy)
    assert rematfn.stats(g).replays == simulated.replays
    assert rematfn.stats(g).evictions == simulated.evictions > 0


@pytest.mark.parametrize("policy", RESPECTING, ids=described)
def test_the_budget_comes_before_marks(policy: Policy) -> None:
    leaf = X.clone().requires_grad_()

    def f(x: Tensor) -> Any:
        for _ in range(16):
            x = keep(x.sin() * x)
        return torch.autograd.grad(x.sum(), leaf)

    g = rematfn.remat(f, 9 * UNIT, policy=policy)
    for _ in range(2):
        assert_bitwise_equal(g(leaf), f(leaf))
        assert rematfn.stats(g).peak_bytes <= 9 * UNIT
        assert rematfn.stats(g).replays > 0


@pytest.mark.parametrize("policy", [ON(), Guided(), LRU()], ids=repr)
def test_marks_cost_nothing_in_a_budget_that_is_enough_without_them(policy: Policy) -> None:
    trace = rematfn.record(step, weights(), X)
    assert marked(trace, ("up", "act", "down"))
    stats = rematfn.simulate(trace, trace.peak_bytes, policy)
    assert (stats.evictions, stats.replays, stats.peak_bytes) == (0, 0, trace.peak_bytes)


def test_what_an_inner_level_could_evict_goes_before_what_is_marked_outside() -> None:
    leaf = X.clone().requires_grad_()

    def inner(x: Tensor) -> Tensor:
        for _ in range(8):
            x = x.sin() * x
        return x

    def f(x: Tensor) -> Tensor:
        marked = keep(x.exp())
        x = rematfn.remat(inner)(marked)
        return (x * marked).sum()

    g = rematfn.remat(f, 10 * UNIT, policy=ON())
    out = g(leaf)
    stats = rematfn.stats(g)
    assert stats.evictions > 0
    evicted = stats.replays
    (found,) = torch.autograd.grad(out, leaf)
    assert rematfn.stats(g).replays > evicted
    assert_bitwise_equal(found, torch.autograd.grad(f(leaf), leaf)[0])
