# SPDX-License-Identifier: Apache-2.0
"""`remat(..., verify=True)` finds operators whose replay is not their first run, and no others."""

import itertools
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import EVERYTHING as VERIFIED  # every replay of every test is verified
from helpers import assert_bitwise_equal
from torch import Tensor

import rematfn

_numbers = itertools.count()


def define(spoil: Callable[[Tensor, int], None], *, writes: bool = False, **options: Any) -> Any:
    """Define the sine as an operator, whose result `spoil` may change, given the run's number."""
    runs = itertools.count()

    def fresh(x: Tensor) -> Tensor:
        y = x.sin()
        spoil(y, next(runs))
        return y

    def in_place(x: Tensor) -> None:
        x.sin_()
        spoil(x, next(runs))

    name = f"rematfn_tests::verified_{next(_numbers)}"
    kernel, mutates = (in_place, {"x"}) if writes else (fresh, set())
    op = torch.library.custom_op(name, kernel, mutates_args=mutates, **options)
    op.register_fake(lambda x: None if writes else torch.empty_like(x))
    return op


def spoil_element(y: Tensor, run: int) -> None:
    if run > 0:
        y[1, 2:] += 1


def with_operator(op: Any) -> Callable[[Tensor], Tensor]:
    def f(x: Tensor) -> Tensor:
        y = op(x)
        return y.cos() * y

    return f


X = torch.linspace(-1, 1, 12).view(3, 4)


def named(op: Any) -> str:
    return re.escape(f"`{op._opoverload.name()}` gave other bits")


def test_an_operator_that_computes_something_else_is_named() -> None:
    op = define(spoil_element)
    with pytest.raises(rematfn.ReplayError, match=named(op)):
        VERIFIED(with_operator(op))(X)


def test_a_replay_that_fails_does_not_hide_the_exception_before_it() -> None:
    kept: list[Tensor] = []
    op = define(spoil_element)

    def f(x: Tensor) -> None:
        kept.append(op(x))
        torch.ones(3).sin()  # the first is evicted
        raise LookupError("of the function's own")

    with pytest.raises(LookupError, match="own"):
        VERIFIED(f)(X)
    with pytest.raises(rematfn.ReplayError, match=named(op)):
        kept[0].cos()


def test_what_is_written_in_place_is_verified() -> None:
    op = define(spoil_element, writes=True)

    def f(x: Tensor) -> Tensor:
        y = x.clone()
        op(y)
        return y.cos() * y

    with pytest.raises(rematfn.ReplayError, match=named(op)):
        VERIFIED(f)(X)


def test_an_operator_tagged_as_not_reproducible_is_never_replayed() -> None:
    op = define(spoil_element, tags=(torch.Tag.nondeterministic_bitwise,))
    assert_bitwise_equal(VERIFIED(with_operator(op))(X), with_operator(torch.sin)(X))


def test_one_nan_is_told_from_another() -> None:
    def spoil(y: Tensor, run: int) -> None:
        y.view(torch.int32)[0, 1] = 0x7FC00000 + (run > 0)

    op = define(spoil)
    with pytest.raises(rematfn.ReplayError, match=named(op)):
        VERIFIED(with_operator(op))(X)


def test_uninitialised_memory_may_be_read_by_copies_that_are_overwritten() -> None:
    """Circular padding copies the corners of an `empty`, and fills them afterwards."""

    def f(x: Tensor) -> Tensor:
        out = x.new_empty(x.shape[0] + 2, x.shape[1] + 2)
        out[1:-1, 1:-1] = x
        out[0] = out[-2]
        out[-1] = out[1]
        torch.full_like(out, torch.nan)  # what is freed here may be what a replay is given
        out[:, 0] = out[:, -2]
        out[:, -1] = out[:, 1]
        return out.cos()

    x = torch.linspace(-1, 1, 900).view(30, 30)
    assert_bitwise_equal(VERIFIED(f)(x), f(x))


# What a backend may leave unfilled, by arguments that ask for it to be left out.
UNSPECIFIED: dict[str, tuple[set[int], Callable[[Tensor], Any]]] = {
    "_embedding_bag": (
        {1, 2, 3},
        lambda x: torch._embedding_bag(x, torch.arange(3), torch.tensor([0, 2])),
    ),
    "_embedding_bag_forward_only": (
        {1, 2, 3},
        lambda x: torch.ops.aten._embedding_bag_forward_only(
            x, torch.arange(3), torch.tensor([0, 2])
        ),
    ),
    "nll_loss_forward": (
        {1},
        lambda x: torch.ops.aten.nll_loss_forward(x, torch.arange(3), None, 0, -100),
    ),
    "nll_loss2d_forward": (
        {1},
        lambda x: torch.ops.aten.nll_loss2d_forward(
            x.view(1, 3, 2, 2), torch.ones(1, 2, 2, dtype=torch.long), None, 0, -100
        ),
    ),
    "_efficient_attention_forward": (
        {2, 3},
        lambda x: torch.ops.aten._efficient_attention_forward(
            *[x.view(1, 3, 1, 4)] * 3, None, None, None, None, None, 0.0, 0, True
        ),
    ),
}


def backend_that_leaves_garbage(name: str, unspecified: set[int]) -> Callable[..., Any]:
    """Return a kernel whose results are the first argument's sums, and these the run's number."""
    returns = getattr(torch.ops.aten, name).default._schema.returns
    runs = itertools.count()

    def kernel(x: Tensor, *_: Any, **__: Any) -> Any:
        run = next(runs)
        values = (
            torch.full((2,), float(run) if i in unspecified else 1.0) for i in itertools.count()
        )
        return tuple(next(values) if str(r.type) == "Tensor" else 1 for r in returns)

    return kernel


@pytest.mark.parametrize("name", UNSPECIFIED)
@pytest.mark.parametrize("spoiled", ["unspecified", "the first"])
def test_a_result_that_no_kernel_need_fill_is_not_verified(name: str, spoiled: str) -> None:
    unspecified, call = UNSPECIFIED[name]
    garbage = unspecified if spoiled == "unspecified" else {0}

    def f(x: Tensor) -> Any:
        return [r for r in call(x.sin()) if isinstance(r, Tensor)]  # evicted, and replayed to leave

    with torch.library._scoped_library("aten", "IMPL") as library, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, of a kernel that takes another's place
        library.impl(name, backend_that_leaves_garbage(name, garbage), "CPU")
        if spoiled == "unspecified":
            VERIFIED(f)(X)
        else:
            with pytest.raises(rematfn.ReplayError, match=name):
                VERIFIED(f)(X)
