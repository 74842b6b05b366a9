# SPDX-License-Identifier: Apache-2.0
"""Operators that users define, before a level is active and while one is, are governed alike."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import Transform, assert_same_as_eager, same_as_eager
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import rematfn
from rematfn.testing import EvictEverything

NAMESPACE = "rematfn_tests"
_numbers = itertools.count()


def fresh_name() -> str:
    """Return an operator name of its own: definitions last as long as the process."""
    return f"operator_{next(_numbers)}"


def wave_setup(ctx: Any, inputs: Any, output: Tensor) -> None:
    x, ctx.scale = inputs
    ctx.save_for_backward(x)


def wave_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    (x,) = ctx.saved_tensors
    return grad * (x * ctx.scale).cos() * ctx.scale, None


def define_wave(with_fake: bool) -> Callable[..., Tensor]:
    """Define a differentiable operator."""

    @torch.library.custom_op(f"{NAMESPACE}::{fresh_name()}", mutates_args=())
    def wave(x: Tensor, scale: float) -> Tensor:
        return (x * scale).sin()

    if with_fake:
        wave.register_fake(lambda x, scale: torch.empty_like(x))

    wave.register_autograd(wave_backward, setup_context=wave_setup)
    return wave


@pytest.mark.parametrize("with_fake", [True, False], ids=["with-fake", "without-fake"])
@pytest.mark.parametrize("when", ["before", "inside"])
@same_as_eager
def test_a_python_operator_is_replayed_and_differentiated(
    transform: Transform, when: str, with_fake: bool
) -> Any:
    wave = define_wave(with_fake) if when == "before" else None

    def f(x: Tensor) -> Tensor:
        used = wave or define_wave(with_fake)
        y = used(x.exp(), 2.0)
        return (used(y * x, 3.0) * y).cos()

    x = torch.linspace(-1, 1, 12, requires_grad=True)
    out = transform(f)(x)
    (first,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    return out, first, second


class Doubled(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {})) * 2


def in_mode(x: Tensor) -> Tensor:
    with Doubled():
        return x.sin()


TRANSFORMING = {
    "mode": in_mode,
    "functionalize": torch.func.functionalize(lambda x: x.clone().mul_(2)),
    "vmap": torch.vmap(lambda row: torch.where(torch.arange(6) >= row, row, row.sum())),
    "grad": torch.func.grad(lambda x: x.sin().square().sum()),
    "jvp": lambda x: torch.func.jvp(torch.sin, (x,), (x,))[1],
    "compiled": torch.compile(lambda x: x.sin() * 2, backend="aot_eager"),
}


@pytest.mark.parametrize("around", ["nothing", "vmap", "grad"])
@pytest.mark.parametrize("kind", TRANSFORMING)
@same_as_eager
def test_a_kernel_that_transforms(transform: Transform, kind: str, around: str) -> Any:
    """Its replay, too, wherever that comes: Note [A kernel may be Python]."""
    operator = torch.library.custom_op(
        f"{NAMESPACE}::{fresh_name()}",
        TRANSFORMING[kind],
        mutates_args=(),
        schema="(Tensor x) -> Tensor",
    )
    operator.register_fake(torch.empty_like)
    operator.register_vmap(lambda info, dims, x: (torch.stack([*map(operator, x)]), 0))

    def f(x: Tensor) -> Tensor:
        y = operator(x.detach().sin())
        return y.exp() * y * x

    g, x = transform(f), torch.linspace(-1, 1, 72).view(2, 6, 6)
    if around == "vmap":
        return torch.vmap(g)(x)
    if around == "grad":
        return torch.func.grad(lambda x: g(x[0]).sum())(x)
    return g(x[0])


@pytest.mark.parametrize("tags", [(torch.Tag.nondeterministic_seeded,), ()], ids=str)
@same_as_eager
def test_an_operator_that_draws_numbers_draws_them_again(transform: Transform, tags: Any) -> Any:
    """Tagged or not: see Note [Whether an untagged operator draws is observed]."""

    @torch.library.custom_op(f"{NAMESPACE}::{fresh_name()}", mutates_args=(), tags=tags)
    def jitter(x: Tensor) -> Tensor:
        return x + torch.rand_like(x) * torch.randn(())  # every other one is at hand already

    @torch.library.custom_op(f"{NAMESPACE}::{fresh_name()}", mutates_args={"x"}, tags=tags)
    def scale_(x: Tensor) -> None:
        x.mul_(torch.randn(()))

    jitter.register_fake(torch.empty_like)
    torch.manual_seed(7)

    def f(x: Tensor) -> Tensor:
        y = jitter(x.sin()) * jitter(x)
        scale_(y)
        return (y.cos() + y) * torch.rand(12)

    return transform(f)(torch.linspace(-1, 1, 12)), torch.rand(3)


def test_an_operator_that_writes_to_a_list() -> None:
    def kernel(xs: list[Tensor], y: Tensor) -> None:
        for x in xs:
            x.mul_(y)

    name = f"{NAMESPACE}::{fresh_name()}"
    schema = "(Tensor(a!)[] xs, Tensor y) -> ()"
    multiply_ = torch.library.custom_op(name, kernel, mutates_args={"xs"}, schema=schema)

    def f(x: Tensor, kept: Tensor) -> Any:
        xs = [x.sin(), x.cos()]
        view = xs[0][3:]
        before = [x + 1 for x in xs]
        multiply_([*xs, kept], x.exp())  # one of them from outside: once
        middle = [x + 1 for x in xs]
        multiply_([view, xs[1][3:]], xs[1][:9].clone())
        return xs, view.cos(), before, middle, [x + 1 for x in xs]

    def run(transform: Transform) -> Any:
        x, kept = torch.linspace(-1, 1, 12), torch.ones(12)
        return transform(f)(x, kept), x, kept

    with torch.no_grad():
        assert_same_as_eager(run)


KERNELS: dict[str, tuple[str, Callable[..., Any], str]] = {
    "cpu": ("(Tensor x) -> Tensor", lambda x: x * 2, "CPU"),
    "composite-implicit": (
        "(Tensor x) -> Tensor",
        lambda x: x.sin() * x,
        "CompositeImplicitAutograd",
    ),
    "composite-explicit": (
        "(Tensor x) -> Tensor",
        lambda x: x.sin() * x,
        "CompositeExplicitAutograd",
    ),
    "list": ("(Tensor x) -> Tensor[]", lambda x: [x * 2, x.sin()], "CPU"),
    "several": ("(Tensor x) -> (Tensor, int, Tensor)", lambda x: (x * 2, 3, x.sin()), "CPU"),
    "writing": ("(Tensor(a!) x) -> Tensor(a!)", lambda x: x.mul_(2), "CPU"),
    "view": ("(Tensor(a) x) -> Tensor(a)", lambda x: x.view(3, -1), "CPU"),
}


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS.keys())
@pytest.mark.parametrize("when", ["before", "inside"])
def test_operators_of_a_library(kernel: tuple[str, Callable[..., Any], str], when: str) -> None:
    """The older way to define operators, which says which dispatch key a kernel is for."""
    schema, function, key = kernel
    libraries = []

    def define() -> Any:
        name = fresh_name()
        library = torch.library.Library(NAMESPACE, "FRAGMENT")
        libraries.append(library)  # its operators go when it goes
        library.define(name + schema)
        library.impl(name, function, key)
        return getattr(getattr(torch.ops, NAMESPACE), name).default

    def run(transform: Transform) -> Any:
        operator = define() if when == "before" else None

        def f(x: Tensor) -> Any:
            used = operator or define()
            y = x.exp()
            old = y + 1
            found = used(y)
            again = used(y.clone())
            return found, again, old * 2, y.cos()

        with torch.no_grad():
            return transform(f)(torch.linspace(-1, 1, 12))

    assert_same_as_eager(run)


def test_what_was_known_of_an_operator_goes_with_it() -> None:
    """An operator that takes the address of one that is gone takes none of its sizes."""

    def need(schema: str, kernel: Callable[..., Any]) -> int | None:
        name = fresh_name()
        library = torch.library.Library(NAMESPACE, "FRAGMENT")
        library.define(name + schema)
        library.impl(name, kernel, "CPU")
        operator = getattr(getattr(torch.ops, NAMESPACE), name).default
        g = rematfn.remat(operator, budget=1 << 30)
        g(torch.ones(12))
        library._destroy()
        return rematfn.stats(g).min_budget

    writes = "(Tensor(a!) x) -> Tensor(a!)", lambda x: x.mul_(2)
    makes = "(Tensor x) -> Tensor", lambda x: x.new_ones(1000)
    first = need(*writes), need(*makes)
    assert first[0] != first[1]
    assert [(need(*writes), need(*makes)) for _ in range(30)] == [first] * 30


@torch.library.custom_op(f"{NAMESPACE}::scaled_like", mutates_args=())
def scaled_like(x: Tensor) -> Tensor:
    return x * 2


def test_an_operator_named_like_reads_what_it_is_given() -> None:
    """What reads a shape alone among torch's own, is known by name; others may read anything."""
    x, w = torch.ones(8, requires_grad=True), torch.linspace(0, 1, 8)
    f = rematfn.remat(lambda x, w: (scaled_like(w) + x).sin().sum(), policy=EvictEverything())
    loss = f(x, w)
    w.mul_(0.5)
    with pytest.raises(rematfn.ReplayError, match="was overwritten"):
        loss.backward()
