# SPDX-License-Identifier: Apache-2.0
"""`remat` commutes with the transforms of torch.func: every word of up to three of them.

A word such as `grad-remat-vmap` reads from the outside in: `grad(remat(vmap(f)))`. Its oracle is
the same word with `remat` left out.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise, product
from typing import Any

import pytest
import torch
from helpers import (
    EVERY,
    SNUG,
    Mode,
    Transform,
    assert_same_as_eager,
    scalar,
    untransformed,
    weighted,
)
from torch import Tensor, func, nn

Function = Callable[[Tensor], Tensor]


def total(f: Function) -> Function:
    """Return `f` reduced to a number, weighted so that no two elements count alike."""
    return lambda x: weighted(f(x))


def direction(x: Tensor) -> Tensor:
    return torch.linspace(-1.0, 1.0, x.numel()).view(x.shape).cos()


def pulled_back(f: Function) -> Function:
    def vjp(x: Tensor) -> Tensor:
        y, pull = func.vjp(f, x)
        return pull(direction(y))[0] + y.sum()

    return vjp


def pushed_forward(f: Function) -> Function:
    def jvp(x: Tensor) -> Tensor:
        y, tangent = func.jvp(f, (x,), (direction(x),))
        return y * tangent

    return jvp


def linearized(f: Function) -> Function:
    def linear(x: Tensor) -> Tensor:
        y, push = func.linearize(f, x)
        return y + push(direction(x))

    return linear


def batched(f: Function) -> Function:
    return lambda x: func.vmap(f)(torch.stack([x, x * 2]))


class Scaled(nn.Module):
    def __init__(self, f: Function) -> None:
        super().__init__()
        self.f = f
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.f(x * self.scale)


def called_functionally(f: Function) -> Function:
    module = Scaled(f)
    return lambda x: func.functional_call(module, {"scale": x.mean() + 1}, (x,))


LETTERS: dict[str, Callable[[Function], Function]] = {
    "grad": lambda f: func.grad(total(f)),
    "vjp": pulled_back,
    "jvp": pushed_forward,
    "vmap": batched,
    "jacrev": func.jacrev,
    "jacfwd": func.jacfwd,
    "hessian": lambda f: func.hessian(total(f)),
    "linearize": linearized,
    "functional_call": called_functionally,
    "functionalize": func.functionalize,
}
WORDS = [w for n in (1, 2, 3) for w in product(["remat", *LETTERS], repeat=n) if "remat" in w]

# Pairs that torch itself cannot nest (outer, inner), with remat left out.
FORWARD = ("jvp", "jacfwd", "hessian", "linearize")
NESTED = "torch: Nested forward mode AD is not supported at the moment"
REFUSED = {(letter, "linearize"): NESTED for letter in FORWARD}
REFUSED |= {("linearize", letter): NESTED for letter in FORWARD}
REFUSED[("vmap", "linearize")] = "torch: Batching rule not implemented for aten::_make_dual"
REFUSED[("functionalize", "functionalize")] = "torch: .*isFunctionalTensor.* INTERNAL ASSERT FAILED"
# Here torch raises nothing, but reads the constants it folded before they are filled.
GARBAGE = {(letter, "linearize") for letter in ("grad", "vjp", "jacrev")}
# Here torch does not know the derivative or the batching rule of what a write becomes.
WRITELESS = {("functionalize", letter) for letter in ("grad", "vjp", "jvp", "jacrev", *FORWARD)}
WRITELESS |= {(letter, "functionalize") for letter in ("vmap", "jacrev", "jacfwd", "hessian")}


def base(x: Tensor, w: Tensor) -> Tensor:
    """A matrix product, a scan, a softmax and a view, of any leading shape."""
    y = torch.tanh(x @ w)
    z = (y * x.exp()).cumsum(-1)
    return z.softmax(-1).sin() * y + z[..., :1]


def writing(x: Tensor, w: Tensor) -> Tensor:
    """Writes in place, which linearize folds into its constants wrongly."""
    y = torch.tanh(x @ w)
    z = y * x.exp()
    z.mul_(y)[..., 1:].add_(y[..., :1])
    return z.cumsum(-1) * y


def spell(word: tuple[str, ...], f: Function, transform: Transform) -> Function:
    for letter in reversed(word):
        f = transform(f) if letter == "remat" else LETTERS[letter](f)
    return f


def program_of(word: tuple[str, ...]) -> Callable[[Transform], Any]:
    def run(transform: Transform) -> Any:
        generator = torch.Generator().manual_seed(4)
        x, w = (torch.randn(*shape, generator=generator) for shape in ((3,), (3, 3)))
        if "linearize" in word:  # it fails on captured tensors that require gradients
            return spell(word, lambda x: base(x, w), transform)(x), x, w
        w.requires_grad_()  # closed over by every level
        f = base if any(pair in WRITELESS for pair in neighbours(word)) else writing
        out = spell(word, lambda x: f(x, w), transform)(x)
        (grad,) = torch.autograd.grad(scalar(out), w)
        return out, grad, x, w

    return run


def neighbours(word: tuple[str, ...]) -> list[tuple[str, str]]:
    """Return the pairs (outer, inner) of a word, with remat left out."""
    return list(pairwise(letter for letter in word if letter != "remat"))


def possible(word: tuple[str, ...]) -> bool:
    return not any(pair in REFUSED or pair in GARBAGE for pair in neighbours(word))


# linearize builds an fx graph, and fx warns about the constants that linearize itself puts in it.
@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node:UserWarning")
@pytest.mark.parametrize("word", [w for w in WORDS if possible(w)], ids="-".join)
@pytest.mark.parametrize("mode", [EVERY, SNUG], ids=lambda mode: mode.name)
def test_a_word_with_remat_equals_the_word_without(word: tuple[str, ...], mode: Mode) -> None:
    assert_same_as_eager(program_of(word), mode)


@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node:UserWarning")
@pytest.mark.parametrize("pair", REFUSED, ids="-".join)
def test_torch_itself_refuses_the_pair(pair: tuple[str, str]) -> None:
    with pytest.raises(RuntimeError, match=REFUSED[pair].removeprefix("torch: ")):
        program_of(pair)(untransformed)


@pytest.mark.parametrize("randomness", ["same", "different"])
@pytest.mark.parametrize(
    "order", ["remat-vmap", "vmap-remat", "remat-vmap-grad", "vmap-remat-grad"]
)
def test_dropout_under_vmap_draws_what_eager_draws(order: str, randomness: str, mode: Mode) -> None:
    def f(x: Tensor) -> Tensor:
        # With "same", torch draws only for what is not batched.
        y = x.sin() if randomness == "different" else torch.ones(3)
        return (nn.functional.dropout(y, 0.4) * x.cos() * torch.rand(3)).exp()

    letters = {
        "vmap": lambda f: func.vmap(f, randomness=randomness),
        "grad": lambda f: func.grad(total(f)),
    }

    def run(transform: Transform) -> Any:
        g: Function = f
        for letter in reversed(order.split("-")):
            g = (letters | {"remat": transform})[letter](g)
        torch.manual_seed(7)
        return g(torch.linspace(-1, 1, 12).view(4, 3)), torch.rand(2)

    assert_same_as_eager(run, mode)


def test_axes_and_auxiliary_outputs_pass_through(mode: Mode) -> None:
    """The arguments that transforms take about their own inputs and outputs."""

    def run(transform: Transform) -> Any:
        torch.manual_seed(3)
        x, w = torch.randn(3, 4), torch.randn(4)
        f = transform(lambda x, w: ((x * w).sin().prod(0), {"aux": x.exp() * w}))
        one = func.vmap(f, in_dims=(1, 0), out_dims=(0, {"aux": -1}))
        g = transform(lambda x, w: ((x @ w).sin().sum(), (x.cos(), x.exp())))
        two = func.grad(g, argnums=(0, 1), has_aux=True)
        three = func.vmap(func.vmap(transform(torch.atan2), (0, None)), (None, 0))
        four = func.grad_and_value(lambda x: g(x, w)[0])
        loss, pull, aux = func.vjp(lambda w: g(x, w), w, has_aux=True)
        found = [one(x, w), two(x, w), three(x[0], w), four(x)]
        return found, loss, pull(torch.ones(())), aux

    assert_same_as_eager(run, mode)


def test_an_ensemble_of_modules_is_trained_at_once(mode: Mode) -> None:
    """The idiom of torch.func: vmap over stacked parameters, of a gradient of a functional call."""

    def run(transform: Transform) -> Any:
        torch.manual_seed(3)
        nets = [nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)) for _ in range(3)]
        params, buffers = func.stack_module_state(nets)  # type: ignore[arg-type]

        def loss(params: Any, buffers: Any, x: Tensor) -> Tensor:
            return func.functional_call(nets[0], (params, buffers), (x,)).square().mean()

        step = func.vmap(func.grad(transform(loss)), in_dims=(0, 0, None))
        return step(params, buffers, torch.randn(6, 3))

    assert_same_as_eager(run, mode)
