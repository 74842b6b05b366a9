# SPDX-License-Identifier: Apache-2.0
"""Tensors, and the operators on them. NumPy computes; every array has bytes of its own."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .dispatcher import Key, KeySet, Operator, unboxed


class Tensor:
    """What operators take and give."""

    keys: KeySet
    shape: tuple[int, ...]

    def __add__(self, other):
        return add(*alike(self, other))

    def __mul__(self, other):
        return mul(*alike(self, other))

    __radd__, __rmul__ = __add__, __mul__

    def __sub__(self, other):
        return self + -other

    def __neg__(self):
        return neg(self)

    def __matmul__(self, other):
        return matmul(self, other)

    def sum(self):
        return total(reshape(self, (int(np.prod(self.shape)),)), 0)


class Array(Tensor):
    """A tensor with numbers. A level of remat may take them away: then `data` is None."""

    keys = KeySet.of(Key.CPU)

    def __init__(self, data):
        data = np.asarray(data, dtype=float)
        self.data = data if data.base is None else data.copy()
        self.shape, self.nbytes = data.shape, data.nbytes
        self.level = self.made_by = None  # for remat: its level; the operator and its arguments


def alike(x, y):
    """Expand two tensors, or a tensor and a number, to one shape."""
    x, y = (t if isinstance(t, Tensor) else Array(t) for t in (x, y))
    shape = np.broadcast_shapes(x.shape, y.shape)
    return [t if t.shape == shape else expand(t, shape) for t in (x, y)]


def define(name: str, compute: Callable, shape: Callable = lambda x, *rest: x.shape) -> Operator:
    """Make an operator from how its numbers are computed, and which shape they will have."""
    op = Operator(name)
    op.shape = shape
    op.kernels[Key.CPU] = unboxed(lambda *args: Array(compute(*map(numbers, args))))
    return op


def numbers(arg):
    return arg.data if isinstance(arg, Array) else arg


def embedded(x, dim, index, size):
    """Return zeros, with x at one place of a new dimension."""
    result = np.zeros((*x.shape[:dim], size, *x.shape[dim:]))
    np.moveaxis(result, dim, 0)[index] = x
    return result


def given(x, shape):
    """Tell the shape of a result whose shape is an argument."""
    return shape


def without(x, dim, *rest):
    """Tell the shape of a result that lacks one dimension."""
    return x.shape[:dim] + x.shape[dim + 1 :]


neg, add, mul = define("neg", np.negative), define("add", np.add), define("mul", np.multiply)
sin, cos, exp = define("sin", np.sin), define("cos", np.cos), define("exp", np.exp)
matmul = define("matmul", np.matmul, lambda x, y: (*x.shape[:-1], y.shape[-1]))
reshape = define("reshape", np.reshape, given)
expand = define("expand", np.broadcast_to, given)
permute = define("permute", np.transpose, lambda x, dims: tuple(x.shape[d] for d in dims))
total = define("sum", np.sum, without)
select = define("select", lambda x, dim, i: x.take(i, dim), without)
embed = define("embed", embedded, lambda x, dim, i, n: (*x.shape[:dim], n, *x.shape[dim:]))
stack = define(
    "stack",
    lambda dim, *xs: np.stack(xs, dim),
    lambda dim, *xs: embed.shape(xs[0], dim, 0, len(xs)),
)
