# SPDX-License-Identifier: Apache-2.0
"""A transformed function is to everybody else what its function is."""

import copy
import functools
import inspect
import pickle
import typing
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import assert_bitwise_equal
from torch import Tensor

import rematfn

remat = rematfn.remat
X = torch.linspace(-1, 1, 64)


def wave(x: Tensor, scale: float = 2.0, *, times: int = 3) -> Tensor:
    """Return a wave."""
    for _ in range(times):
        x = (x * scale).sin()
    return x


transformed = remat(wave, "1MiB")  # under another name than its function's


@remat(budget=0.9)
def decorated(x: Tensor, scale: float = 2.0) -> Tensor:
    """Return a decorated wave."""
    return wave(x, scale)


class Waves:
    def __init__(self, scale: float = 3.0) -> None:
        self.scale = scale
        self.bound = remat(self.plain)  # an attribute that holds its owner's method

    def plain(self, x: Tensor) -> Tensor:
        return wave(x, self.scale)

    @remat(budget="1MiB")
    def method(self, x: Tensor, extra: int = 0) -> Tensor:
        """Return a wave of one's own."""
        return self.plain(x) + extra

    @remat
    @staticmethod
    def static_inside(x: Tensor) -> Tensor:
        return wave(x)

    @staticmethod
    @remat
    def static_outside(x: Tensor) -> Tensor:
        return wave(x)

    @remat(budget=0.9)
    @classmethod
    def class_inside(cls, x: Tensor) -> Tensor:
        return wave(x, len(cls.__name__))

    @classmethod
    @remat(budget=0.9)
    def class_outside(cls, x: Tensor) -> Tensor:
        return wave(x, len(cls.__name__))

    @property
    @remat
    def value(self) -> Tensor:
        return wave(X, self.scale)

    partly = functools.partialmethod(method, extra=1)


class Rippling(Waves):
    def method(self, x: Tensor, extra: int = 0) -> Tensor:
        return super().method(x, extra) * 2


def test_every_kind_of_method() -> None:
    expected = wave(X, 3.0)
    for waves in (Waves(), Rippling()):
        times = 2 if isinstance(waves, Rippling) else 1
        named = wave(X, len(type(waves).__name__))
        assert_bitwise_equal(waves.method(X), expected * times)
        assert_bitwise_equal(type(waves).method(waves, x=X), expected * times)
        assert_bitwise_equal(waves.partly(X), expected + 1)
        assert_bitwise_equal(waves.value, expected)
        assert_bitwise_equal(waves.bound(X), expected)
        for static in (waves.static_inside, waves.static_outside, type(waves).static_inside):
            assert_bitwise_equal(static(X), wave(X))
        for of_class in (waves.class_inside, type(waves).class_inside, waves.class_outside):
            assert_bitwise_equal(of_class(X), named)
            assert rematfn.stats(of_class).operators == 6


def test_what_inspect_functools_and_typing_ask_for() -> None:
    for name in ("__name__", "__qualname__", "__doc__", "__module__", "__annotations__"):
        assert getattr(transformed, name) == getattr(wave, name)
    for name in ("__code__", "__defaults__", "__kwdefaults__", "__globals__", "__closure__"):
        assert getattr(transformed, name) is getattr(wave, name)
    assert not hasattr(transformed, "__self__")
    assert not hasattr(transformed, "no_such_thing")
    assert inspect.signature(transformed) == inspect.signature(wave)
    assert inspect.unwrap(transformed) is wave
    assert inspect.isroutine(transformed)
    assert inspect.getsource(transformed) == inspect.getsource(wave)
    assert inspect.getdoc(transformed) == "Return a wave."
    assert typing.get_type_hints(decorated)["return"] is Tensor
    assert typing.get_type_hints(Waves.method)["x"] is Tensor
    assert functools.partial(transformed, scale=1.0)(X).shape == X.shape
    assert functools.wraps(transformed)(lambda x: x).__name__ == "wave"


# --- copies ---------------------------------------------------------------------------------------


def pickled(g: Any) -> Any:
    return pickle.loads(pickle.dumps(g))


COPIES = {"pickle": pickled, "deepcopy": copy.deepcopy, "copy": copy.copy}
eachway = pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES.keys())


@eachway
def test_under_its_own_name_a_copy_is_the_same_function(copied: Callable[..., Any]) -> None:
    for g in (decorated, Waves.method, Waves.static_inside, Waves.static_outside):
        if g is not Waves.method:
            g(X)
        assert copied(g) is g


@eachway
def test_else_a_copy_has_the_options_and_no_memory_of_calls(copied: Callable[..., Any]) -> None:
    options = {"policy": rematfn.testing.EvictEverything(), "verify": True, "cost": "time"}
    for g in (transformed, remat(wave, 0.9), remat(wave, **options)):
        for _ in range(3):
            g(X)
        made = copied(g)
        assert made is not g
        assert (made.budget, made.policy, made._options) == (g.budget, g.policy, g._options)
        assert rematfn.stats(made).operators is None
        assert_bitwise_equal(made(X), wave(X))
        assert made.__name__ == "wave"
