# SPDX-License-Identifier: Apache-2.0
"""What counts towards a budget: rows of the table in docs/design/budget.md.

The oracle is the allocator: a row that counts is in both figures, one that does not is in the
allocator's alone, and is what the caller holds or has made.
"""

import functools
from collections.abc import Callable
from typing import Any

import optree
import pytest
import torch
from helpers import Transform, assert_bitwise_equal, assert_nothing_keyed, kept, untransformed
from torch import Tensor
from torch.func import grad, hessian, jacfwd, jacrev, vjp, vmap

import rematfn
from rematfn.testing import MemoryTimeline

N = 64
UNIT = 4 * N * N  # bytes of a matrix
WEIGHTS = [torch.linspace(-k, k, N * N).view(N, N).sin() / 8 for k in range(1, 7)]
X = torch.linspace(-1, 1, 32 * N).view(32, N)
Z = X[0].clone()
ONE = torch.ones(())
NUMBERS = 16  # bytes at most: a loss and its gradient are the caller's


def exponential(x: Tensor) -> Tensor:
    return torch.matrix_exp(x).sum()


def sines(x: Tensor) -> Tensor:
    """Each backward begins with the cosine of an argument."""
    return sum((x[k].sin().sum() for k in range(len(x))), start=ONE)


@pytest.mark.parametrize("f", [exponential, sines])
def test_what_a_backward_makes_of_arguments_alone_counts(f: Callable[[Tensor], Tensor]) -> None:
    """The backward of matrix_exp works on a block matrix of its own, four times as large."""
    x = torch.linspace(-1, 1, 8 * 16 * 16).view(8, 16, 16).requires_grad_()
    g = rematfn.remat(f, 1 << 30)
    with MemoryTimeline() as timeline:
        g(x).backward(ONE)
    assert timeline.peak_excluding_survivors <= rematfn.stats(g).peak_bytes + NUMBERS
    expected, x.grad = x.grad, None
    assert expected is not None
    budget = rematfn.stats(g).peak_bytes
    again = rematfn.remat(f, budget)
    with MemoryTimeline() as timeline:
        again(x).backward(ONE)
    assert timeline.peak_excluding_survivors <= budget + NUMBERS
    assert torch.equal(x.grad, expected)
    assert rematfn.stats(again).resident_bytes == 0


def leaf() -> Tensor:
    return torch.linspace(-1, 1, N * N).view(N, N).requires_grad_()


def test_the_gradient_that_enters_may_be_recorded() -> None:
    """The zeros and ones that a mean's backward makes are as large as the mean's input."""
    x = leaf()
    g = rematfn.remat(lambda x: x.sin().mean(), 5 * UNIT)
    entering = torch.ones((), requires_grad=True)
    with MemoryTimeline() as timeline:
        (gradient,) = torch.autograd.grad(g(x), x, entering, create_graph=True)
    assert timeline.peak <= rematfn.stats(g).peak_bytes + NUMBERS
    assert torch.equal(gradient, torch.autograd.grad(x.sin().mean(), x)[0])
    (second,) = torch.autograd.grad(gradient.sum(), x)
    (expected,) = torch.autograd.grad(
        torch.autograd.grad(x.sin().mean(), x, create_graph=True)[0].sum(), x
    )
    assert torch.equal(second, expected)


def test_a_node_after_the_level_is_nobodys() -> None:
    """What is made behind the level's region is the caller's.

    See Note [The operators of a node are its level's].
    """
    x = leaf()
    g = rematfn.remat(lambda x: (x.sin() * x).sum(), 1 << 30)
    made: list[Tensor] = []
    before = x * 1
    before.register_hook(lambda gradient: made.append(x.detach().cos()))
    loss = g(before)
    loss.backward(ONE)
    assert_nothing_keyed(made)
    assert rematfn.stats(g).resident_bytes == 0


# --- whatever transforms are around it ------------------------------------------------------------


def loss(weights: list[Tensor], x: Tensor) -> Tensor:
    for w in weights:
        x = (x @ w).tanh()
    return x.square().mean()


def layer(z: Tensor) -> Tensor:
    return ((z @ WEIGHTS[0]).sin() @ WEIGHTS[1]).tanh()


def energy(z: Tensor) -> Tensor:
    return layer(z).square().sum()


def backward(t: Transform) -> list[Tensor | None]:
    leaves = [w.clone().requires_grad_() for w in WEIGHTS]
    g = t(lambda x: loss(leaves, x))
    g(X).backward(ONE)
    return [w.grad for w in leaves]


STEPS: dict[str, tuple[int, Callable[[Transform], Any]]] = {
    # What the caller makes and drops again (a basis of the Jacobian's), and the step.
    "grad(remat(f))": (NUMBERS, lambda t: grad(t(loss))(WEIGHTS, X)),
    "remat(grad(f))": (0, lambda t: t(grad(loss))(WEIGHTS, X)),
    "backward": (6 * UNIT + NUMBERS, backward),
    "vjp(remat(f))": (NUMBERS, lambda t: vjp(t(loss), WEIGHTS, X)[1](ONE)),
    "remat(vjp(f))": (0, lambda t: t(lambda w, x: vjp(loss, w, x)[1](ONE))(WEIGHTS, X)),
    "jacrev(remat(f))": (UNIT + 4 * N, lambda t: jacrev(t(layer))(Z)),
    "remat(jacrev(f))": (0, lambda t: t(jacrev(layer))(Z)),
    "jacfwd(remat(f))": (UNIT, lambda t: jacfwd(t(layer))(Z)),
    "remat(jacfwd(f))": (0, lambda t: t(jacfwd(layer))(Z)),
    "hessian(remat(f))": (UNIT + 4 * N + NUMBERS, lambda t: hessian(t(energy))(Z)),
    "remat(hessian(f))": (0, lambda t: t(hessian(energy))(Z)),
    "vmap(grad(remat(f)))": (2 * 4 * len(X), lambda t: vmap(grad(t(energy)))(X)),
    "remat(vmap(grad(f)))": (0, lambda t: t(vmap(grad(energy)))(X)),
}


@pytest.mark.parametrize(
    "policy", [rematfn.policies.ON(), rematfn.testing.EvictEverything()], ids=str
)
@pytest.mark.parametrize("name", STEPS)
def test_the_peak_without_what_the_caller_holds_is_within_the_budget(
    name: str, policy: rematfn.policies.Policy
) -> None:
    made_by_caller, step = STEPS[name]
    expected = step(untransformed)
    capped, made = kept(functools.partial(rematfn.remat, budget=1 << 30, policy=policy))
    step(capped)
    most = rematfn.stats(made[-1]).peak_bytes
    fits = 0
    for fraction in (1.0, 0.7, 0.5):
        budget = int(fraction * most)
        capped, made = kept(functools.partial(rematfn.remat, budget=budget, policy=policy))
        try:
            with MemoryTimeline() as timeline:
                results = step(capped)
        except rematfn.BudgetError:
            assert timeline.peak <= budget + made_by_caller + sum(
                t.nbytes for t in optree.tree_leaves(expected)
            )
            continue
        fits += 1
        assert_bitwise_equal(results, expected)
        assert timeline.peak_excluding_survivors <= budget + made_by_caller
        assert rematfn.stats(made[-1]).peak_bytes <= budget
        assert rematfn.stats(made[-1]).resident_bytes == 0
    assert fits
