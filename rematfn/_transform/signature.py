# SPDX-License-Identifier: Apache-2.0
"""Signatures: which calls of a function are alike, so that one's peak tells the other's."""

import functools
import hashlib
import itertools
import sys
import types
import weakref
from collections import deque
from collections.abc import Hashable, Iterable, Iterator
from typing import Any, NamedTuple, TypeAlias

import torch

from .. import _C

# What is looked at of one call's arguments.
_MOST_OBJECTS = 4096
_MOST_DEPTH = 16
_LONG_TEXT = 256
_LONG_KEY = 256  # of more parts than that a digest is kept
_OF_MODULES = ("_parameters", "_buffers", "_modules")  # the rest of the kind is hooks

_Places: TypeAlias = tuple[tuple[int, str], ...]

# Note [What makes two calls alike]
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
# The memory of a call depends on the sizes of its tensors, and on the way that it takes. Were every
# argument part of the key, a step counter would make each call a new one, and nothing would ever be
# known of it. Were only tensors, a flag that turns half of the function off would go unnoticed. So:
#   - Tensors count by their metadata, wherever they are: in containers, in dataclasses, among the
#     attributes of any other object. Text and booleans count by value, types by their name.
#   - Numbers do not count. They choose among what is known: the same numbers first, else the
#     latest.
#   - No code of the user's is run to find them, such as a property or an iterator of a mapping:
#     only what C has laid down is read, the instance's dictionary and its slots. A cycle ends where
#     it began, and beyond so many objects, or so deep, nothing more is looked at.
# Two calls with one key may still go different ways. That costs time and nothing else:
# See Note [Guided, never trusted].
#
# The key holds no object of the user's, only names and numbers: it lives on after the call. Of a
# long one a digest is kept.


class Signature(NamedTuple):
    """What is known of a call before it runs."""

    key: tuple[Hashable, ...]  # what two calls have in common whose memory is alike
    around: tuple[Hashable, ...]  # the part of it that is about what surrounds the call
    builds_graphs: bool  # it runs in grad mode
    numbers: int  # a hash of those among the arguments
    nbytes: int  # of the tensors among them


def signature_of(args: tuple[Any, ...], kwargs: dict[str, Any], owner: Any = None) -> Signature:
    """Return the signature of a call with these arguments, under the grad mode and transforms now.

    ``owner``: a module whose ``forward`` is called, which is in training mode, or is not.
    """
    builds_graphs = torch.is_grad_enabled()
    # Once asked, functorch keeps a state for the thread, which autograd copies for each node.
    interpreters = torch._C._functorch.get_interpreter_stack() if _C.knows_functorch() else None
    around = (
        builds_graphs,
        bool(owner.__dict__.get("training")) if isinstance(owner, torch.nn.Module) else None,
        *(str(interpreter.key()) for interpreter in interpreters or ()),
    )
    with torch._C.DisableTorchFunction():
        walk = _Walk()
        walk.see_all(args, 0)
        walk.see_pairs(kwargs, 0)
    key = (*around, *walk.key)
    try:
        hash(key)
    except TypeError:  # sizes that are symbols
        key = (*around, *map(repr, walk.key))
    if len(key) > _LONG_KEY:
        key = (*around, hashlib.blake2b(repr(key).encode("utf-8", "replace")).digest())
    return Signature(key, around, builds_graphs, hash(tuple(walk.numbers)), int(walk.nbytes))


class _Walk:
    """One look at the arguments of a call."""

    def __init__(self) -> None:
        self.key: list[Hashable] = []
        self.numbers: list[Any] = []
        self.nbytes = 0
        self._left = _MOST_OBJECTS
        self._seen: dict[int, int] = {}  # ids of what the call holds while we look

    def see_all(self, values: Iterable[Any], depth: int) -> None:
        for value in values:
            if self._left <= 0:
                return
            self.see(value, depth + 1)

    def see_pairs(self, pairs: dict[Any, Any], depth: int) -> None:
        for name, value in list(itertools.islice(dict.items(pairs), self._left)):
            if self._left <= 0:
                return
            if type(name) is str:
                self.key.append(name)
            elif type(name) is int or type(name) is float:
                self._see_number(name)
            else:
                self.key.append(_name_of(type(name)))
            self.see(value, depth + 1)

    def see(self, x: Any, depth: int) -> None:
        self._left -= 1
        kind = type(x)
        if isinstance(x, torch.Tensor):
            self._see_tensor(x)
        elif x is None or kind is bool:
            self.key.append(x)
        elif kind is int or kind is float or kind is complex:
            self._see_number(x)
        elif kind is str or kind is bytes:
            self.key.append(x if len(x) <= _LONG_TEXT else (len(x), hash(x)))
        elif isinstance(x, int):  # of a class of the user's, as the others here
            self._see_number(int.__int__(x))
        elif isinstance(x, float):
            self._see_number(float.__float__(x))
        elif isinstance(x, str):
            self.see(str.__str__(x), depth)
        else:
            self._see_object(x, kind, depth)

    def _see_number(self, x: complex) -> None:
        # With its place. As text: to Python -1 and -2 have one hash, and no NaN is another.
        self.numbers.append((len(self.key), repr(x)))

    def _see_tensor(self, x: torch.Tensor) -> None:
        try:
            shape: tuple[int, ...] = x.shape
            self.nbytes += x.nbytes
        except RuntimeError:  # it is ragged, or sparse
            shape = ()
        self.key.append((shape, x.dtype, x.device, x.requires_grad))
        if type(x) is not torch.Tensor and type(x) is not torch.nn.Parameter:
            self.key.append(_name_of(type(x)))

    def _see_object(self, x: Any, kind: type, depth: int) -> None:
        before = len(self._seen)
        number = self._seen.setdefault(id(x), before)
        if number < before:
            self.key.append(("again", number))
            return
        self.key.append(_name_of(kind))
        if depth > _MOST_DEPTH:
            return
        numpy = sys.modules.get("numpy")
        if isinstance(x, (list, tuple, deque)):
            base: Any = list if isinstance(x, list) else tuple if isinstance(x, tuple) else deque
            # Not by the class itself, whose iterator may be the user's.
            self.see_all(list(itertools.islice(base.__iter__(x), self._left)), depth)
        if isinstance(x, dict):
            self.see_pairs(x, depth)
        elif kind is functools.partial:
            self.see_all((x.func, x.args, x.keywords), depth)
        elif kind is types.MethodType:
            self.see_all((x.__func__, x.__self__), depth)
        elif isinstance(x, (type, types.FunctionType, types.BuiltinFunctionType)):
            self.key.append(_name_of(x))
        elif kind.__module__ == "torch":  # a dtype, a device, a layout
            self.key.append(str(x))
        elif numpy is not None and isinstance(x, (numpy.ndarray, numpy.generic)):
            self.key.append((x.shape, str(x.dtype)))
            self.nbytes += x.nbytes
        elif isinstance(x, torch.nn.Module):
            state = object.__getattribute__(x, "__dict__")
            self.see_pairs({n: state[n] for n in state if n[:1] != "_" or n in _OF_MODULES}, depth)
        elif not isinstance(x, types.ModuleType):
            for found in _attributes_of(x, kind):
                if type(found) is dict:
                    self.see_pairs(found, depth)
                else:
                    self.see(found, depth + 1)
        self.key.append(...)  # the end of what is inside


def _name_of(x: Any) -> str:
    return f"{x.__module__}.{x.__qualname__}"


# By class: where in its order of bases, under which name. A descriptor would hold the class.
_known_attributes: weakref.WeakKeyDictionary[type, _Places] = weakref.WeakKeyDictionary()


def _attributes_of(x: Any, kind: type) -> Iterator[Any]:
    """Yield the instance's dictionary and what is in its slots; no code of the class runs."""
    places = _known_attributes.get(kind)
    if places is None:
        places = _known_attributes[kind] = tuple(_places_in(kind))
    for position, name in places:
        member = _class_dictionary(kind.__mro__[position])[name]
        try:
            yield type(member).__get__(member, x)
        except AttributeError:  # a slot that is empty
            continue


def _places_in(kind: type) -> Iterator[tuple[int, str]]:
    for position, base in enumerate(kind.__mro__):
        for name, member in _class_dictionary(base).items():
            is_laid_down = type(member) is types.MemberDescriptorType
            is_dictionary = name == "__dict__" and (
                is_laid_down or type(member) is types.GetSetDescriptorType
            )
            if is_dictionary or (is_laid_down and base.__flags__ & _ON_HEAP):
                yield position, name


_ON_HEAP = 1 << 9  # a class that Python code has made
_class_dictionary = type.__dict__["__dict__"].__get__
