# SPDX-License-Identifier: Apache-2.0
"""Bytes in Python's hands: what asks for them is no operator, and levels are told of it.

Why of resizes, the core says: Note [Resizes are operators].

Note [A storage that is read comes back]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
`copy.deepcopy`, `pickle` and `torch.save` of a tensor take its storage, ask for the address and
read. So these methods make the bytes resident first. They stay while the storage object lives,
since what more than its tensors hold is not evicted; `torch.save` holds all until it has written.

Note [An address that was asked for stays good]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
`tensor.data_ptr()` is asked by what launches kernels of its own (Triton does), to read there and
to write, and an array of `tensor.numpy()` may be written. A replay would undo such a write
without a word: no operator has made it. So what is asked for its address becomes resident, and
stays where it is with what it holds, as long as the program has it; so does what
`torch.autograd.graph.allow_mutation_on_saved_tensors` asks about, which tells tensors apart by
their addresses. To ask whether a tensor is pinned is the operator that does all that:
Note [What is asked before bytes are read]. Code in C++ asks nobody, and gets an error where a
tensor is evicted.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from .. import _C

F = TypeVar("F", bound=Callable[..., Any])


@functools.cache
def watch() -> None:
    """From now on, have storages tell the levels what is done to them. Once per process."""
    storage: Any = torch.UntypedStorage
    resize, copy = storage.resize_, storage.copy_

    @functools.wraps(resize)
    def resize_(self: torch.UntypedStorage, size: int, /) -> torch.UntypedStorage:
        if type(size) is int and size >= 0 and _C.resize_if_known(self, size):
            return self
        resize(self, size)
        return self

    @functools.wraps(copy)
    def copy_(self: torch.UntypedStorage, source: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(source, torch.UntypedStorage):
            _C.materialize_storage(source)
        return copy(self, source, *args, **kwargs)

    storage.resize_ = resize_
    storage.copy_ = copy_
    for name in ("data_ptr", "is_shared", "_write_file"):
        setattr(storage, name, _told(getattr(storage, name), _C.materialize_storage))
    # These move the bytes to shared memory.
    for name in ("_share_fd_cpu_", "_share_filename_cpu_"):
        setattr(storage, name, _told(getattr(storage, name), _C.materialize_storage, _C.note_move))

    tensor: Any = torch.Tensor
    tensor.data_ptr = _told(tensor.data_ptr, _keep)
    tensor.numpy = _told(tensor.numpy, _keep)
    graph: Any = torch.autograd.graph
    graph._get_tid = _told(graph._get_tid, _keep)
    graph._get_sid = _told(graph._get_sid, _keep)


def _told(method: F, *before: Callable[[Any], None]) -> F:
    @functools.wraps(method)
    def told(self: Any, *args: Any, **kwargs: Any) -> Any:
        for tell in before:
            tell(self)
        return method(self, *args, **kwargs)

    return told  # type: ignore[return-value]


# See Note [An address that was asked for stays good]
def _keep(tensor: torch.Tensor) -> None:
    if _C.has_key(tensor):
        tensor.is_pinned()
