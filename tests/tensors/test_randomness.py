# SPDX-License-Identifier: Apache-2.0
"""Drawn numbers: replays draw what was drawn, and every stream goes on where eager's does."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._inductor.inductor_prims
from helpers import Transform, same_as_eager
from torch import Tensor, nn

Draw = Callable[[Tensor, torch.Generator, torch.Generator], Any]


def two_generators(x: Tensor, a: torch.Generator, b: torch.Generator) -> Any:
    """Interleaved with the default one, so that each must have a state of its own."""
    y = x * torch.rand(4, 3, generator=a) + torch.randn(4, 3, generator=b)
    y = nn.functional.dropout(y, 0.4) + torch.empty(4, 3).normal_(generator=a)
    return y * torch.bernoulli(torch.full((4, 3), 0.5), generator=b), torch.randperm(4, generator=a)


def pairs_of_normals(x: Tensor, a: torch.Generator, b: torch.Generator) -> Any:
    """An odd count leaves a cached sample behind, which is part of the state."""
    one = torch.normal(0.0, 1.0, (1,), generator=a)
    three = torch.randn(3, dtype=torch.float64, generator=a)
    return x * one, three * 2, torch.randn(5, generator=a), torch.randn(17), torch.randn(1)


def seeded_inside(x: Tensor, a: torch.Generator, b: torch.Generator) -> Any:
    first = torch.rand(4, 3) * x
    torch.manual_seed(11)
    second = nn.functional.dropout(first.exp(), 0.5)
    a.manual_seed(12)
    return first, second.cos(), torch.rand(3, generator=a), torch.initial_seed(), a.initial_seed()


def forked_inside(x: Tensor, a: torch.Generator, b: torch.Generator) -> Any:
    first = torch.rand(4, 3) * x
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(11)
        inner = nn.functional.dropout(first, 0.5)
    return first.sin(), inner.exp(), torch.rand(3)


def states_read_and_set(x: Tensor, a: torch.Generator, b: torch.Generator) -> Any:
    default, own = torch.get_rng_state(), a.get_state()
    first = nn.functional.dropout(x.exp(), 0.5) + torch.rand(4, 3, generator=a)
    torch.set_rng_state(default)
    a.set_state(own)
    again = nn.functional.dropout(x.exp(), 0.5) + torch.rand(4, 3, generator=a)
    b.set_state(a.get_state())
    return first, again, torch.rand(2, generator=b), default, own


def cloned_generator(x: Tensor, a: torch.Generator, b: torch.Generator) -> Any:
    twin = a.clone_state()
    return x * torch.rand(4, 3, generator=a), x * torch.rand(4, 3, generator=twin)


def prims_that_torch_tags_in_python(
    x: Tensor, a: torch.Generator, b: torch.Generator
) -> tuple[Tensor, ...]:
    where = {"dtype": x.dtype, "device": x.device}
    seeds = torch.ops.prims.inductor_seeds(3, x.device)
    seed = torch.ops.prims.inductor_seed(x.device)
    normal = torch.ops.prims.normal([4, 3], mean=0, std=1, requires_grad=False, **where)
    return seeds * 1, seed * 1, x * normal


DRAWS: list[Draw] = [
    *(two_generators, pairs_of_normals, seeded_inside),
    *(forked_inside, states_read_and_set, cloned_generator),
    prims_that_torch_tags_in_python,
]


@pytest.mark.parametrize("draw", DRAWS, ids=lambda draw: draw.__name__)
@same_as_eager
def test_what_is_drawn_and_where_the_streams_go_on(transform: Transform, draw: Draw) -> Any:
    a, b = (torch.Generator().manual_seed(k) for k in (5, 6))
    x = torch.linspace(0, 1, 12).view(4, 3).requires_grad_()
    torch.manual_seed(7)
    g = transform(lambda x: draw(x, a, b))
    out = g(x)
    between = torch.get_rng_state(), a.get_state(), b.get_state()
    sum(t.sum() for t in out if isinstance(t, Tensor) and t.requires_grad).backward()
    after = torch.get_rng_state(), a.get_state(), b.get_state()  # replays drew nothing
    second = g(x)
    return out, between, after, second, x.grad, torch.rand(2), torch.randn(3, generator=a)


NOISE: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": lambda x: nn.functional.dropout(x.sin(), 0.5),
    "rand_like": lambda x: x * torch.rand_like(x),
    "factory": lambda x: x + torch.randn(3),
    "in place": lambda x: x * torch.empty(3).uniform_(),
    "bernoulli": lambda x: x * torch.bernoulli(x.sigmoid()),
    "multinomial": lambda x: x[torch.multinomial(x.softmax(0), 2)].exp(),
}


@pytest.mark.parametrize("order", ["vmap of remat", "remat of vmap"])
@pytest.mark.parametrize("randomness", ["different", "same"])
@pytest.mark.parametrize("noise", NOISE.values(), ids=NOISE.keys())
@same_as_eager
def test_randomness_of_vmap(
    transform: Transform, noise: Callable[[Tensor], Tensor], randomness: str, order: str
) -> Any:
    def f(x: Tensor) -> Tensor:
        return noise(x.cos()).square().exp()

    def vmapped(g: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return torch.func.vmap(g, randomness=randomness)

    g = vmapped(transform(f)) if order == "vmap of remat" else transform(vmapped(f))
    x = torch.linspace(0, 1, 12).view(4, 3)
    torch.manual_seed(7)
    try:
        out = g(x)
    except RuntimeError as error:  # not every operator has every randomness
        return str(error)[:60]
    return out, torch.get_rng_state()


Wrap = Callable[[Callable[..., Tensor]], Callable[..., Any]]

NESTINGS: dict[str, Wrap] = {
    "grad": torch.func.grad,
    "vmap": lambda f: torch.func.vmap(f, randomness="different"),
    "vmap of grad": lambda f: torch.func.vmap(torch.func.grad(f), randomness="different"),
    "grad of vmap": lambda f: torch.func.grad(
        lambda x: torch.func.vmap(f, randomness="different")(x).sum()
    ),
    "jvp": lambda f: lambda x: torch.func.jvp(f, (x,), (torch.ones_like(x),)),
    "jacrev": torch.func.jacrev,
    "grad of grad": lambda f: torch.func.grad(lambda x: torch.func.grad(f)(x).sum()),
    "functionalize": torch.func.functionalize,
}


@pytest.mark.parametrize("inside", [False, True], ids=["around", "inside"])
@pytest.mark.parametrize("wrap", NESTINGS.values(), ids=NESTINGS.keys())
@same_as_eager
def test_dropout_in_every_nesting(transform: Transform, wrap: Wrap, inside: bool) -> Any:
    def f(x: Tensor) -> Tensor:
        return nn.functional.dropout(x.sin(), 0.4).exp().cos().sum()

    g = transform(wrap(f)) if inside else wrap(transform(f))
    x = torch.linspace(0, 1, 12).view(4, 3)
    torch.manual_seed(7)
    return g(x), torch.get_rng_state()
