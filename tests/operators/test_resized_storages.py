# SPDX-License-Identifier: Apache-2.0
"""Storages that are resized: no operator, no version counter, sometimes the same address."""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import (
    EVERYTHING,
    Transform,
    assert_bitwise_equal,
    assert_same_as_eager,
    same_as_eager,
    untransformed,
)
from processes import in_a_process
from torch import Tensor

import rematfn

SIZES = [7, 256, 4096, 50_000, 300_000]
Write = Callable[[Tensor], Any]


def resize(t: Tensor, elements: int) -> None:
    t.untyped_storage().resize_(elements * t.itemsize)


def refill(t: Tensor, how: Write, values: Tensor | None = None) -> None:
    """Empty the storage, have it given back, and put values there: by default those it had."""
    values = t.detach().clone() if values is None else values
    resize(t, 0)
    resize(t, t.numel())
    how(t)(values)


REFILLS: dict[str, Callable[[Tensor], Callable[[Tensor], Any]]] = {
    "an operator": lambda t: t.copy_,
    ".data": lambda t: t.data.copy_,
    "an array": lambda t: lambda values: t.detach().numpy().__setitem__(..., values.numpy()),
    "its storage": lambda t: lambda values: t.untyped_storage().copy_(values.untyped_storage()),
    "a collective's way": lambda t: (
        lambda values: (
            torch.autograd._unsafe_preserve_version_counter(t).__enter__() or t.copy_(values)
        )
    ),
}


# --- between the forward and the backward ---------------------------------------------------------


def between(do: Write, transform: Transform, n: int = 4096) -> Any:
    """Return what the gradients of a function of `w` are if `do(w)` comes before the backward."""
    x = torch.linspace(-1, 1, n).requires_grad_()
    w = torch.linspace(0.5, 1.5, n)

    def f(x: Tensor) -> Tensor:
        return ((x + w).sin() * (x - w)).exp().sum()  # w is read and not saved

    loss = transform(f)(x)
    with torch.no_grad():
        do(w)
    loss.backward()
    return x.grad


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("how", REFILLS.values(), ids=REFILLS.keys())
def test_refilled_with_what_was_there(how: Any, n: int) -> None:
    assert_same_as_eager(lambda transform: between(lambda w: refill(w, how), transform, n))


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("how", REFILLS.values(), ids=REFILLS.keys())
@pytest.mark.parametrize("at", [0, 3, -1])
def test_refilled_with_something_else(how: Any, n: int, at: int) -> None:
    def do(w: Tensor) -> None:
        other = w.clone()
        other[at] += 1  # one element is enough
        refill(w, how, other)

    expected = between(lambda w: None, untransformed, n)
    assert_bitwise_equal(between(do, rematfn.remat, n), expected)  # nothing is evicted
    with pytest.raises(rematfn.ReplayError, match=r"`aten::\w+`.* was resized .*Refill it"):
        between(do, functools.partial(rematfn.remat, policy=rematfn.testing.EvictEverything()), n)


@in_a_process
def test_emptied() -> None:
    for n in SIZES:
        for do in (
            lambda w: resize(w, 0),
            lambda w: resize(w, w.numel() // 2),
            lambda w: torch.ops.inductor.resize_storage_bytes_(w, 0),
            lambda w: w.storage().resize_(0),
        ):
            with pytest.raises(rematfn.ReplayError, match="was resized"):
                between(do, EVERYTHING, n)
        # What the new memory holds is chance: it may be what was there.
        with contextlib.suppress(rematfn.ReplayError):
            regrown = between(lambda w: (resize(w, 0), resize(w, w.numel())), EVERYTHING, n)
            assert_bitwise_equal(regrown, between(lambda w: None, untransformed, n))


OTHERWISE: dict[str, Write] = {
    "grown": lambda w: resize(w, 2 * w.numel()),
    "grown and cut back": lambda w: (resize(w, 2 * w.numel()), resize(w, w.numel())),
    "resized to what it was": lambda w: resize(w, w.numel()),
    "shared": lambda w: w.share_memory_(),
    "sent": lambda w: w.untyped_storage()._share_fd_cpu_(),
    "given other data": lambda w: setattr(w, "data", torch.zeros(3)),
}


@pytest.mark.parametrize("do", OTHERWISE.values(), ids=OTHERWISE.keys())
def test_contents_that_are_still_there(do: Write) -> None:
    assert_same_as_eager(lambda transform: between(do, transform))


# --- inside the function --------------------------------------------------------------------------


def by_operator(t: Tensor, elements: int) -> None:
    torch.ops.inductor.resize_storage_bytes_(t, elements * t.itemsize)


@pytest.mark.parametrize("by", [resize, by_operator])
@pytest.mark.parametrize("elements", [0, 16, 4096, 10_000])
@same_as_eager
def test_an_intermediate_is_resized(
    transform: Transform, by: Callable[[Tensor, int], None], elements: int
) -> Any:
    def f(x: Tensor) -> Tensor:
        h = x.sin()
        y = (h * 2).exp()
        with torch.no_grad():
            late = h.detach() + 1
            by(h, elements)
            z = late.cos()
            by(h, 4096)
            h.detach().fill_(3)
            return y * z, late * h.detach()

    out = transform(f)(torch.linspace(-1, 1, 4096).requires_grad_())
    return out


def test_what_it_is_grown_by_counts() -> None:
    def f(x: Tensor) -> Tensor:
        h = x.sin()
        h.untyped_storage().resize_(1 << 20)
        return h * 2

    with pytest.raises(rematfn.BudgetError, match="resize_storage_bytes_"):
        rematfn.remat(f, budget="256KiB")(torch.ones(64))
    g = rematfn.remat(f, budget="2MiB")
    g(torch.ones(64))
    assert 1 << 20 < rematfn.stats(g).peak_bytes < 2 << 20


@same_as_eager
def test_freed_and_recomputed_in_a_hook(transform: Transform) -> Any:
    """As Megatron does: an output is freed after the forward, and made again in the backward."""

    def f(x: Tensor, w: Tensor) -> Tensor:
        with torch.no_grad():
            h = (x * w).sin()
        h.requires_grad_()
        y = (h * w).exp() * h
        n = h.numel()
        resize(h, 0)

        def again(grad: Tensor) -> None:
            with torch.no_grad():
                resize(h, n)
                h.data.copy_((x * w).sin())

        y.register_hook(again)
        return y

    x = torch.linspace(-1, 1, 4096)
    w = torch.linspace(0.5, 1.5, 4096).requires_grad_()
    y = transform(f)(x, w)
    return torch.autograd.grad(y.sum(), w)
