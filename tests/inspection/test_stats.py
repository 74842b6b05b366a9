# SPDX-License-Identifier: Apache-2.0
"""`rematfn.stats(g)`: a frozen look at what the last call did, found wherever `g` is wrapped."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import described
from torch import Tensor, nn

import rematfn
from rematfn._inspection.stats import Stats
from rematfn._transform.recorded import finish_searches
from rematfn.testing import MemoryTimeline

X = torch.linspace(-1, 1, 64)


def wave(x: Tensor) -> Tensor:
    for _ in range(4):
        x = x.sin() * 2
    return x.sum()


OPERATORS = 9
FIELDS = [field.name for field in dataclasses.fields(Stats)]

ON_AN_ACCELERATOR = ["reserved_bytes", "workspace_bytes"]
OF_A_PLAN = ["settled"]


def test_what_is_not_known_is_none() -> None:
    g = rematfn.remat(wave, "1MiB")
    assert [getattr(rematfn.stats(g), field) for field in FIELDS] == [None] * len(FIELDS)
    assert str(rematfn.stats(g)) == "not called yet"
    g(X)
    known = [field for field in FIELDS if field not in (*ON_AN_ACCELERATOR, *OF_A_PLAN)]
    assert None not in [getattr(rematfn.stats(g), field) for field in known]
    free = rematfn.remat(wave)
    free(X)
    unknown = [field for field in known if getattr(rematfn.stats(free), field) is None]
    assert unknown == ["budget", "min_budget"]
    assert "min budget unknown" in str(rematfn.stats(free))


@pytest.mark.parametrize("budget", [None, 1.0, "1GiB"])
def test_the_peak_is_the_allocator_s_with_a_budget_and_without(budget: str | float | None) -> None:
    """The scratch of a kernel counts, whoever may decide about it."""
    x = torch.rand(1, 4, 64, 64)
    weight = torch.ones(4, 4, 3, 3)

    def f(x: Tensor) -> Tensor:
        y = torch.nn.functional.interpolate(x, scale_factor=2, mode="bicubic")
        return torch.nn.functional.conv2d(y, weight, padding=1).sum()

    with MemoryTimeline() as timeline:
        f(x)
    g = rematfn.remat(f, budget)
    for _ in range(3):
        g(x)
        assert rematfn.stats(g).unconstrained_bytes == timeline.peak


def test_a_plan_is_settled_once_nothing_else_is_tried() -> None:
    turns = [True]

    def many(x: Tensor) -> Tensor:
        for _ in range(40):
            x = (x.sin() * 2).cos() if turns[0] else x.erf().tanh()
        return x.sum()

    g = rematfn.remat(many, 12 * X.nbytes)

    def called() -> Stats:
        g(X.clone().requires_grad_()).backward()
        return rematfn.stats(g)

    assert called().settled is None
    searched = called()
    assert searched.call == "guided"
    assert searched.settled is False
    finish_searches()
    settled = called()
    assert settled.settled is True
    assert called().replays == settled.replays
    turns[0] = False
    lost = called()
    assert lost.call == "online"
    assert lost.settled is None


def decorated(f: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(f)
    def wrapper(*args: Any) -> Any:
        return f(*args)

    return wrapper


WRAPPERS: dict[str, Callable[..., Any]] = {
    "nothing": lambda g: g,
    "grad": torch.func.grad,
    "grad_and_value": torch.func.grad_and_value,
    "jacrev": torch.func.jacrev,
    "jacfwd": torch.func.jacfwd,
    "hessian": torch.func.hessian,
    "vmap": torch.func.vmap,
    "vmap of grad": lambda g: torch.func.vmap(torch.func.grad(g)),
    "partial": functools.partial,
    "wraps": decorated,
    "several": lambda g: decorated(functools.partial(torch.func.grad(decorated(g)))),
    "staticmethod": staticmethod,
    "cache": functools.lru_cache,
}


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS.keys())
def test_it_is_found_in_what_wraps_a_function(wrap: Callable[..., Any]) -> None:
    g = rematfn.remat(wave, "1MiB")
    wrapped = wrap(g)
    assert rematfn.stats(wrapped).operators is None
    wrapped(X.repeat(2, 1))
    assert rematfn.stats(wrapped).operators >= OPERATORS
    assert rematfn.stats(wrapped) == rematfn.stats(g)


class Endless:
    def __call__(self) -> None: ...

    @property
    def __wrapped__(self) -> Endless:
        return self


@pytest.mark.parametrize(
    "other",
    [wave, lambda x: rematfn.remat(wave)(x), nn.Linear(2, 2), 3, None, Endless()],
    ids=described,
)
def test_where_there_is_none_the_error_says_what_to_pass(other: Any) -> None:
    with pytest.raises(TypeError, match=r"g = remat\(f, \.\.\.\), rematfn\.stats\(g\)"):
        rematfn.stats(other)


def test_what_leaves_in_another_order_needs_no_larger_budget() -> None:
    """Together they do not fit; they are handed out one after another."""
    kept: list[Tensor] = []

    def f() -> Tensor:
        kept.clear()
        h, made = torch.linspace(0, 1, 1 << 14), []
        for j in range(6):
            h = h.sin() + j
            kept.append(h)
            made.append(h.exp())
        return torch.stack([x.sum() for x in made])

    g = rematfn.remat(f, "200KiB")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            g()
    found = rematfn.stats(g)
    assert found.budget is not None
    assert found.min_budget is not None
    assert found.min_budget <= found.peak_bytes <= found.budget
