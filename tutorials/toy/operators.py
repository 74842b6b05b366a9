# SPDX-License-Identifier: Apache-2.0
"""Tensors, and the operators on them. NumPy computes."""

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

    def sin(self):
        return sin(self)

    def cos(self):
        return cos(self)

    def exp(self):
        return exp(self)

    def t(self):
        return permute(self, (1, 0))

    def add_(self, other):
        return add_(self, alike(self, other)[1])

    def mul_(self, other):
        return mul_(self, alike(self, other)[1])

    def sum(self):
        return total(reshape(self, (int(np.prod(self.shape)),)), 0)


class Storage:
    """A block of numbers, on which any number of arrays may stand."""

    def __init__(self, numbers):
        self.numbers, self.nbytes = numbers, numbers.nbytes
        self.version = None  # for remat, which may take the numbers away: then they are None
        self.lent = False  # somebody has them who calls no operators


class Array(Tensor):
    """A tensor with numbers: a storage, and a view, which says where in it they are."""

    keys = KeySet.of(Key.CPU)

    def __init__(self, data, storage=None):
        if storage is None:
            data = np.asarray(data, dtype=float, order="C")
            storage = Storage(data if data.base is None else data.copy())
            data = storage.numbers
        offset = data.ctypes.data - storage.numbers.ctypes.data
        self.storage, self.view, self.shape = (
            storage,
            (offset, data.shape, data.strides),
            data.shape,
        )

    @property
    def data(self):
        return read(self.storage, self.view)

    @property
    def nbytes(self):
        return self.storage.nbytes

    def numpy(self):
        self.storage.lent = True
        return self.data


def read(storage, view):
    """Return what a view shows of a storage, on the same bytes."""
    if storage.numbers is None:
        raise LookupError("somebody reads numbers that are away")
    offset, shape, strides = view
    return np.ndarray(shape, float, storage.numbers, offset, strides)


def alike(x, y):
    """Expand two tensors, or a tensor and a number, to one shape."""
    x, y = (t if isinstance(t, Tensor) else Array(t) for t in (x, y))
    shape = np.broadcast_shapes(x.shape, y.shape)
    return [t if t.shape == shape else expand(t, shape) for t in (x, y)]


def define(
    name: str,
    compute: Callable,
    shape: Callable | None = lambda x, *rest: x.shape,
    writes: tuple[int, ...] = (),
    random: bool = False,
) -> Operator:
    """Make an operator from how its numbers are computed, and which shape they will have.

    Without a shape it makes no storage: its result stands on that of its first argument. `writes`
    are the places of the arguments that it overwrites. A random one draws from `generator`.
    """
    op = Operator(name)
    op.shape, op.writes, op.random = shape, writes, random

    def kernel(*args):
        data = compute(*map(numbers, args))
        return Array(data) if shape else Array(data, args[0].storage)

    op.kernels[Key.CPU] = unboxed(kernel)
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
expand = define("expand", np.broadcast_to, None)
permute = define("permute", np.transpose, None)
total = define("sum", np.sum, without)
select = define("select", lambda x, dim, i: np.moveaxis(x, dim, 0)[i, ...], None)
embed = define("embed", embedded, lambda x, dim, i, n: (*x.shape[:dim], n, *x.shape[dim:]))
stack = define(
    "stack",
    lambda dim, *xs: np.stack(xs, dim),
    lambda dim, *xs: embed.shape(xs[0], dim, 0, len(xs)),
)

# These write into their first argument.
add_ = define("add_", lambda x, y: np.add(x, y, out=x), None, writes=(0,))
mul_ = define("mul_", lambda x, y: np.multiply(x, y, out=x), None, writes=(0,))

generator = np.random.default_rng(0)
flip = define("flip", lambda x: generator.integers(0, 2, x.shape), random=True)  # ones and zeros
