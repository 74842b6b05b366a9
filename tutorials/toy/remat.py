# SPDX-License-Identifier: Apache-2.0
"""remat: a level that keeps a budget of bytes. It evicts versions, and replays operations."""

from __future__ import annotations

import math
import weakref

from .dispatcher import Key, KeySet, fallbacks
from .levels import Level, active, leave, leaving, thread, tree_map
from .lineage import Input, Operation, Version, made_by, queue_of
from .operators import Array


class Step:
    """The journey of one operator under its level."""

    def __init__(self, level, op, args):
        self.level, self.op, self.args = level, op, args
        self.outermost = level.outermost
        arrays = [arg for arg in args if isinstance(arg, Array)]
        self.reads = [level.version_of(array.storage) for array in arrays]
        self.written = [args[place].storage for place in op.writes]
        self.makes = 8 * math.prod(op.shape(*args)) if op.shape else 0  # a float has 8 bytes

    def run(self):
        self.require_room()
        self.bring_back()
        self.save_what_is_overwritten()
        self.make_operation()
        self.make_room(self.makes)
        self.run_kernel()
        self.take_results()
        return self.result

    def require_room(self):
        """Refuse before anything is touched, if inputs and results alone are too much."""
        for level in self.level.around:
            inputs = sum(v.nbytes for v in set(self.reads) if v in level.versions)
            if (need := inputs + self.makes) > level.budget:
                raise MemoryError(f"{self.op.name} needs {need} bytes, of {level.budget}")

    def bring_back(self):
        self.level.materialize(self.reads)

    def make_room(self, nbytes):
        for level in self.level.around:
            level.make_room(self.op, nbytes, self.reads)

    def save_what_is_overwritten(self):
        """Copy constants that the operator is about to write: nobody could make them again."""
        for storage in self.written:
            if storage.version is None:
                constant = self.outermost.outside.pop(id(storage))
                self.make_room(constant.nbytes)
                constant.overwritten()
                for level in self.level.around:
                    level.versions.add(constant)

    def make_operation(self):
        """Record the call, with versions in the place of arrays."""
        for level in self.level.around:
            level.operators += 1
        reads = iter(self.reads)
        args = [Input(next(reads), a.view) if isinstance(a, Array) else a for a in self.args]
        self.operation = Operation(self.op, args, order=self.outermost.operators)
        self.operation.nbytes = self.makes + sum(storage.nbytes for storage in self.written)
        self.operation.cost = self.makes + sum(version.nbytes for version in self.reads)

    def run_kernel(self):
        self.result = self.op.redispatch(KeySet.of(Key.CPU), self.args)

    def take_results(self):
        """Give new contents a version, and the result the key if its storage has one."""
        now = self.outermost.clock = self.outermost.clock + self.operation.cost
        for version in self.reads:
            version.last_access = now
        for storage in made_by(self.op, self.args, self.result):
            version = Version(storage, self.operation, self.level, now)
            self.operation.outputs.append(weakref.ref(version))
            if storage in self.written and storage.version is None:
                continue  # from outside: what lies there now is the caller's
            if storage.version:
                storage.version.overwritten()
            storage.version = version
            for level in self.level.around:
                level.versions.add(version)
        if self.result.storage.version:
            self.result.keys |= KeySet.of(Key.REMAT)


class Remat(Level):
    """It wraps nothing. What it makes are arrays with its key, on storages that have a version."""

    key = Key.REMAT
    included = KeySet.of(Key.REMAT)
    step = Step

    def __init__(self, budget=math.inf):
        self.budget, self.enclosing = budget, running()[-1] if running() else None
        # This level and those around it: a version counts in the budget of each.
        self.around = [self, *(self.enclosing.around if self.enclosing else ())]
        self.outermost = self.around[-1]  # it has the clock of all
        self.versions = weakref.WeakSet()  # made here, or in a level inside
        self.outside = weakref.WeakValueDictionary()  # constants, by the address of their storage
        self.clock = self.operators = self.evictions = self.replays = self.peak = 0

    def run(self, op, args):
        return self.step(self, op, args).run()

    def version_of(self, storage):
        """Return what lies in a storage now. What no level has made is a constant."""
        constants = self.outermost.outside
        return storage.version or constants.setdefault(id(storage), Version(storage))

    @property
    def resident(self):
        return sum(version.nbytes for version in self.versions if version.here)

    def may_go(self, version):
        return version.here and version.producer is not None and not version.place.lent

    def score(self, version):
        """What it cost, for each byte and each moment since its last use."""
        age = self.outermost.clock - version.last_access
        return version.producer.cost / (version.nbytes * (1 + age))

    def make_room(self, op, nbytes, keep):
        """Evict the candidates with the lowest scores, those that replays wait for last."""
        while (need := self.resident + nbytes) > self.budget:
            if not (candidates := set(filter(self.may_go, self.versions)).difference(keep)):
                raise MemoryError(f"{op.name} needs {need} bytes, and the budget is {self.budget}")
            self.evict(
                min(candidates, key=lambda v: (v.pending > 0, self.score(v), v.producer.order))
            )
        self.peak = max(self.peak, need)

    def evict(self, version):
        version.place.numbers = version.own = None
        self.evictions += 1

    def materialize(self, wanted):
        """Bring versions back. A replay may evict what is back already, so we look again."""
        self.patience = 10_000  # so many replays, and no more
        while missing := [version for version in wanted if not version.here]:
            operations = queue_of(missing)
            reads = [*wanted, *(read for operation in operations for read in operation.reads)]
            for version in reads:
                version.pending += 1
            for operation in operations:
                if all(version.here for version in operation.reads):
                    self.replay(operation)
                for version in operation.reads:
                    version.pending -= 1
                    if not version.pending and version.producer and version.storage() is None:
                        version.own = None  # nobody else is going to read it
            for version in wanted:
                version.pending -= 1  # until we look again

    def replay(self, operation):
        self.replays, self.patience = self.replays + 1, self.patience - 1
        if self.patience < 0:
            raise MemoryError("replays evict what other replays need, without end")
        missing = [v for output in operation.outputs if (v := output()) and not v.here]
        for level in missing[0].level.around:
            level.make_room(operation.op, operation.nbytes, operation.reads)
        for output, storage in zip(operation.outputs, operation.run()):
            if output() in missing:
                output().refill(storage)

    def seal(self, array):
        """Let an array leave: to the level around, or with its numbers and without a way back."""
        if self in thread.stack:  # its function still runs
            return
        version = array.storage.version
        self.versions.discard(version)
        if self.enclosing:
            version.level = self.enclosing
            leave(array)
        else:
            self.materialize([version])
            version.producer, version.own = None, array.storage  # a constant
            self.outside[id(array.storage)], array.storage.version = version, None


def running():
    return [level for level in thread.stack if isinstance(level, Remat)]


def at_remat(op, keys, args):
    """Give the operator to the innermost level of remat, if one is active."""
    args = tuple(map(leave, args))  # what is of a level that has ended leaves it
    if running():
        return running()[-1].run(op, args)
    return op.redispatch(keys.below(Key.REMAT), args)


def seal_if_ours(tensor):
    if isinstance(tensor, Array) and tensor.storage.version:
        tensor.storage.version.level.seal(tensor)
        if tensor.storage.version is None:
            tensor.keys -= KeySet.of(Key.REMAT)


fallbacks[Key.REMAT] = at_remat
leaving.append(seal_if_ours)


def remat(f, budget=math.inf, kind=Remat):
    """Return f, to be run with so many bytes at most for what it makes."""

    def transformed(*args):
        transformed.level = level = kind(budget)
        with active(*thread.stack, level):
            result = f(*args)
        return tree_map(leave, result)

    return transformed
