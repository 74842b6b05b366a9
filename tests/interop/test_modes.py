# SPDX-License-Identifier: Apache-2.0
"""What a thread can switch on and off: autocast, inference mode, defaults, determinism."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from helpers import (
    Transform,
    assert_bitwise_equal,
    same_as_eager,
    untransformed,
)
from torch import Tensor, func, nn
from torch.overrides import TorchFunctionMode

import rematfn


def model() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.GELU(), nn.Linear(6, 4))


def batch() -> Tensor:
    return torch.linspace(-1, 1, 12).view(3, 4)


class Called(TorchFunctionMode):
    def __enter__(self) -> "Called":
        self.functions: list[Any] = []
        super().__enter__()
        return self

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.functions.append(func)
        return func(*args, **(kwargs or {}))


def test_a_mode_sees_what_the_function_calls_and_no_more() -> None:
    net, x = model(), batch()
    transformed = [untransformed(net), *[rematfn.remat(net, "1MiB")] * 3, rematfn.offload(net)]
    seen = []
    for g in transformed:
        with Called() as mode:
            g(x)
        seen.append(mode.functions)
    assert len(seen[0]) > 3
    assert all(functions == seen[0] for functions in seen)


# --- autocast -------------------------------------------------------------------------------------


def autocast(**options: Any) -> Any:
    return torch.autocast("cpu", torch.bfloat16, **options)


@pytest.mark.parametrize("cache", [True, False], ids=["cache", "no-cache"])
@pytest.mark.parametrize("where", ["inside", "around", "around-the-backward-too"])
@same_as_eager
def test_autocast(transform: Transform, where: str, cache: bool) -> Any:
    net, x = model(), batch().requires_grad_()

    def f(x: Tensor) -> Tensor:
        with autocast(cache_enabled=cache) if where == "inside" else nullcontext():
            return net(x) * net(x.sin())  # each weight is cast once, or twice

    g = transform(f)
    with autocast(cache_enabled=cache) if where != "inside" else nullcontext():
        out = g(x)
        if where == "around-the-backward-too":
            out.float().sum().backward()
    if where != "around-the-backward-too":
        out.float().sum().backward()
    return out, x.grad, [p.grad for p in net.parameters()]


@same_as_eager
def test_the_weight_cache_keeps_no_level_tensors(transform: Transform) -> Any:
    """A weight cast inside one call is read again by the next, and by eager code after it."""

    net, x = model(), batch()
    with autocast():
        first = transform(net)(x)
        second = transform(net)(x * 2)
        third = net(x * 3)
        (first + second + third).float().sum().backward()
    return first, second, third, [p.grad for p in net.parameters()]


@pytest.mark.parametrize("learns", [False, True])
@same_as_eager
def test_a_cast_that_is_kept_stays_as_it_is_when_its_weight_is_written(
    transform: Transform, learns: bool
) -> Any:
    net, x = model(), batch()
    results = []
    with autocast():
        for _ in range(3):
            with torch.set_grad_enabled(learns):
                out = transform(net)(x)
            if learns:
                out.float().sum().backward()
            with torch.no_grad():
                for p in net.parameters():
                    p.mul_(2)
            results.append(out)
        results.append(net(x))
    return results, [p.grad for p in net.parameters()]


@pytest.mark.parametrize("order", ["grad-remat", "remat-grad", "vmap-grad-remat"])
@same_as_eager
def test_autocast_under_transforms(transform: Transform, order: str) -> Any:
    net, x = model(), batch()
    params = dict(net.named_parameters())

    def loss(params: Any, x: Tensor) -> Tensor:
        with autocast():
            return func.functional_call(net, params, (x,)).float().square().mean()

    if order == "grad-remat":
        return func.grad(transform(loss))(params, x)
    if order == "remat-grad":
        return transform(func.grad(loss))(params, x)
    return func.vmap(func.grad(transform(loss)), in_dims=(None, 0))(params, x)


# --- inference mode -------------------------------------------------------------------------------


@same_as_eager
def test_inference_tensors_from_outside_are_read_and_written(transform: Transform) -> Any:
    """They have no version counter to compare."""

    with torch.inference_mode():
        state = torch.ones(3, 4)

        def f(x: Tensor) -> Tensor:
            y = (x * state).sin()
            state.mul_(0.5)
            return (y.exp() * state).cos()

        out = transform(f)(batch())
    return out, state


# --- defaults -------------------------------------------------------------------------------------


def test_a_cast_of_the_programs_own_fills_no_cache_of_autocast() -> None:
    """An entry would stay as it is when the weight is written."""

    def run(transform: Transform) -> Any:
        w, x = torch.linspace(-1, 1, 12).view(3, 4).requires_grad_(), torch.ones(2, 4)
        with torch.autocast("cpu", torch.bfloat16):
            found = [transform(lambda: w.double().norm())(), transform(lambda: w.bfloat16() * 2)()]
            with torch.no_grad():
                w.mul_(2)
            return [*found, nn.functional.linear(x, w)]

    assert_bitwise_equal(run(rematfn.remat), run(untransformed))
