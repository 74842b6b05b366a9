# SPDX-License-Identifier: Apache-2.0
"""Tensor subclasses and the modes of `__torch_function__` and `__torch_dispatch__`.

They stand above the level: it sees the plain tensors that they unwrap to.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from helpers import (
    EVERY,
    PLAIN,
    Mode,
    Transform,
    assert_same_as_eager,
    same_as_eager,
)
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from rematfn import _C


def start() -> Tensor:
    return torch.linspace(0.2, 1.1, 12).view(3, 4)


def body(x: Tensor, w: Tensor) -> Tensor:
    y = (x @ w).sin()
    z = y.exp() * x
    z.mul_(y)
    return (z @ w.t()).cos() + z[:1]


def weight() -> Tensor:
    return torch.linspace(-1, 1, 16).view(4, 4).clone()


# --- subclasses -----------------------------------------------------------------------------------


class Named(Tensor):
    """A `__torch_function__` subclass: the tensor itself, in another class, with an attribute."""

    label: str = "none"

    @classmethod
    def __torch_function__(cls, f: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_function__(f, types, args, kwargs or {})
        if isinstance(out, Named):
            out.label = getattr(f, "__name__", "?")
        return out


class Scaled(Tensor):
    """A wrapper: two tensors that are one times the other."""

    @staticmethod
    def __new__(cls, value: Tensor, scale: Tensor) -> Scaled:
        return Tensor._make_wrapper_subclass(  # type: ignore[attr-defined,no-any-return]
            cls,
            value.size(),
            strides=value.stride(),
            dtype=value.dtype,
            device=value.device,
            requires_grad=value.requires_grad,
        )

    def __init__(self, value: Tensor, scale: Tensor) -> None:
        self.value, self.scale = value, scale

    def __tensor_flatten__(self) -> Any:
        return ["value", "scale"], None

    @staticmethod
    def __tensor_unflatten__(inner: Any, meta: Any, size: Any, stride: Any) -> Scaled:
        return Scaled(inner["value"], inner["scale"])

    def plain(self) -> Tensor:
        return self.value * self.scale

    @classmethod
    def __torch_dispatch__(cls, f: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain = tree_map_only(Scaled, Scaled.plain, (args, kwargs or {}))
        out = f(*plain[0], **plain[1])
        half = functools.partial(torch.full, (), 0.5)
        return tree_map_only(Tensor, lambda t: Scaled(t * 2, half()) if t.dim() else t, out)

    def __repr__(self) -> str:  # type: ignore[override]
        return "Scaled"


@pytest.mark.parametrize("where", ["argument", "captured"])
@same_as_eager
def test_torch_function_subclasses_keep_their_class(transform: Transform, where: str) -> Any:
    x, w = start().as_subclass(Named), weight()
    out = (
        transform(lambda x: body(x, w))(x)
        if where == "argument"
        else transform(lambda w: body(x, w))(w)
    )
    return out.label, out, out.as_subclass(Tensor)


def unscaled(tree: Any) -> Any:
    """Replace wrappers by what they hold."""
    return tree_map_only(Scaled, lambda t: [t.value, t.scale], tree)


@same_as_eager
def test_wrapper_subclasses_made_inside(transform: Transform) -> Any:
    def f(x: Tensor, w: Tensor) -> Any:
        wrapped = Scaled(x.exp(), x.mean())
        return body(wrapped, w), wrapped.plain().cos(), wrapped

    return unscaled(transform(f)(start(), weight()))


@same_as_eager
def test_gradients_through_wrapper_subclasses(transform: Transform) -> Any:
    x = Scaled(start(), torch.tensor(1.5)).requires_grad_()
    w = weight().requires_grad_()
    out = transform(body)(x, w)
    out.sum().backward()
    return unscaled([out.detach(), x.grad, w.grad])


@same_as_eager
def test_what_a_result_has_as_attributes_leaves_with_it(transform: Transform) -> Any:
    """Nothing of it is replayed, not though the argument that it was made from has been written."""

    def f(x: Tensor) -> tuple[Tensor, Tensor]:
        named: Any = x.sin().as_subclass(Named)
        named.scale, named.others = x.exp(), {"of the scale": [x.cos()]}
        wrapper: Any = Scaled(x.tanh(), torch.full((), 0.5))
        wrapper.offset, wrapper.itself = x * 3, wrapper
        return named, wrapper

    x = start().requires_grad_() * 1
    named, wrapper = transform(f)(x)
    with torch.no_grad():
        x.zero_()
    held = [named.scale, named.others["of the scale"][0], wrapper.offset]
    assert not any(map(_C.has_key, held))
    return unscaled(wrapper), [t.detach().numpy().tolist() for t in held], named.label


# --- modes ----------------------------------------------------------------------------------------


class Log(TorchDispatchMode):
    """Write down each operator, and what it was given and gave, as bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[Any] = []

    def __torch_dispatch__(self, f: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = f(*args, **kwargs or {})
        self.lines.append((str(f), type(out).__name__))
        return out


def gradient(x: Tensor, w: Tensor) -> Any:
    out = body(x, w)
    return out, torch.autograd.grad(out.sum(), [x, w])


def leaves() -> tuple[Tensor, Tensor]:
    return start().requires_grad_(), weight().requires_grad_()


@pytest.mark.parametrize("where", ["inside", "around"])
@same_as_eager
def test_a_dispatch_mode_sees_the_program_and_no_replays(transform: Transform, where: str) -> Any:
    log = Log()

    def logged(f: Any) -> Any:
        def within(*args: Any) -> Any:
            with log:
                return f(*args)

        return within

    g = transform(logged(gradient)) if where == "inside" else logged(transform(gradient))
    return g(*leaves()), log.lines


# --- tracing --------------------------------------------------------------------------------------


@pytest.mark.parametrize("tracing", ["real", "fake", "symbolic"])
@pytest.mark.parametrize("mode", [PLAIN, EVERY], ids=lambda mode: mode.name)
def test_make_fx_traces_the_function_itself(tracing: str, mode: Mode) -> None:
    def run(transform: Transform) -> Any:
        x, w = leaves()
        graph = make_fx(transform(gradient), tracing_mode=tracing)(x, w)
        return graph.code, graph(x, w)

    assert_same_as_eager(run, mode)
