# SPDX-License-Identifier: Apache-2.0
"""Compiled functions inside of `remat`, and `remat` inside of compiled functions."""

import functools
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from helpers import (
    EACH,
    EVERY,
    EVERYTHING,
    EXHAUSTIVE,
    PLAIN,
    Mode,
    Transform,
    assert_bitwise_equal,
    assert_same_as_eager,
    doubling,
    same_as_eager,
    untransformed,
)
from processes import in_a_process
from torch import Tensor, nn

import rematfn
from rematfn import _C

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # torch's compiler warns about torch
    pytest.mark.usefixtures("nothing_compiled"),
]


def body(x: Tensor, w: Tensor) -> Tensor:
    y = (x @ w).sin()
    z = y.exp() * x
    return (z @ w.t()).cos() + z[:1]


class Called(nn.Module):
    def __init__(self, f: Transform) -> None:
        super().__init__()
        self.f = f

    def forward(self, *args: Any) -> Any:
        return self.f(*args)


def leaves() -> tuple[Tensor, Tensor]:
    x = torch.linspace(0.2, 1.1, 16).view(4, 4)
    return x.requires_grad_(), x.detach().cos().requires_grad_()


def opaque(backend: str) -> Any:
    """Compile `body`, for the oracle too: compiled code may differ from eager in the last bits."""
    return rematfn.opaque(torch.compile(body, backend=backend))


@pytest.mark.parametrize(
    ("backend", "mode"),
    [("eager", EACH), ("aot_eager", EACH), *([("inductor", EVERY)] if EXHAUSTIVE else [])],
    ids=lambda p: getattr(p, "name", p),
)
def test_a_compiled_function_inside(backend: str, mode: Mode) -> None:
    """Evicted arguments become resident, in the forward and in the backward pass."""
    compiled = opaque(backend)

    def run(transform: Transform) -> Any:
        x, w = leaves()

        def f(x: Tensor, w: Tensor) -> Tensor:
            return compiled(x.sin(), w.exp()).exp() * compiled(x.cos(), w)

        out = transform(f)(x, w)
        out.sum().backward()
        return out, x.grad, w.grad

    assert_same_as_eager(run, mode)


@same_as_eager
def test_opaque_code_may_take_addresses(transform: Transform) -> Any:
    root = rematfn.opaque(lambda x: torch.from_numpy(x.numpy() ** 0.5))
    return transform(lambda x: root(x.exp()) * root(x.sin()))(leaves()[0].detach())


def test_another_thread_makes_no_node_of_its_argument_opaque() -> None:
    """It has made no node yet, so that all of this thread's have higher numbers than its first."""
    seen: list[bool] = []
    twice = doubling(lambda gradient, doubled: seen.append(_C.has_key(doubled)))

    def f(x: Tensor) -> Tensor:
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(rematfn.opaque(torch.cos), twice(x.sin())).result().sum()

    rematfn.remat(f)(torch.linspace(0, 1, 100).requires_grad_()).backward()
    assert seen == [True]


def test_what_writes_into_an_argument_is_opaque_too() -> None:
    seen: list[bool] = []

    class Scale(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, a: Tensor, y: Tensor) -> Tensor:
            ctx.save_for_backward(y)
            ctx.mark_dirty(a)
            return a.mul_(y)

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
            (y,) = ctx.saved_tensors
            scaled = gradient * y
            seen.append(_C.has_key(scaled))
            return scaled, None

    a = torch.ones(100, requires_grad=True) * 1

    def f(x: Tensor) -> Tensor:
        rematfn.opaque(Scale.apply)(a, x.sin())
        return a.sum()

    EVERYTHING(f)(torch.linspace(0, 1, 100)).backward()
    assert seen == [False]


def test_arguments_that_do_not_fit_together_are_refused() -> None:
    add = rematfn.opaque(lambda *tensors: torch.from_numpy(sum(t.numpy() for t in tensors)))
    x = leaves()[0].detach()
    with pytest.raises(rematfn.BudgetError, match="a function made opaque"):
        rematfn.remat(lambda x: add(x.sin(), x.cos(), x.exp(), x.tan()), budget=3 * x.nbytes)(x)
    assert _C.stack_depth() == 0


@pytest.mark.parametrize("mode", [PLAIN, EVERY], ids=lambda mode: mode.name)
def test_a_compiled_function_around_breaks_its_graph(mode: Mode) -> None:
    from torch._dynamo.testing import CompileCounter

    def run(transform: Transform) -> Any:
        inner = transform(body)
        x, w = leaves()
        counter = CompileCounter()

        @torch.compile(backend=counter)
        def outer(x: Tensor, w: Tensor) -> Tensor:
            y = x * 2
            return inner(y, w) + y

        out = outer(x, w)
        out.sum().backward()
        if transform in (rematfn.remat, EVERYTHING):
            assert counter.frame_count == 2, "before and after; nothing under the level"
        return out, x.grad, w.grad

    assert_same_as_eager(run, mode)


@functools.partial(in_a_process, modules=())
def test_a_first_compilation_in_the_middle_of_a_call_is_seen() -> None:
    """So are those after a reset, which forgets who listens."""
    assert "torch._dynamo" not in sys.modules
    x = torch.linspace(0.2, 1.1, 36).view(6, 6)

    def f(x: Tensor, **how: Any) -> Tensor:
        if "torch._dynamo" in sys.modules:
            torch._dynamo.reset()
        y: Tensor = torch.compile(lambda x: (x @ x.sin()).exp(), **how)(x.cos())
        return y * 2

    ours = {"backend": "rematfn", "options": {"inner": "aot_eager"}}
    g = rematfn.remat(f, 12 * x.nbytes)
    for _ in range(3):
        assert_bitwise_equal(g(x, **ours), f(x, **ours))
        assert rematfn.stats(g).operators == 3  # what is compiled makes little, and is one
        with pytest.raises(Exception, match=r'backend="aot_eager"\) inside of remat'):
            rematfn.remat(f)(x, backend="aot_eager")


def test_compiled_autograd_of_a_backward_is_refused() -> None:
    x = leaves()[0]
    out = rematfn.remat(lambda x: x.sin().exp())(x).sum()
    with (
        torch._dynamo.compiled_autograd._enable(lambda gm: torch.compile(gm, backend="eager")),
        pytest.raises(NotImplementedError, match=r"compiled_autograd off for this backward"),
    ):
        out.backward()


def test_a_full_graph_around_is_refused_with_the_reason() -> None:
    compiled = torch.compile(lambda x: rematfn.remat(torch.sin)(x) * 2, fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="remat runs its function eagerly"):
        compiled(torch.ones(3))
    assert _C.stack_depth() == 0


@pytest.mark.filterwarnings("error:Dynamo")
@pytest.mark.parametrize(
    "way",
    [
        lambda f: rematfn.remat(f, "1MiB"),
        rematfn.offload,
        lambda f: functools.partial(rematfn.checkpoint, f),
        lambda f: rematfn.remat(Called(f), "1MiB"),
    ],
    ids=["remat", "offload", "checkpoint", "module"],
)
def test_what_is_transformed_may_be_compiled_itself(way: Transform) -> None:
    """There is nothing around it whose graph could break; it runs as it is."""
    from torch._dynamo.testing import CompileCounter

    def run(transform: Transform) -> Any:
        x, w = leaves()
        counter = CompileCounter()
        compiled = torch.compile(transform(body), backend=counter)
        for _ in range(2):
            out = compiled(x, w)
            out.sum().backward()
        assert counter.frame_count == (0 if transform is way else 1)
        return out, x.grad, w.grad

    assert_bitwise_equal(run(way), run(untransformed))
