# SPDX-License-Identifier: Apache-2.0
"""`torch.autograd.Function`s of the user inside `remat`: what they save, write and define."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import Transform, same_as_eager
from nesting import spell
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

Unary = Callable[[Tensor], Tensor]


class NewStyle(Function):
    """`setup_context` beside a `forward` without one, and a `vmap` that torch derives."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, power: float) -> tuple[Tensor, Tensor]:
        square = x * x
        return square * x * power, square

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, ctx.power = inputs
        out, square = output
        ctx.save_for_backward(x, square, out)
        ctx.save_for_forward(x, square, out)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, grad_square: Tensor) -> Any:
        assert ctx.needs_input_grad == (True, False)
        x, square, out = ctx.saved_tensors
        both = grad * (square * ctx.power + out / x + ctx.power * x * x)
        return both + grad_square * 2 * x, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: Any) -> Any:
        x, square, _ = ctx.saved_tensors
        return 3 * ctx.power * square * tangent, 2 * x * tangent


class OwnVmap(Function):
    """Defines the rule of `vmap` and the derivative by other functions of its own."""

    @staticmethod
    def forward(x: Tensor) -> tuple[Tensor, Tensor]:
        order = x.argsort(-1)
        return x.take_along_dim(order, -1).exp(), order

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        out, order = output
        ctx.mark_non_differentiable(order)
        ctx.save_for_backward(out, order)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> Tensor:
        out, order = ctx.saved_tensors
        return Scattered.apply(grad * out, order)

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor) -> Any:
        return OwnVmap.apply(x.movedim(in_dims[0], 0)), (0, 0)


class Scattered(Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(grad: Tensor, order: Tensor) -> Tensor:
        return torch.zeros_like(grad).scatter(-1, order, grad)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad.take_along_dim(ctx.saved_tensors[0], -1), None


class KeepsOnContext(Function):
    """Puts tensors on the context itself, as one should not: an intermediate and a list of them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.cosine = x.cos()
        ctx.powers = [x, x * x, x[1:].exp()]
        return x.sin() * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        x, square, tail = ctx.powers
        slope = grad * (ctx.cosine * x + square * 0.5)
        slope[1:] += tail
        return slope


class WritesItsInput(Function):
    """Doubles in place, and says so."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x.mul_(2)
        ctx.mark_dirty(x)
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * 2 + 0 * x


class ReturnsView(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view(2, -1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.reshape(-1)


class OnceOnly(Function):
    """Leaves autograd for its backward; keeps undefined gradients undefined."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        y = x.tanh()
        ctx.save_for_backward(y)
        rank = y.argsort()
        ctx.mark_non_differentiable(rank)
        return y, y * 3, rank

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None, other: Tensor | None, _: Any) -> Tensor | None:
        (y,) = ctx.saved_tensors
        terms = [g * w for g, w in ((grad, 1), (other, 3)) if g is not None]
        return sum(terms) * (1 - y * y) if terms else None  # type: ignore[return-value]


class PassesOn(Function):
    """Returns its input as it is, and reads in the backward what the forward left on a tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.x = x
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad + ctx.x.sin()


def middle(f: Unary) -> Unary:
    """Put `f` between operators of its own level, so that what it gets and gives can go."""
    return lambda x: f((x * x).exp()).sin() * x.sum()


def writing(x: Tensor) -> Tensor:
    y, z = x.sin(), x.cos()
    w = z + y
    WritesItsInput.apply(y[2:4])
    return WritesItsInput.apply(z) * y + w


FUNCTIONS: dict[str, Unary] = {
    "new-style": lambda x: sum(NewStyle.apply(x, 1.5)),
    "own-vmap": lambda x: OwnVmap.apply(x)[0] * OwnVmap.apply(x.sin())[1],
    "keeps-on-context": KeepsOnContext.apply,
    "writes-its-input": writing,
    "returns-view": lambda x: (ReturnsView.apply(x) * x[:3]).view(-1),
    "once-only": lambda x: OnceOnly.apply(x)[0] + OnceOnly.apply(x)[1].sin(),
    "passes-on": lambda x: PassesOn.apply(PassesOn.apply(x.sin()).exp()),
}
TWICE = ["new-style", "own-vmap", "returns-view"]
SEPARATE = ["new-style", "own-vmap"]  # with setup_context, as torch.func demands


def start() -> Tensor:
    return torch.linspace(0.3, 1.1, 6)


@pytest.mark.parametrize("f", FUNCTIONS.values(), ids=FUNCTIONS.keys())
@same_as_eager
def test_a_backward_pass_reads_what_was_saved(transform: Transform, f: Unary) -> Any:
    x = start().requires_grad_()
    y = transform(middle(f))(x)
    y.sum().backward()
    return y, x.grad


@pytest.mark.parametrize("name", TWICE)
@same_as_eager
def test_a_second_derivative(transform: Transform, name: str) -> Any:
    x = start().requires_grad_()
    (first,) = torch.autograd.grad(
        transform(middle(FUNCTIONS[name]))(x).sum(), x, create_graph=True
    )
    first.square().sum().backward()
    return first, x.grad


WORDS = [
    *("grad-remat", "remat-grad", "grad-remat-grad", "vmap-remat", "remat-vmap"),
    *("vmap-grad-remat", "remat-vmap-grad", "grad-remat-vmap", "jacrev-remat", "remat-jacrev"),
]
FORWARD_WORDS = ["jvp-remat", "remat-jvp", "jacfwd-remat", "remat-jacfwd-vmap"]


def spelt(word: str, name: str, transform: Transform) -> Any:
    f = spell(tuple(word.split("-")), middle(FUNCTIONS[name]), {"remat": transform})
    return f(start().view(2, 3))


@pytest.mark.parametrize("name", SEPARATE)
@pytest.mark.parametrize("word", WORDS)
@same_as_eager
def test_functions_under_transforms(transform: Transform, word: str, name: str) -> Any:
    return spelt(word, name, transform)


@pytest.mark.parametrize("word", FORWARD_WORDS)
@same_as_eager
def test_functions_with_a_jvp_under_forward_transforms(transform: Transform, word: str) -> Any:
    return spelt(word, "new-style", transform)


@pytest.mark.parametrize("where", ["forward", "backward"])
@same_as_eager
def test_a_function_may_transform(transform: Transform, where: str) -> Any:
    """`remat` inside of a Function, in the way that a library would use it."""

    inner = transform(lambda x: (x.sin() * x).exp().cos())

    class Uses(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            out = inner(x) if where == "forward" else x.exp()
            ctx.save_for_backward(x, out)
            return out

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            x, out = ctx.saved_tensors
            return grad * (inner(x) if where == "backward" else x) * out

    x = start().requires_grad_()
    y = Uses.apply(x.sin()).exp()
    y.sum().backward()
    return y, x.grad
