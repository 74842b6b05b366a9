# SPDX-License-Identifier: Apache-2.0
"""The dispatcher: operators, keys, key sets, and which kernel runs when an operator is called."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum


class Key(IntEnum):
    """Reasons to treat a call in a way of its own, the highest last."""

    CPU = 0  # the arguments are arrays: compute
    REMAT = 1  # keep a budget
    GRAD = 2  # an argument is wrapped by a level of grad
    VMAP = 3  # an argument is wrapped by a level of vmap
    ABOVE = 4  # notebook 8 puts a level of remat here, to see what comes of it
    LEVELS = 5  # levels are active: ask the innermost one


@dataclass(frozen=True)
class KeySet:
    """A set of keys: one bit for each."""

    bits: int = 0

    @staticmethod
    def of(*keys: Key) -> KeySet:
        return KeySet(sum(1 << key for key in set(keys)))

    def __or__(self, other: KeySet) -> KeySet:
        return KeySet(self.bits | other.bits)

    def __and__(self, other: KeySet) -> KeySet:
        return KeySet(self.bits & other.bits)

    def __sub__(self, other: KeySet) -> KeySet:
        return KeySet(self.bits & ~other.bits)

    def __iter__(self) -> Iterator[Key]:
        """From the highest to the lowest."""
        return (key for key in reversed(Key) if self.bits >> key & 1)

    def below(self, key: Key) -> KeySet:
        """Those lower than `key`."""
        return KeySet(self.bits & ((1 << key) - 1))


class Thread(threading.local):
    """What a thread adds to the keys of each call, and what it takes away."""

    included = excluded = KeySet()


thread = Thread()


@contextmanager
def keys_changed(include: KeySet = KeySet(0), exclude: KeySet = KeySet(0)) -> Iterator[None]:
    """Until the block ends, include these keys in all calls of this thread, or exclude them."""
    before = thread.included, thread.excluded
    thread.included, thread.excluded = before[0] | include, before[1] | exclude
    try:
        yield
    finally:
        thread.included, thread.excluded = before


def fallthrough(op: Operator, keys: KeySet, args: tuple) -> None:
    """Stand in a table for "nothing to do at this key"; it is never run."""


def unboxed(kernel: Callable) -> Callable:
    """Make a boxed kernel from one that takes an operator's own arguments."""
    return lambda op, keys, args: kernel(*args)


fallbacks: dict[Key, Callable] = {}  # for operators without a kernel of their own at a key


class Operator:
    """A name, and a table with at most one kernel for each key.

    Kernels are boxed: they take the operator, the keys of the call, and its arguments as one tuple.
    So one kernel can serve all operators.
    """

    def __init__(self, name: str):
        self.name = name
        self.kernels: dict[Key, Callable] = {}

    def entry(self, key: Key) -> Callable | None:
        """Return what stands in the table at a key, or None."""
        return self.kernels.get(key) or fallbacks.get(key)

    def mask(self) -> KeySet:
        """Return the keys at which the table does not say `fallthrough`."""
        return KeySet.of(*(key for key in Key if self.entry(key) is not fallthrough))

    def __call__(self, *args: object) -> object:
        """Work out the keys of this call, and run the kernel of the highest one."""
        keys = thread.included
        for arg in args:
            keys |= getattr(arg, "keys", KeySet())
        return self.redispatch((keys - thread.excluded) & self.mask(), args)

    def redispatch(self, keys: KeySet, args: tuple) -> object:
        """Run the kernel of the highest of these keys."""
        for key in keys:
            kernel = self.entry(key)
            if kernel is None:
                raise NotImplementedError(f"{self.name} has no kernel for {key.name}")
            return kernel(self, keys, args)
        raise NotImplementedError(f"this call of {self.name} has no key")
