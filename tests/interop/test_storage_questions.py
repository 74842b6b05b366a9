# SPDX-License-Identifier: Apache-2.0
"""Questions about a storage: who has asked one holds nothing, who keeps the storage does."""

import ctypes
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import assert_bitwise_equal, assert_same_as_eager
from torch import Tensor

import rematfn

ROWS, WIDTH, DEPTH = 256, 16, 6

QUESTIONS: dict[str, Callable[[Tensor], Any]] = {
    "size": lambda x: x.untyped_storage().size(),
    "nbytes": lambda x: x.untyped_storage().nbytes(),
    "len": lambda x: len(x.untyped_storage()),
    "device": lambda x: x.untyped_storage().device,
    "resizable": lambda x: x.untyped_storage().resizable(),
    "_cdata": lambda x: x.untyped_storage()._cdata != 0,
    "_weak_ref": lambda x: x.untyped_storage()._weak_ref() != 0,
    "of a view": lambda x: x[1:].t().untyped_storage().nbytes(),
    "asked twice": lambda x: x.untyped_storage().size() - x.untyped_storage().size(),
    "a typed storage": lambda x: x.storage().size(),
    "a weak reference": lambda x: weakref.ref(x.untyped_storage())().nbytes(),  # type: ignore[union-attr]
    "clone": lambda x: x.untyped_storage().clone()[5],
}


def inputs() -> tuple[Tensor, list[Tensor]]:
    draw = torch.Generator().manual_seed(0)
    return torch.randn(ROWS, WIDTH, generator=draw), [
        torch.randn(WIDTH, WIDTH, generator=draw) / WIDTH**0.5 for _ in range(DEPTH)
    ]


def layers(ask: Callable[[Tensor], Any]) -> Callable[[Tensor, list[Tensor]], Any]:
    """Return a function that holds all its layers to the end, and asks about each."""

    def held(x: Tensor, weights: list[Tensor]) -> Any:
        hs, answers = [x], []
        for w in weights:
            hs.append(torch.tanh(hs[-1] @ w))
            answers.append(ask(hs[-1]))
        return sum(h.sum() for h in hs), answers

    return held


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning")
@pytest.mark.parametrize("ask", QUESTIONS.values(), ids=QUESTIONS.keys())
def test_a_question_pins_nothing(ask: Callable[[Tensor], Any]) -> None:
    x, weights = inputs()
    expected = layers(ask)(x, weights)
    g = rematfn.remat(layers(ask), 0.5)
    for _ in range(2):
        assert_bitwise_equal(g(x, weights), expected)
    assert rematfn.stats(g).evictions > 0


def test_a_storage_that_is_held_stays_where_it_is() -> None:
    def f(x: Tensor, weights: list[Tensor]) -> Any:
        y = x @ weights[0]
        storage = y.untyped_storage()
        address = torch._C.StorageBase.data_ptr(storage)
        z = layers(lambda h: h.untyped_storage().size())(y, weights)
        assert torch._C.StorageBase.data_ptr(storage) == address  # nobody is told
        return z, storage.tolist()

    x, weights = inputs()
    g = rematfn.remat(f, 0.6)
    for _ in range(2):
        assert_bitwise_equal(g(x, weights), f(x, weights))
    assert rematfn.stats(g).evictions > 0


def test_a_result_of_an_operator_that_asks_is_the_levels() -> None:
    """An operator of Python's asks about its own result before it returns it."""

    @torch.library.custom_op("rematfn_tests::asks", mutates_args=())
    def asks(x: Tensor) -> Tensor:
        y = x.sin()
        assert y.untyped_storage().nbytes() > 0
        return y

    def f(x: Tensor) -> Tensor:
        hs = [x]
        for _ in range(DEPTH):
            hs.append(asks(hs[-1]))
        return torch.stack([h.sum() for h in hs]).sum()

    x, _ = inputs()
    g = rematfn.remat(f, 0.5)
    for _ in range(2):
        assert_bitwise_equal(g(x), f(x))
    assert rematfn.stats(g).evictions > 0


# --- writes ---------------------------------------------------------------------------------------


def written_by_address(x: Tensor) -> None:
    storage = x.untyped_storage()
    ctypes.memset(storage.data_ptr(), 0, storage.nbytes())


def written_by_a_tensor(x: Tensor) -> None:
    torch.empty(0).set_(x.untyped_storage()).fill_(2)


WRITES: dict[str, Callable[[Tensor], Any]] = {
    "fill_": lambda x: x.untyped_storage().fill_(0),
    "setitem": lambda x: x.untyped_storage().__setitem__(2, 0),
    "copy_": lambda x: x.untyped_storage().copy_(torch.ones_like(x).untyped_storage()),
    "byteswap": lambda x: x.untyped_storage().byteswap(torch.float32),
    "by address": written_by_address,
    "by a tensor": written_by_a_tensor,
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES.keys())
def test_what_is_written_through_a_storage_is_not_lost(write: Callable[[Tensor], Any]) -> None:
    def f(x: Tensor, weights: list[Tensor]) -> Any:
        y = x @ weights[0]
        write(y)
        z, _ = layers(lambda h: h.untyped_storage().size())(x, weights)
        return z, y + 1

    assert_same_as_eager(lambda transform: transform(f)(*inputs()))
