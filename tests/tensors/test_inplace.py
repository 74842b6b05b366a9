# SPDX-License-Identifier: Apache-2.0
"""A write makes a new version: replays read the contents that were, and never write outside."""

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import (
    EVERYTHING,
    PLAIN,
    Transform,
    assert_bitwise_equal,
    assert_same_as_eager,
)
from torch import Tensor, nn

import rematfn
from rematfn.policies import ON, Policy
from rematfn.testing import EvictEverything, MemoryTimeline


def compare(f: Callable[..., Any], *more: Callable[[], Tensor]) -> None:
    """Assert equality of `f(x, ...)`, without gradients; every argument is compared as well."""

    def run(transform: Transform) -> Any:
        torch.manual_seed(3)
        args = [torch.randn(4, 6), *(make() for make in more)]
        with torch.no_grad():
            return transform(f)(*args), args, torch.rand(2)

    assert_same_as_eager(run)


Write = Callable[[Tensor, Tensor], Any]
WRITES: dict[str, Write] = {
    "mul_": lambda y, x: y.mul_(0.5),
    "add_ itself": lambda y, x: y.add_(y),
    "copy_": lambda y, x: y.copy_(x),
    "copy_ converts": lambda y, x: y.copy_(x.double()),
    "fill_": lambda y, x: y.fill_(3.0),
    "setitem": lambda y, x: y.__setitem__(slice(1, 3), x[0]),
    "setitem mask": lambda y, x: y.__setitem__(y > 0, 0.25),
    "index_put_": lambda y, x: y.index_put_((torch.tensor([0, 0]),), x[1], accumulate=True),
    "view": lambda y, x: y.view(-1)[3:9].mul_(2),
    "view of view": lambda y, x: y.t()[1:3].unsqueeze(0).sub_(1),
    "diagonal": lambda y, x: y.diagonal().exp_(),
    "shifted within": lambda y, x: y[1:].copy_(y[:-1].clone()),
    "out": lambda y, x: torch.sub(x, 1, out=y),
    "out of itself": lambda y, x: torch.mul(y, x, out=y),
    "out view": lambda y, x: torch.sum(x, 1, out=y[:, 2]),
    "foreach": lambda y, x: torch._foreach_add_([y[:2], y[2:]], [x[:2], x[2:]]),
    "normal_": lambda y, x: y.normal_(),
    "dropout": lambda y, x: nn.functional.dropout(y, 0.5, inplace=True),
    "relu_": lambda y, x: y.relu_(),
    "clamp_": lambda y, x: y.clamp_(x.abs().neg(), x.abs()),
    "scatter_reduce_": lambda y, x: y.scatter_reduce_(1, x.argsort(1), x, "amax"),
    "sort out": lambda y, x: torch.sort(x, out=(y, torch.empty(0, dtype=torch.long))),
    "set data": lambda y, x: y.data.add_(1),
    "detached": lambda y, x: y.detach().t().mul_(x.t()),
    "resize": lambda y, x: y.resize_(2, 6).add_(1),
    "set_": lambda y, x: y.set_(rematfn.materialize(x * 2).untyped_storage(), 0, (3, 2), (1, 3)),
    "transposed": lambda y, x: y.t_().mul_(2),
    "batch norm buffers": lambda y, x: nn.functional.batch_norm(x, y[0], y[1], training=True),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES.keys())
def test_readers_of_the_old_contents_replay_after_the_write(write: Write) -> None:
    def f(x: Tensor) -> Any:
        y = x.sin()
        seen = y.view(6, 4)
        old, older = y * 2, seen.cos()
        write(y, x)
        middle = y.exp() if y.is_contiguous() else y.contiguous()
        late = old + 1  # its lineage leads to the old contents
        write(y, x)
        return late, older * 2, middle + 1, y + 1, y, old, seen

    compare(f)


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES.keys())
def test_a_write_into_an_argument_happens_once(write: Write) -> None:
    def f(x: Tensor, y: Tensor) -> Any:
        old = y.contiguous() * 2
        write(y, x)
        new = y.contiguous().sin()
        late = old + 1
        write(y, x)
        return late * 2, new.cos(), new, old

    compare(f, lambda: torch.rand(4, 6))


def test_gradients_that_accumulate_into_what_was_read_are_such_a_write() -> None:
    """The argument's own `.grad` is read in the forward, and written by the first backward."""

    def run(transform: Transform) -> Any:
        torch.manual_seed(3)
        x = torch.randn(4, 6, requires_grad=True)
        x.grad = torch.ones(4, 6)
        read = x.grad
        g = transform(lambda x: (x * read.detach().clone()).sin().sum())
        a, b = g(x), g(x)
        a.backward()
        b.backward()
        return x.grad, x.grad is read

    assert_same_as_eager(run, PLAIN)
    with pytest.raises(rematfn.ReplayError):
        run(EVERYTHING)


def overwrites_a_constant(x: Tensor) -> Tensor:
    """Read it, make a value that is evicted, then write over it with that value."""
    y = torch.tensor(x.tolist())
    h = y.sin()
    y.add_(x.cos())
    return y * h


def goes_on_without_the_write(x: Tensor) -> Tensor:
    y = torch.tensor(x.tolist())
    h, z = y.sin(), x.cos()
    with contextlib.suppress(rematfn.BudgetError):
        y.add_(z)
    return y * x.exp() * h


@pytest.mark.parametrize("policy", [EvictEverything(), ON()], ids=str)
@pytest.mark.parametrize("f", [overwrites_a_constant, goes_on_without_the_write])
def test_what_is_overwritten_counts_beside_its_copy(
    f: Callable[[Tensor], Tensor], policy: Policy
) -> None:
    x = torch.linspace(0, 1, 4096)
    n = x.nbytes
    results = []
    for budget in range(n, 6 * n, n // 4):
        with MemoryTimeline() as timeline, contextlib.suppress(rematfn.BudgetError):
            results.append(rematfn.remat(f, budget, policy=policy)(x))
        assert timeline.peak <= budget
    assert_bitwise_equal(results[-1], f(x))
