# SPDX-License-Identifier: Apache-2.0
"""vmap: one call of an operator does the work of many. A wrapper hides the first dimension."""

from __future__ import annotations

from . import operators as ops
from .dispatcher import Key, fallbacks
from .levels import Level, Wrapper, active, leave, thread, tree_map, unwrapped


class Vmap(Level):
    key = Key.VMAP

    def __init__(self, size):
        self.size = size

    def wrap(self, value):
        return Wrapper(self, value, value.shape[1:])

    def repeated(self, value):
        """Give a tensor that is the same for all examples a dimension to hide."""
        return ops.expand(value, (self.size, *value.shape))


def batching_rule(rule):
    """Make a kernel from a rule, whose tensors have the hidden dimension in front."""

    def kernel(op, keys, args):
        level, mine, values = unwrapped(op, args)
        if not any(mine):
            return op(*args)  # nothing of this level
        batched = [
            level.repeated(value) if isinstance(value, ops.Tensor) and not own else value
            for value, own in zip(values, mine)
        ]
        return level.wrap(rule(op, *batched))

    return kernel


def one_by_one(op, *args):
    """Serve as the rule of any operator: call it for each example."""
    (size,) = {arg.shape[0] for arg in args if isinstance(arg, ops.Tensor)}
    picked = [
        [ops.select(arg, 0, i) if isinstance(arg, ops.Tensor) else arg for arg in args]
        for i in range(size)
    ]
    return ops.stack(0, *(op(*example) for example in picked))


def elementwise(op, *xs):
    return op(*xs)


def rule_of_expand(op, x, shape):
    ones = (1,) * (1 + len(shape) - len(x.shape))
    return op(ops.reshape(x, (x.shape[0], *ones, *x.shape[1:])), (x.shape[0], *shape))


rules = {
    **dict.fromkeys((ops.neg, ops.sin, ops.cos, ops.exp, ops.add, ops.mul), elementwise),
    ops.flip: elementwise,  # other numbers for each example
    ops.matmul: elementwise,  # NumPy's is for the last two dimensions
    ops.reshape: lambda op, x, shape: op(x, (x.shape[0], *shape)),
    ops.expand: rule_of_expand,
    ops.permute: lambda op, x, dims: op(x, (0, *(dim + 1 for dim in dims))),
    ops.total: lambda op, x, dim: op(x, dim + 1),
    ops.select: lambda op, x, dim, i: op(x, dim + 1, i),
    ops.embed: lambda op, x, dim, i, size: op(x, dim + 1, i, size),
    ops.stack: lambda op, dim, *xs: op(dim + 1, *xs),
}
for _op, _rule in rules.items():
    _op.kernels[Key.VMAP] = batching_rule(_rule)
fallbacks[Key.VMAP] = batching_rule(one_by_one)


def to_front(x, dim):
    dims = list(range(len(x.shape)))
    return x if dim == 0 else ops.permute(x, (dims.pop(dim), *dims))


def vmap(f, in_dims=0):
    """Return f for many examples; in_dims says where each argument has them."""

    def transformed(*args):
        dims = in_dims if isinstance(in_dims, tuple) else (in_dims,) * len(args)
        (size,) = {x.shape[d] for x, d in zip(args, dims) if d is not None}
        level = Vmap(size)
        inputs = [x if d is None else level.wrap(to_front(x, d)) for x, d in zip(args, dims)]
        with active(*thread.stack, level):
            result = f(*inputs)
        values = tree_map(lambda t: t.value if level.owns(t) else level.repeated(t), result)
        return tree_map(leave, values)

    return transformed
