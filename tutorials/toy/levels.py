# SPDX-License-Identifier: Apache-2.0
"""The stack of levels, and tensors that are wrapped by a level."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from .dispatcher import Key, KeySet, Thread, fallbacks, thread
from .operators import Tensor

Thread.stack = ()  # the levels that are active, the innermost last
Thread.in_charge = None  # the level that the front has just called


class Level:
    """One active application of a transform."""

    key: Key
    included = KeySet.of(Key.LEVELS)  # what the thread includes while this level is active

    def owns(self, tensor):
        return isinstance(tensor, Wrapper) and tensor.level is self


class Wrapper(Tensor):
    """A tensor as a level sees it. Its value belongs to the levels around that one."""

    def __init__(self, level, value, shape=None, node=None):
        self.level, self.value, self.node = level, value, node
        self.keys = KeySet.of(level.key)
        self.shape = value.shape if shape is None else shape


@contextmanager
def active(*levels: Level, in_charge: Level | None = None) -> Iterator[None]:
    """Until the block ends, let these be the stack, and include their keys."""
    before = thread.stack, thread.in_charge, thread.included
    thread.stack, thread.in_charge = levels, in_charge
    for level in before[0]:
        thread.included -= level.included
    for level in levels:
        thread.included |= level.included
    try:
        yield
    finally:
        thread.stack, thread.in_charge, thread.included = before


def front(op, keys, args):
    """Let the innermost level interpret; what it calls is for the levels around it."""
    level = [level for level in thread.stack if Key.LEVELS in level.included][-1]
    with active(*(other for other in thread.stack if other is not level), in_charge=level):
        return op.redispatch(KeySet.of(level.key), args)


fallbacks[Key.LEVELS] = front


def unwrapped(op, args):
    """Return the level in charge, which arguments it wrapped, and what was inside."""
    level, thread.in_charge = thread.in_charge, None  # for this kernel only
    if level is None:
        raise RuntimeError(f"{op.name}: an argument is of a level that has ended")
    mine = [level.owns(arg) for arg in args]
    return level, mine, [arg.value if own else arg for arg, own in zip(args, mine)]


def tree_map(f, tree):
    return tuple(tree_map(f, t) for t in tree) if isinstance(tree, tuple) else f(tree)


leaving = []  # functions that are told of each array that leaves a transform


def leave(tensor):
    """Return a transform's result, and tell whoever wants to know."""
    inner = tensor
    while isinstance(inner, Wrapper):
        inner = inner.value
    for tell in leaving:
        tell(inner)
    return tensor
