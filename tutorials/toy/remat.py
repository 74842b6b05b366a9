# SPDX-License-Identifier: Apache-2.0
"""remat: a level that keeps a budget of bytes. It forgets numbers, and computes them again."""

from __future__ import annotations

import math
import weakref

from .dispatcher import Key, KeySet, fallbacks
from .levels import Level, active, leave, leaving, thread, tree_map
from .operators import Array


class Remat(Level):
    """It wraps nothing. What it makes are arrays with its key, which know how they were made."""

    key = Key.REMAT
    included = KeySet.of(Key.REMAT)

    def __init__(self, budget):
        self.budget, self.around = budget, running()[-1] if running() else None
        # This level and those around it: a result counts in the budget of each.
        self.chain = [self, *(self.around.chain if self.around else ())]
        self.arrays = weakref.WeakSet()  # made here, or in a level inside
        self.clock = self.peak = self.evictions = self.replays = 0

    def run(self, op, args):
        """Run an operator of the program, and note what it made of what."""
        self.patience = 1000  # so many replays for one operator, and no more
        result = self.compute(op, args)
        result.level, result.made_by, result.pins = self, (op, args), 0
        result.keys |= KeySet.of(Key.REMAT)
        result.cost = result.nbytes + sum(array.nbytes for array in arrays_in(args))
        result.made_at = result.last_access = self.now(result.cost)
        for level in self.chain:
            level.arrays.add(result)
        return result

    def compute(self, op, args):
        """Bring the arguments back, make room for the result, and run the kernel."""
        read = [array for array in arrays_in(args) if array.level]
        for array in read:
            array.pins += 1  # to go last, while the others are made again
        # A replay may evict one that is back already. So we look at all again.
        while missing := [array for array in read if array.data is None]:
            missing[0].level.replay(missing[0])
        for level in self.chain:
            level.make_room(op, 8 * math.prod(op.shape(*args)), read)  # a float has 8 bytes
        for array in read:
            array.pins -= 1
            array.last_access = self.now()
        return op.redispatch(KeySet.of(Key.CPU), args)

    def replay(self, array):
        self.replays, self.patience = self.replays + 1, self.patience - 1
        if self.patience < 0:
            raise MemoryError("replays evict what other replays need, without end")
        array.data = self.compute(*array.made_by).data

    def make_room(self, op, nbytes, read):
        """Evict what has the lowest score, but nothing that this very operator reads."""
        here = {array for array in self.arrays if array.data is not None}
        while (need := nbytes + sum(array.nbytes for array in here)) > self.budget:
            if not (may_go := here.difference(read)):
                raise MemoryError(f"{op.name} needs {need} bytes, and the budget is {self.budget}")
            here.remove(victim := min(may_go, key=self.score))
            victim.data = None
            self.evictions += 1
        self.peak = max(self.peak, need)

    def score(self, array):
        """What bringing it back will cost, for each byte and each moment since its last use."""
        away, todo = set(), [array]
        while todo:
            away.add(one := todo.pop())
            todo += {a for a in arrays_in(one.made_by[1]) if a.data is None} - away
        unused = self.now() - array.last_access
        price = sum(a.cost for a in away) / ((1 + array.nbytes) * (1 + unused))
        return array.pins > 0, price, array.made_at

    def now(self, passed=0):
        """Read the clock, which the outermost level has. It counts the bytes that calls touch."""
        self.chain[-1].clock += passed
        return self.chain[-1].clock

    def seal(self, array):
        """Let an array leave: to the level around, or with its numbers and without a way back."""
        if self in thread.stack:  # its function still runs
            return
        if self.around is None:
            self.patience = 1000
            if array.data is None:
                self.replay(array)
            array.keys -= KeySet.of(Key.REMAT)
            array.made_by = None
        self.arrays.discard(array)
        array.level = self.around
        leave(array)


def arrays_in(args):
    return [arg for arg in args if isinstance(arg, Array)]


def running():
    return [level for level in thread.stack if isinstance(level, Remat)]


def at_remat(op, keys, args):
    """Give the operator to the innermost level of remat. If none is active, its arguments leave."""
    if running():
        return running()[-1].run(op, args)
    return op.redispatch(keys.below(Key.REMAT), tuple(map(leave, args)))


def seal_if_ours(tensor):
    if isinstance(tensor, Array) and tensor.level:
        tensor.level.seal(tensor)


fallbacks[Key.REMAT] = at_remat
leaving.append(seal_if_ours)


def remat(f, budget):
    """Return f, to be run with so many bytes at most for what it makes."""

    def transformed(*args):
        transformed.level = level = Remat(budget)
        with active(*thread.stack, level):
            result = f(*args)
        return tree_map(leave, result)

    return transformed
