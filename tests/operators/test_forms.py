# SPDX-License-Identifier: Apache-2.0
"""Calls that are almost alike have forms of their own: each replay runs what its first run did."""

from collections.abc import Callable

import pytest
import torch
from helpers import Transform, assert_same_as_eager, default_dtype
from torch import Tensor
from torch.nn import functional


def divided(i: Tensor, dtype: torch.dtype) -> Tensor:
    with default_dtype(dtype):
        return torch.true_divide(i, 3)


def attended(x: Tensor, *, one_tensor: bool) -> Tensor:
    """Attend to oneself: of one tensor torch makes query, key and value in one product."""
    query = x.nan_to_num()[None]
    key = query if one_tensor else query.view_as(query)
    weights, bias = torch.linspace(-1, 1, 48).view(12, 4).sin(), torch.zeros(12)
    native = torch._native_multi_head_attention
    return native(query, key, key, 4, 2, weights, bias, weights[:4], bias[:4])[0]


# Two calls of an operator on a square matrix that differ in one thing.
ALMOST_ALIKE: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "number": (lambda x: torch.add(x, x, alpha=2), lambda x: torch.add(x, x, alpha=3)),
    "sign of zero": (lambda x: torch.full_like(x, 0.0), lambda x: torch.full_like(x, -0.0)),
    "nan": (lambda x: x.nan_to_num(nan=1.0), lambda x: x.nan_to_num(nan=float("nan"))),
    "int or float": (lambda x: x.long().pow(2), lambda x: x.long().pow(2.0)),
    "truth": (lambda x: x.logsumexp(1, True), lambda x: x.logsumexp(1, False)),
    "none": (lambda x: x.std(1, correction=None), lambda x: x.std(1, correction=0)),
    "string": (functional.gelu, lambda x: functional.gelu(x, approximate="tanh")),
    "dimensions": (lambda x: x.sum([0]), lambda x: x.sum([1])),
    "more dimensions": (lambda x: x.sum([0]), lambda x: x.sum([0, 1])),
    "sizes": (lambda x: x.repeat(2, 1), lambda x: x.repeat(1, 2)),
    "floats": (
        lambda x: functional.interpolate(x[None, None], scale_factor=(1.5, 2.0)),
        lambda x: functional.interpolate(x[None, None], scale_factor=(2.0, 1.5)),
    ),
    "complex numbers": (
        lambda x: torch._foreach_add([x, x.t()], [1j, 2.0])[0],
        lambda x: torch._foreach_add([x, x.t()], [2j, 1.0])[0],
    ),
    "which tensor": (
        lambda x: torch.clamp(x, min=x.mean()),
        lambda x: torch.clamp(x, max=x.mean()),
    ),
    "place in a list": (lambda x: x[torch.tensor([1, 0])], lambda x: x[:, torch.tensor([1, 0])]),
    "length of a list": (lambda x: torch.cat([x, x]), lambda x: torch.cat([x, x, x])),
    "order of a list": (lambda x: torch.cat([x, x[:2]]), lambda x: torch.cat([x[:2], x])),
    "strides": (lambda x: x.cumsum(0), lambda x: x.t().cumsum(0)),
    "offset": (lambda x: x[0].exp(), lambda x: x[1].exp()),
    "dtype": (lambda x: x.exp(), lambda x: x.double().exp()),
    "same bytes": (lambda x: x.abs(), lambda x: x.view(torch.int32).abs()),
    "conjugate": (
        lambda x: torch.complex(x, x.t()) @ torch.complex(x, x),
        lambda x: torch.complex(x, x.t()).conj() @ torch.complex(x, x),
    ),
    "negative": (
        lambda x: torch.complex(x, x.t()).imag * x,
        lambda x: torch.complex(x, x.t()).conj().imag * x,
    ),
    "wrapped": (
        lambda x: x.long() * 2.5,
        lambda x: x.long() * torch.tensor(2.5, dtype=torch.float64),
    ),
    "default dtype": (
        lambda x: divided(x.long(), torch.float32),
        lambda x: divided(x.long(), torch.float64),
    ),
    "one tensor": (
        lambda x: attended(x, one_tensor=True),
        lambda x: attended(x, one_tensor=False),
    ),
}


@pytest.mark.parametrize("name", ALMOST_ALIKE)
def test_calls_that_are_almost_alike(name: str) -> None:
    first, second = ALMOST_ALIKE[name]

    def program(x: Tensor) -> list[Tensor]:
        return [f(x * k) for k in (1, 2) for f in (first, second, second, first)]

    def run(transform: Transform) -> list[Tensor]:
        torch.manual_seed(5)
        x = torch.randn(4, 4)
        x[0, 0] = float("nan")
        return transform(program)(x)

    results = assert_same_as_eager(run)
    assert len(results) == 8


def test_more_forms_than_are_remembered() -> None:
    def program(x: Tensor) -> list[Tensor]:
        return [torch.sub(x, x.t(), alpha=k) for _ in range(3) for k in (1, 2, 3, 4, 5, 6, 7, 1)]

    def run(transform: Transform) -> list[Tensor]:
        torch.manual_seed(5)
        return transform(program)(torch.randn(4, 4))

    results = assert_same_as_eager(run)
    assert len({tuple(r.flatten().tolist()) for r in results}) == 7
