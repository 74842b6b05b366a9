# SPDX-License-Identifier: Apache-2.0
"""The transforms that `remat` is nested with, as letters; words of them, and a program for each.

A word such as `grad-remat-vmap` reads from the outside in: `grad(remat(vmap(f)))`.
"""

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import torch
from helpers import Transform, scalar, weighted
from torch import Tensor, func, nn

Function = Callable[[Tensor], Tensor]
Word = tuple[str, ...]


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


def spell(word: Word, f: Function, ways: Mapping[str, Transform]) -> Function:
    for letter in reversed(word):
        f = (ways.get(letter) or LETTERS[letter])(f)
    return f


def program_of(word: Word, **ways: Transform) -> Callable[[Transform], Any]:
    """Return the program that a word spells; its argument is what `remat` in it stands for.

    `ways` has what other words stand for that are not among the letters.
    """

    def run(transform: Transform) -> Any:
        spelt = {"remat": transform, **ways}
        generator = torch.Generator().manual_seed(4)
        x, w = (torch.randn(*shape, generator=generator) for shape in ((3,), (3, 3)))
        if "linearize" in word:  # it fails on captured tensors that require gradients
            return spell(word, lambda x: base(x, w), spelt)(x), x, w
        w.requires_grad_()  # closed over by every level
        f = base if any(pair in WRITELESS for pair in neighbours(word)) else writing
        out = spell(word, lambda x: f(x, w), spelt)(x)
        (grad,) = torch.autograd.grad(scalar(out), w)
        return out, grad, x, w

    return run


def neighbours(word: Word) -> list[tuple[str, str]]:
    """Return the pairs (outer, inner) of a word, with what is none of the letters left out."""
    return list(pairwise(letter for letter in word if letter in LETTERS))


def possible(word: Word) -> bool:
    return not any(pair in REFUSED or pair in GARBAGE for pair in neighbours(word))
