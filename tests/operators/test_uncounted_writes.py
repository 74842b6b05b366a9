# SPDX-License-Identifier: Apache-2.0
"""Writes to tensors from outside for which autograd's version counter does not move."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from helpers import (
    Mode,
    Transform,
    assert_bitwise_equal,
    assert_same_as_eager,
    same_as_eager,
    untransformed,
)
from torch import Tensor

import rematfn

Write = Callable[[Tensor], Any]
EVICT = functools.partial(rematfn.remat, policy=rematfn.testing.EvictEverything())


def triple(*tensors: Tensor) -> None:
    for t in tensors:
        t.detach().numpy()[:] *= 3


@pytest.fixture(scope="module", autouse=True)
def _operators() -> Iterator[None]:
    library = torch.library.Library("uncounted", "DEF")
    library.define("write(Tensor(a!) x) -> ()")
    library.impl("write", triple, "CPU")
    library.define("write_list(Tensor(a!)[] xs) -> ()")
    library.impl("write_list", lambda xs: triple(*xs), "CPU")
    yield
    library._destroy()


# --- operators ------------------------------------------------------------------------------------


def fused(kind: Any, **options: Any) -> Write:
    def write(w: Tensor) -> None:
        w.grad = torch.ones_like(w)
        kind([w], lr=0.3, fused=True, **options).step()
        w.grad = None

    return write


def batch_norm(w: Tensor) -> None:
    torch.nn.functional.batch_norm(torch.randn(5, w.numel()), w, torch.ones_like(w), training=True)


OPERATORS: dict[str, Write] = {
    "Adam": fused(torch.optim.Adam),
    "Adam, amsgrad": fused(torch.optim.Adam, amsgrad=True),
    "AdamW": fused(torch.optim.AdamW),
    "SGD": fused(torch.optim.SGD, momentum=0.9),
    "Adagrad": fused(torch.optim.Adagrad),
    "a batch norm's mean": batch_norm,
    "a batch norm's, legit": lambda w: torch.ops.aten._native_batch_norm_legit(
        torch.randn(5, w.numel()), None, None, w, torch.ones_like(w), True, 0.1, 1e-5
    ),
    "update_stats": lambda w: torch.batch_norm_update_stats(
        torch.randn(5, w.numel()), w, torch.ones_like(w), 0.1
    ),
    "unscale": lambda w: torch._amp_foreach_non_finite_check_and_unscale_(
        [w], torch.zeros(()), torch.full((), 0.5)
    ),
    "noise of a rrelu": lambda w: torch.ops.aten.rrelu_with_noise(-w, w, 0.1, 0.3, True),
    "_cummax_helper": lambda w: torch.ops.aten._cummax_helper(
        w.sin(), w, torch.zeros(w.shape, dtype=torch.long), 0
    ),
    "an operator of one's own": lambda w: torch.ops.uncounted.write(w),
    "one of a list": lambda w: torch.ops.uncounted.write_list([w, torch.ones(3)]),
    "through .data": lambda w: torch.ops.uncounted.write(w.data),
}


def two_losses(write: Write, transform: Transform, n: int = 512) -> Any:
    """Return gradients of one loss, and of another after `w` has been written."""
    torch.manual_seed(5)
    x, w = torch.linspace(-1, 1, n).requires_grad_(), torch.linspace(0.5, 1.5, n)

    def f(x: Tensor) -> tuple[Tensor, Tensor]:
        h = x
        for _ in range(4):
            h = (h * w).sin() + w  # w is saved as well: what comes after the write reads it anew
        return h.sum(), (h * h).exp().sum()

    first, second = transform(f)(x)
    found = torch.autograd.grad(first, x, retain_graph=True)
    with torch.no_grad():
        write(w)
    return found, torch.autograd.grad(second, x), w


@pytest.mark.parametrize("write", OPERATORS.values(), ids=OPERATORS.keys())
def test_an_operator_writes_between_two_backwards(write: Write) -> None:
    counter = (w := torch.ones(512))._version
    write(w)
    assert w._version == counter, "the write is counted"
    assert_same_as_eager(functools.partial(two_losses, write))


@pytest.mark.parametrize("write", OPERATORS.values(), ids=OPERATORS.keys())
def test_in_a_hook(write: Write) -> None:
    """On an intermediate: nobody is told that a hook runs."""

    def run(transform: Transform) -> Any:
        torch.manual_seed(5)
        x, w = torch.linspace(-1, 1, 512).requires_grad_(), torch.linspace(0.5, 1.5, 512)

        def f(x: Tensor) -> Tensor:
            h = (x + w).sin()
            z = (h + w).exp()
            z.register_hook(lambda grad: (torch.no_grad()(write)(w), None)[1])
            return (z * z).sum()

        return torch.autograd.grad(transform(f)(x), x), w

    # A copy of what is written needs room, beyond the peak of the function without it.
    assert_same_as_eager(run, Mode("each", fraction=1.25))


def test_no_room_for_a_copy() -> None:
    """Nor for what is made from it: the step goes on, and what needs the copy is refused."""
    n = 4096
    x, w = torch.linspace(-1, 1, n).requires_grad_(), torch.linspace(0.5, 1.5, 8 * n)

    def f(x: Tensor) -> Tensor:
        return torch.stack([(x + part).sin().sum() for part in w.split(n)]).sum()

    budget = 4 * 4 * n  # all of `w` takes twice that, and so does what the graph has saved
    loss = rematfn.remat(f, budget, policy=rematfn.testing.EvictEverything())(x)
    fused(torch.optim.SGD)(w)
    rematfn.testing.check()
    with pytest.raises(rematfn.ReplayError, match=r"overwritten .* no room for a copy\. Raise"):
        loss.backward()


# --- no operator ----------------------------------------------------------------------------------

VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "all": lambda w: w,
    "a row": lambda w: w[3],
    "a column": lambda w: w[:, 5],
    "transposed": lambda w: w.t(),
    "steps": lambda w: w[::2, 1::3],
    "expanded": lambda w: w[:1].expand(7, -1),
}
ARRAYS: dict[str, Write] = {
    "an array": lambda w: w.numpy().__imul__(2),
    ".data": lambda w: w.data.mul_(2),
    "its storage": lambda w: w.untyped_storage().fill_(7),
    "dlpack": lambda w: torch.from_dlpack(w.numpy()).mul_(2),
    "apply_": lambda w: w.apply_(lambda v: v * 2),
    "another view of the bytes": lambda w: torch.empty(0).set_(w.untyped_storage()).add_(1),
}


def read_once(
    write: Write,
    transform: Transform,
    view: Callable[[Tensor], Tensor],
) -> Any:
    w = torch.linspace(1, 2, 32 * 18).view(32, 18)
    x = torch.linspace(-1, 1, view(w).numel()).view(view(w).shape).requires_grad_()
    loss = transform(lambda x: (x + view(w)).sin().exp().sum())(x)
    write(w)
    return torch.autograd.grad(loss, x)


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS.keys())
@pytest.mark.parametrize("write", ARRAYS.values(), ids=ARRAYS.keys())
def test_a_write_of_all_is_refused(write: Write, view: Callable[[Tensor], Tensor]) -> None:
    expected = read_once(lambda w: None, untransformed, view)
    assert_bitwise_equal(read_once(write, rematfn.remat, view), expected)  # nothing is evicted
    with pytest.raises(rematfn.ReplayError, match=r"`aten::add`.*overwritten.*NumPy"):
        read_once(write, EVICT, view)


@pytest.mark.parametrize("n", [1, 2, 3, 31, 32, 33, 63, 64, 65, 66, 93, 128, 1000, 4097])
def test_first_and_last_are_looked_at(n: int) -> None:
    def run(at: int) -> Any:
        x, w = torch.linspace(-1, 1, n).requires_grad_(), torch.linspace(1, 2, n)
        loss = EVICT(lambda x: (x + w).sin().exp().sum())(x)
        w.numpy()[at] = 5
        return torch.autograd.grad(loss, x)

    for at in (0, n - 1):
        with pytest.raises(rematfn.ReplayError, match="overwritten"):
            run(at)


def test_a_result_that_the_caller_overwrites() -> None:
    def run(transform: Transform) -> Any:
        x = torch.linspace(-1, 1, 512).requires_grad_()

        def f(x: Tensor) -> tuple[Tensor, Tensor]:
            h = x.sin()
            return h.detach(), (h + 1).exp().sum()

        h, loss = transform(f)(x)
        h.numpy().fill(0)
        return torch.autograd.grad(loss, x)

    assert_bitwise_equal(run(rematfn.remat), run(untransformed))
    with pytest.raises(rematfn.ReplayError, match="overwritten"):
        run(EVICT)


# --- what must go on working ----------------------------------------------------------------------


@same_as_eager
def test_what_operators_wrote_since_is_what_was_read(transform: Transform) -> Any:
    """Reads and counted writes in turn, of one tensor, inside and outside."""

    x, w = torch.linspace(-1, 1, 512).requires_grad_(), torch.linspace(1, 2, 512)

    def f(x: Tensor) -> Tensor:
        for k in range(3):
            x = (x + w).sin()
            w.mul_(1.5)
            x = (x + w[k:].sum()).cos()
            w[k] = 7
        return x

    found = []
    for _ in range(3):
        found += torch.autograd.grad(transform(f)(x).sum(), x)
        w.add_(1)
        fused(torch.optim.SGD)(w)
    return found, w
