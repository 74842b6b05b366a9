# SPDX-License-Identifier: Apache-2.0
"""How contents were made: versions refer to operations, and operations to versions."""

from __future__ import annotations

import weakref

from . import operators
from .dispatcher import Key, KeySet
from .operators import Array, Storage, read


class Version:
    """The contents of a storage, until the next write: what is evicted and made again."""

    def __init__(self, storage, producer=None, level=None, now=0):
        self.producer, self.level = producer, level  # both None: a constant, from outside
        self.nbytes, self.last_access = storage.nbytes, now
        self.storage = weakref.ref(storage)  # the program's, for as long as the program has it
        self.own = None if producer else storage  # one that the record keeps alive
        self.pending = 0  # so many queued replays will read it

    @property
    def place(self):
        return self.own or self.storage()

    @property
    def here(self):
        return self.place is not None and self.place.numbers is not None

    def overwritten(self):
        """Leave the program's storage, where another version lies from now on."""
        if self.producer is None:
            self.own = Storage(self.own.numbers.copy())
        self.storage = lambda: None

    def refill(self, storage):
        """Take the numbers of a storage that a replay has made."""
        if place := self.storage():
            place.numbers = storage.numbers
        else:  # the program has dropped it, and a replay wants it all the same
            self.own = storage


class Input:
    """Stands in an operation in the place of an array: a version, and where the array showed it."""

    def __init__(self, version, view):
        self.version, self.view = version, view

    def array(self, copy):
        place = self.version.place
        storage = Storage(place.numbers.copy()) if copy else place
        return Array(read(storage, self.view), storage)


class Operation:
    """A recorded call of an operator. It refers to what it read, and weakly to what it made."""

    def __init__(self, op, args, order):
        self.op, self.args, self.order = op, args, order
        self.outputs = []
        self.state = operators.generator.bit_generator.state if op.random else None

    @property
    def reads(self):
        return [arg.version for arg in self.args if isinstance(arg, Input)]

    def run(self):
        """Run it again, on copies of what it overwrites, and return the storages that it made."""
        args = [
            arg.array(copy=place in self.op.writes) if isinstance(arg, Input) else arg
            for place, arg in enumerate(self.args)
        ]
        bits = operators.generator.bit_generator
        present, bits.state = bits.state, self.state or bits.state
        result = self.op.redispatch(KeySet.of(Key.CPU), tuple(args))
        bits.state = present
        return made_by(self.op, args, result)


def made_by(op, args, result):
    """Return the storages whose contents an operator has made: what it wrote, or a new one."""
    written = [args[place].storage for place in op.writes]
    known = [arg.storage for arg in args if isinstance(arg, Array)]
    return written if result.storage in known else [*written, result.storage]


def queue_of(wanted):
    """Return the operations that bring these versions back, in the order of the program."""
    found, todo = {}, list(wanted)
    while todo:
        version = todo.pop()
        if not version.here and version.producer.order not in found:
            found[version.producer.order] = version.producer
            todo += version.producer.reads
    return [found[order] for order in sorted(found)]
