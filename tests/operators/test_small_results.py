# SPDX-License-Identifier: Apache-2.0
"""What a level without a budget does not record: see Note [Smaller than its record]."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import Transform, assert_bitwise_equal, assert_nothing_keyed, untransformed
from torch import Tensor

import rematfn
from rematfn import _C

STEPS = 20
RECORD = 512  # bytes: what is larger is recorded
SMALL = torch.linspace(-1, 1, RECORD // 4)
LARGE = torch.linspace(-1, 1, RECORD // 4 + 1)

Program = Callable[..., Any]


def chain(x: Tensor) -> Tensor:
    y = x
    for _ in range(STEPS):
        y = y.sin() + x
    return y


def recorded_by(transform: Transform, f: Program, x: Tensor) -> int:
    """Return how many operations there are records of at the end of ``transform(f)(x)``."""
    recorded = -1

    def counted(x: Tensor) -> Tensor:
        nonlocal recorded
        before = _C.testing.live_operations()
        y = f(x)
        recorded = _C.testing.live_operations() - before
        return y

    assert_bitwise_equal(transform(counted)(x), f(x))
    return recorded


def test_a_chain_of_a_few_numbers_is_not_recorded() -> None:
    g = rematfn.remat(chain)
    assert recorded_by(rematfn.remat, chain, SMALL) == 0
    g(SMALL)
    assert (rematfn.stats(g).operators, rematfn.stats(g).peak_bytes) == (2 * STEPS, 0)


def test_a_chain_of_more_is_recorded() -> None:
    assert recorded_by(rematfn.remat, chain, LARGE) == 2 * STEPS


ALL_RECORDED: dict[str, Transform] = {
    "a budget": functools.partial(rematfn.remat, budget="1 GiB"),
    "a budget around": lambda f: rematfn.remat(rematfn.remat(f), "1 GiB"),
    "evict everything": functools.partial(rematfn.remat, policy=rematfn.testing.EvictEverything()),
    "names": functools.partial(rematfn.remat, policy=rematfn.policies.Manual()),
    "grad around": lambda f: lambda x: torch.func.vjp(rematfn.remat(f), x)[0],
}


@pytest.mark.parametrize("name", ALL_RECORDED)
def test_what_a_level_may_need_is_recorded(name: str) -> None:
    assert recorded_by(ALL_RECORDED[name], chain, SMALL) >= 2 * STEPS


def test_what_requires_a_gradient_is_recorded() -> None:
    x = SMALL.clone().requires_grad_()
    assert recorded_by(rematfn.remat, chain, x) == 2 * STEPS


def test_a_gradient_inside_the_level_is_not() -> None:
    assert recorded_by(rematfn.remat, torch.func.grad(lambda x: chain(x).sum()), SMALL) == 0


def test_a_trace_has_them() -> None:
    assert rematfn.record(chain, SMALL).operators >= 2 * STEPS


LARGE_ONES: dict[str, Program] = {
    "an outer product": lambda x: torch.outer(x, x),
    "repeated": lambda x: x.repeat(100),
    "gathered": lambda x: torch.cat([x, x]),
    "in the second place": lambda x: torch.sort(x.repeat(3)).indices,
    "as another type": lambda x: x.double(),
    "like one": lambda x: torch.zeros_like(x, dtype=torch.complex128),
}


@pytest.mark.parametrize("name", LARGE_ONES)
def test_large_results_of_small_arguments_are_recorded_and_can_go(name: str) -> None:
    def f(x: Tensor) -> Tensor:
        h = LARGE_ONES[name](x)
        assert _C.testing.evict(h)
        return h + 1

    assert_bitwise_equal(rematfn.remat(f)(SMALL), LARGE_ONES[name](SMALL) + 1)


# --- lineage that reads what was not recorded -----------------------------------------------------


def overwritten(x: Tensor, big: Tensor, evict: Callable[[Tensor], Any]) -> list[Tensor]:
    scale = x * 2
    h = big.sin() * scale
    scale.add_(1)  # a replay needs what was there before
    evict(h)
    return [h * 1, scale]


def dropped(x: Tensor, big: Tensor, evict: Callable[[Tensor], Any]) -> list[Tensor]:
    h = big.sin() * (x * 2).exp()
    evict(h)
    return [h * 1]


def viewed(x: Tensor, big: Tensor, evict: Callable[[Tensor], Any]) -> list[Tensor]:
    scale = (x * 2).view(2, 2)
    h = big.sin() * scale[0, 0]
    scale[0].zero_()
    evict(h)
    return [h * 1, scale]


def written_to(x: Tensor, big: Tensor, evict: Callable[[Tensor], Any]) -> list[Tensor]:
    total = x * 0
    kept = []
    for _ in range(3):
        h = (big * total).cos()
        total += h.sum()
        kept.append(h)
    for h in kept:
        evict(h)
    return [*(h * 1 for h in kept), total]


def resized(x: Tensor, big: Tensor, evict: Callable[[Tensor], Any]) -> list[Tensor]:
    out = torch.empty_like(x[:0])
    torch.mul(big, x, out=out)
    evict(out)
    return [out * 1]


def moved(x: Tensor, big: Tensor, evict: Callable[[Tensor], Any]) -> list[Tensor]:
    scale = x * 2
    h = big * scale
    scale.data = x * 5
    evict(h)
    return [h * 1, scale]


def differentiated(x: Tensor, big: Tensor, evict: Callable[[Tensor], Any]) -> list[Tensor]:
    weight = (x * 2).requires_grad_()
    h = (big * weight).exp()
    evict(h)
    (grad,) = torch.autograd.grad(h.sum(), weight, create_graph=True)
    return [grad.detach(), weight.detach()]


def plain(f: Program) -> Program:
    return f


def grad(f: Program) -> Program:
    return torch.func.grad(lambda *args: sum(t.sum() for t in f(*args)))


def vmap(f: Program) -> Program:
    return lambda *args: torch.func.vmap(f)(*(torch.stack([a, a + 1]) for a in args))


def jvp(f: Program) -> Program:
    return lambda *args: torch.func.jvp(f, args, args)


PROGRAMS = [
    *((f, plain) for f in (overwritten, dropped, viewed, written_to, resized, moved)),
    (differentiated, plain),
    *((f, vmap) for f in (overwritten, dropped, viewed, written_to)),
    *((f, jvp) for f in (overwritten, dropped, viewed, written_to)),
    (dropped, grad),
]


@pytest.mark.parametrize(("f", "around"), PROGRAMS, ids=lambda f: f.__name__)
def test_lineage_holds_what_it_reads(f: Any, around: Callable[[Program], Program]) -> None:
    def run(transform: Transform, evict: Callable[[Tensor], Any]) -> Any:
        x, big = torch.linspace(1, 2, 4), torch.linspace(-1, 1, 4096).view(1024, 4)
        return transform(around(functools.partial(f, evict=evict)))(x, big)

    result = run(rematfn.remat, _C.testing.evict)
    assert_nothing_keyed(result)
    assert_bitwise_equal(result, run(untransformed, lambda h: None))


def test_a_graph_that_leaves_beside_the_results_is_cut() -> None:
    """A penalty of four bytes is sealed, and so are the gradients that come through its graph."""

    def run(transform: Transform) -> Any:
        w = torch.linspace(-1, 1, 4).requires_grad_()
        beside = []

        def f(x: Tensor) -> Tensor:
            h = (x * w).sin()
            beside.append(h.square().mean())
            return h.exp().sum()

        seen: list[Tensor] = []
        x = (w * 3).exp()
        x.register_hook(seen.append)
        (transform(f)(x) + beside[0]).backward()
        return [w.grad, *seen, beside[0].detach()]

    result = run(rematfn.remat)
    assert_nothing_keyed(result)
    assert_bitwise_equal(result, run(untransformed))


@pytest.mark.parametrize("left", [0, 1 << 40], ids=["short", "plenty"])
def test_many_small_results_are_noticed_when_memory_runs_short(left: int) -> None:
    """What was recorded goes for them."""

    def f(x: Tensor, big: Tensor) -> Tensor:
        h = big.sin()
        for _ in range(1 << 16):
            x = x.neg()
        return h * x[0]

    g = rematfn.remat(f)
    x, big = torch.ones(4), torch.linspace(-1, 1, 1 << 16)
    expected = f(x, big)
    _C.testing.pretend_memory_left(left)
    try:
        assert_bitwise_equal(g(x, big), expected)
    finally:
        _C.testing.pretend_memory_left(None)
    stats = rematfn.stats(g)
    assert (stats.evictions, stats.replays) == ((1, 1) if left == 0 else (0, 0))
