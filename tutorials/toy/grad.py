# SPDX-License-Identifier: Apache-2.0
"""grad: a level that notes what each operator did, and walks back over its notes."""

from __future__ import annotations

from dataclasses import dataclass

from . import operators as ops
from .dispatcher import Key
from .levels import Level, Wrapper, active, leave, thread, tree_map, unwrapped


class Grad(Level):
    key = Key.GRAD
    calls = 0


@dataclass(eq=False)
class Node:
    """What one operator did: where its inputs came from, and how a gradient gets to them."""

    order: int = 0
    inputs: tuple = ()
    pull: object = None
    stack: tuple = ()


def differentiable(rule):
    """Make a kernel from a rule, which gives the gradient of each input."""

    def kernel(op, keys, args):
        level, mine, values = unwrapped(op, args)
        result = op(*values)
        if not any(mine):
            return result
        inputs = tuple(arg.node if own else None for arg, own in zip(args, mine))
        level.calls += 1
        node = Node(level.calls, inputs, lambda g: rule(g, result, *values), thread.stack)
        return Wrapper(level, result, node=node)

    return kernel


def swap(x):
    """Transpose the last two dimensions."""
    dims = range(len(x.shape))
    return ops.permute(x, (*dims[:-2], dims[-1], dims[-2]))


def unexpanded(g, result, x, shape):
    """Sum up what `expand` repeated; `embed` puts a summed dimension back, with size 1."""
    for _ in range(len(shape) - len(x.shape)):
        g = ops.total(g, 0)
    for dim, size in enumerate(x.shape):
        if size != g.shape[dim]:
            g = ops.embed(ops.total(g, dim), dim, 0, 1)
    return (g,)


for _op, _rule in {
    ops.neg: lambda g, r, x: (-g,),
    ops.sin: lambda g, r, x: (g * ops.cos(x),),
    ops.cos: lambda g, r, x: (-(g * ops.sin(x)),),
    ops.exp: lambda g, r, x: (g * r,),
    ops.add: lambda g, r, x, y: (g, g),
    ops.mul: lambda g, r, x, y: (g * y, g * x),
    ops.matmul: lambda g, r, x, y: (g @ swap(y), swap(x) @ g),
    ops.reshape: lambda g, r, x, shape: (ops.reshape(g, x.shape),),
    ops.expand: unexpanded,
    ops.permute: lambda g, r, x, dims: (ops.permute(g, tuple(map(dims.index, range(len(dims))))),),
    ops.total: lambda g, r, x, dim: (ops.expand(ops.embed(g, dim, 0, 1), x.shape),),
    ops.select: lambda g, r, x, dim, i: (ops.embed(g, dim, i, x.shape[dim]),),
    ops.embed: lambda g, r, x, dim, i, n: (ops.select(g, dim, i),),
    ops.flip: lambda g, r, x: (g * 0.0,),
    ops.stack: lambda g, r, dim, *xs: (None, *(ops.select(g, dim, i) for i in range(len(xs)))),
}.items():
    _op.kernels[Key.GRAD] = differentiable(_rule)


def backward(node, gradient):
    """Go back from a node, the latest operators first, and return the gradient of each node."""
    gradients, todo = {node: gradient}, {node}
    while todo:
        node = max(todo, key=lambda n: n.order)
        todo.remove(node)
        with active(*node.stack):  # as it was in the forward
            pulled = node.pull(gradients[node]) if node.pull else ()
            for source, g in zip(node.inputs, pulled):
                if source is not None:
                    todo.add(source)
                    gradients[source] = gradients[source] + g if source in gradients else g
    return gradients


def grad(f):
    """Return the function that gives the gradient of f by its first argument."""

    def transformed(x, *rest):
        level = Grad()
        inputs = tree_map(lambda t: Wrapper(level, t, node=Node()), x)
        with active(*thread.stack, level):
            result = f(inputs, *rest)
        if result.shape != ():
            raise ValueError(f"grad is for one number, and this is of shape {result.shape}")
        gradients = backward(result.node, ops.Array(1.0)) if level.owns(result) else {}
        zero = ops.Array(0.0)
        return tree_map(lambda t: leave(gradients.get(t.node) or ops.expand(zero, t.shape)), inputs)

    return transformed
