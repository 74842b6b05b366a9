# SPDX-License-Identifier: Apache-2.0
"""What runs after its call has returned is refused, with what to write instead."""

import functools
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
import torch
from helpers import assert_bitwise_equal, assert_nothing_left, remains
from torch import Tensor, nn

import rematfn
from rematfn import _C

X = torch.linspace(-1, 1, 64)


def generator(x: Tensor) -> Iterator[Tensor]:
    yield x.sin()


async def coroutine(x: Tensor) -> Tensor:
    return x.sin()


async def asynchronous(x: Tensor) -> AsyncIterator[Tensor]:
    yield x.sin()


class Functions:
    generator = generator
    coroutine = coroutine
    asynchronous = asynchronous


class Call:
    async def __call__(self, x: Tensor) -> Tensor:
        return x.sin()


class Net(nn.Module):
    def forward(self, x: Tensor) -> Iterator[Tensor]:
        yield x.sin()


KINDS: dict[str, tuple[Any, str]] = {
    "generator": (generator, "generator is a generator function"),
    "async function": (coroutine, "coroutine is an async function"),
    "async generator": (asynchronous, "asynchronous is an asynchronous generator function"),
    "partial": (functools.partial(functools.partial(coroutine), X), "coroutine is an async"),
    "method": (Functions().generator, "generator is a generator function"),
    "partial of a method": (functools.partial(Functions().coroutine), "coroutine is an async"),
    "static": (staticmethod(coroutine), "coroutine is an async function"),
    "class": (classmethod(generator), "generator is a generator function"),
    "object": (Call(), "Call is an async function"),
    "module": (Net(), "Net.forward is a generator function"),
    "lambda": (lambda x: (yield x), "<lambda> is a generator function"),
}


def refused(call: Callable[[], Any], *words: str) -> None:
    with pytest.raises(TypeError) as caught:
        call()
    for word in (*words, "outside of every budget", "function of its own"):
        assert word in str(caught.value)


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_refused_by_name(kind: str) -> None:
    f, what = KINDS[kind]
    refused(lambda: rematfn.remat(f, "1MiB"), "remat(f): ", what)
    refused(lambda: rematfn.remat(budget=0.5)(f), "remat(f): ", what)
    if kind not in ("static", "class"):
        refused(lambda: rematfn.checkpoint(f, X), "checkpoint(function): ", what)
        refused(lambda: rematfn.record(f, X), "record(f): ", what)


class Soon:
    def __await__(self) -> Iterator[None]:
        yield


RESULTS: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "generator": (lambda x: (y.sin() for y in x), "generator"),
    "coroutine": (lambda x: coroutine(x), "coroutine"),
    "async generator": (lambda x: asynchronous(x), "async_generator"),
    "awaitable": (lambda x: Soon(), "Soon"),
}


@pytest.mark.filterwarnings("error")  # "coroutine ... was never awaited" among them
@pytest.mark.parametrize("kind", RESULTS)
def test_a_function_that_turns_out_to_return_one_is_refused(kind: str) -> None:
    f, what = RESULTS[kind]
    before = remains()
    returned = f"has returned a {what}"
    refused(lambda: rematfn.remat(f, "1MiB")(X), "remat(<lambda>, budget=1 MiB): ", returned)
    refused(lambda: rematfn.checkpoint(f, X), "remat(<lambda>", returned)
    refused(lambda: rematfn.record(f, X), "record: ", returned)
    assert_nothing_left(before)


# --- calls that are interleaved -------------------------------------------------------------------


KIB4 = 4096  # of each tensor below


def call(name: str, budget: int | None, kept: list[list[Tensor]]) -> Iterator[None]:
    """Do what a call of `f` would in a greenlet that switches in the middle of it."""
    x = torch.linspace(-1, 1, KIB4 // 4)
    g = rematfn.remat(lambda x: x, budget)
    options, _ = g._resolve((x,), {})
    with options.level():
        made = [x.sin()]
        for step in range(12):
            made.append(made[-1].cos() * x)
            if step == 6:
                yield
    kept.append(made)


def ended(running: Iterator[None]) -> str:
    try:
        next(running, None)
    except RuntimeError as error:
        return str(error)
    return ""


def test_a_level_that_ends_while_it_is_hidden_is_not_shown_again() -> None:
    """A compilation that failed has hidden it, and not said that it ended."""
    before = remains()
    assert rematfn.remat(lambda x: (x.sin(), _C.hide_levels())[0], "1MiB")(X) is not None
    _C.show_levels()
    X.sin()
    assert_nothing_left(before)


@pytest.mark.parametrize("budget", [None, 8 * KIB4])
@pytest.mark.parametrize("order", ["ab", "ba", "abc", "bca", "cab"])
def test_calls_that_are_interleaved_end_in_an_error_and_leave_nothing(
    order: str, budget: int | None
) -> None:
    before, kept = remains(), []  # type: ignore[var-annotated]
    calls = {name: call(name, budget, kept) for name in sorted(order)}
    for running in calls.values():
        next(running)
    messages = [message for name in order if (message := ended(calls[name]))]
    assert len(messages) == {"ba": 0, "ab": 2, "abc": 3, "bca": 2, "cab": 2}[order]
    for message in messages:
        for word in ("remat(<lambda>", "interleaved", "greenlets", "a thread of its own"):
            assert word in message
    del calls, running
    rematfn.testing.check()
    x = torch.linspace(-1, 1, KIB4 // 4)
    expected = [x.sin()]
    for _ in range(12):
        expected.append(expected[-1].cos() * x)
    for made in kept:
        assert_bitwise_equal(made, expected)
    kept.clear()
    assert_nothing_left(before)
    g = rematfn.remat(lambda x: x.sin().cos(), budget)
    assert_bitwise_equal(g(x), x.sin().cos())
    assert rematfn.stats(g).operators == 2
