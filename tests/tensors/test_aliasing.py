# SPDX-License-Identifier: Apache-2.0
"""Views, writes and shared storages: what aliases what, and who sees which contents.

Every program keeps values from before a write (`old`) and computes with them after it (`late`), so
that a replay which reads the contents of the wrong time is found out.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import Transform, same_as_eager, scalar
from torch import Tensor

import rematfn
from rematfn import _C
from rematfn.testing import EvictEverything

aten = torch.ops.aten
Body = Callable[[Tensor], Any]

RECORDED: dict[str, Body] = {}  # run with gradients
UNRECORDED: dict[str, Body] = {}  # autograd forbids these writes, or knows no gradient


def body(table: dict[str, Body]) -> Callable[[Body], Body]:
    def add(f: Body) -> Body:
        table[f.__name__.replace("_", " ").strip()] = f
        return f

    return add


# --- views of views, and outputs that share a storage -----------------------------------------


@body(RECORDED)
def write_into_an_output_of_unsafe_split(x: Tensor) -> Any:
    first, second, third = torch.unsafe_split(x.exp(), 2, 1)
    first.mul_(2)
    parts = torch.unsafe_chunk(x.cos(), 2, 0)
    parts[1].mul_(parts[0])
    return first.sin(), second.cos() * first, third, [p.sin() for p in parts]


@body(RECORDED)
def unannotated_alias(x: Tensor) -> Any:
    y = aten._unsafe_view(x.sin(), (6, 4))
    z = y * 2
    y.mul_(3)
    return z.cos(), y.sin()


@body(UNRECORDED)
def aliases_of_reshape(x: Tensor) -> Any:
    y = x.sin()
    a = y.reshape(6, 4)
    same = a.contiguous().to(torch.float32)
    flat = aten._reshape_alias(y, (24,), (1,))
    old = y * 2
    flat.mul_(2)
    return old + same.reshape(4, 6), same * 1, flat.cos(), a is same


@body(UNRECORDED)
def overlapping_strides_are_written(x: Tensor) -> Any:
    y = x.sin()
    rows = y.as_strided((5, 4), (3, 1))
    rows.zero_()
    old = y * 2
    rows[1].fill_(3)
    return old, y


@body(UNRECORDED)
def views_of_another_dtype(x: Tensor) -> Any:
    y = x.sin()
    half = y.half()
    old = y * 2
    half.view(torch.int16).add_(1)
    torch.view_as_complex(y.view(4, 3, 2)).mul_(1j)
    return y * 1, half, old + 1


def conj_and_neg_views(z: Tensor) -> Any:
    y = z.sin()
    old = y * 2
    conj, neg = y.conj(), torch._neg_view(y.real)
    conj.mul_(2j)
    conj.imag.add_(1)
    late = old + 1
    neg.add_(1)
    inner = y.mH @ conj
    return y, conj, late, neg, inner, conj.resolve_conj(), neg.resolve_neg(), torch.view_as_real(y)


# --- out=, lists, writers -------------------------------------------------------------------------


@body(UNRECORDED)
def lists_with_aliases(x: Tensor) -> Any:
    y = x.sin()
    old = y * 2
    torch._foreach_add_([y[:2], y[1:3]], [x[:2], x[:2]])
    torch._foreach_mul_([y, y], 2.0)
    return y, old + 1


# --- metadata and storages that change under a tensor ----------------------------------------


@body(UNRECORDED)
def resize_smaller_and_back(x: Tensor) -> Any:
    y = x.sin()
    old, row = y * 2, y[1:]
    y.resize_(2, 3)
    a = y + 1
    y.mul_(2)
    y.resize_(4, 6)[1:].fill_(1)
    row.mul_(3)
    return old + 1, a, y, row


@body(UNRECORDED)
def resize_larger(x: Tensor) -> Any:
    y = x.sin()
    old, flat = y * 2, y.view(-1)
    y.resize_(8, 6)[4:].fill_(1)
    return old + 1, y.cos(), y, flat * 2


@body(UNRECORDED)
def set_to_an_argument_and_back(x: Tensor) -> Any:
    y = x.sin()
    old = y * 2
    y.set_(x)
    y.mul_(2)
    late = old + 1
    x.set_(x.cos())
    x.mul_(2)
    return y + 1, late, x + 1


@body(UNRECORDED)
def set_to_a_storage(x: Tensor) -> Any:
    """What is made over a bare storage is one more tensor of its cell."""
    y = x.sin()
    z = y.cos()
    other = torch.empty(0).set_(y.untyped_storage(), 2, (3, 4), (4, 1))
    old = y * 2
    other.add_(1)
    return y * 1, other.exp(), old + 1, z


@body(UNRECORDED)
def set_to_a_storage_that_is_all_there_is(x: Tensor) -> Any:
    storage = x.sin().untyped_storage()
    z = x.cos() * 2
    return torch.empty(0).set_(storage, 0, (4, 6)) * z


@body(RECORDED)
def data_is_replaced_while_recorded(x: Tensor) -> Any:
    y = x.sin()
    z = y * y
    y.data = y.data * 2
    w = y * 3
    y.data[0] = 5  # autograd saved this very tensor's contents elsewhere
    return z.sum(), w, y * 1


@body(UNRECORDED)
def lazy_clones(x: Tensor) -> Any:
    """They share their bytes until one of them is written, inside of the kernel that does so."""
    a = x.sin()
    b = torch._lazy_clone(a)
    c = torch._lazy_clone(b.cos())
    old = b * 2, c * 2
    for t in (b, c):
        t.add_(1)
    return old, a.exp() * b, (c * 1).sin().exp()


@body(UNRECORDED)
def swap_tensors(x: Tensor) -> Any:
    a, b, made_outside = x.sin(), x.cos(), x.clone()
    old = a * 2, b * 2
    torch.utils.swap_tensors(a, b)
    late = a + 1
    a.mul_(2)
    torch.utils.swap_tensors(x, made_outside)
    x.mul_(3)
    return a, b, late, old, x + 1, made_outside


def leaf(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(4, 6, dtype=dtype, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("f", RECORDED.values(), ids=RECORDED.keys())
@same_as_eager
def test_with_gradients(transform: Transform, f: Body) -> Any:
    x = leaf().requires_grad_()
    torch.manual_seed(7)
    out = transform(f)(x)
    return out, torch.autograd.grad(scalar(out), x), torch.rand(2)


@pytest.mark.parametrize("f", UNRECORDED.values(), ids=UNRECORDED.keys())
@same_as_eager
def test_without_gradients(transform: Transform, f: Body) -> Any:
    x = leaf()
    torch.manual_seed(7)
    return transform(f)(x), x, torch.rand(2)


@same_as_eager
def test_conj_and_neg_views(transform: Transform) -> Any:
    return transform(conj_and_neg_views)(leaf(torch.complex64))


# --- storages shared with the outside -------------------------------------------------------------


@pytest.mark.parametrize("made_inside", [False, True])
@pytest.mark.parametrize("then", ["mul_", "resize_", "squeeze_", "set_"])
@same_as_eager
def test_old_contents_outlive_a_change_of_data_and_what_is_done_next(
    transform: Transform, then: str, made_inside: bool
) -> Any:
    """The counter that says that the old contents were overwritten goes along with the tensor."""

    x, other = torch.linspace(-1, 1, 6), torch.ones(4, 1)

    def f(x: Tensor) -> Tensor:
        y = x.sin()
        x.data = other * 2 if made_inside else other
        if then == "mul_":
            x.mul_(2)
        elif then == "resize_":
            x.resize_(2)
        elif then == "squeeze_":
            x.squeeze_()
        else:
            x.set_(torch.zeros(3))
            x.add_(1)
        _C.testing.evict(y)
        return y.exp(), x * 1

    return transform(f)(x), x, other


def test_a_storage_that_others_are_set_to_is_still_watched() -> None:
    """`t.set_(w)` moves `t`; of `w` the counter still tells."""
    w, x = torch.ones(10_000), torch.rand(10_000, requires_grad=True)

    def f(x: Tensor) -> Tensor:
        h = (x + w).sin()
        torch.empty(0).set_(w)  # type: ignore[call-overload]
        return h.exp().sum()

    loss = rematfn.remat(f, policy=EvictEverything())(x)
    w[5] = 0
    with pytest.raises(rematfn.ReplayError, match="was overwritten"):
        loss.backward()
