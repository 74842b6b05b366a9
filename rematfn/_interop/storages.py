# SPDX-License-Identifier: Apache-2.0
"""Bytes in Python's hands: what asks for them is no operator, and levels are told of it.

Why of resizes, the core says: Note [Resizes are operators].

Note [A storage that is read comes back]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
`copy.deepcopy`, `pickle` and `torch.save` of a tensor take its storage, ask for the address and
read. So these methods make the bytes resident first. They stay while the storage object is held,
since what more than its tensors hold is not evicted; `torch.save` holds all until it has written.
A question (`y.untyped_storage().nbytes()`) holds nothing any more once it is answered. What an
object writes, or a tensor that is made over it where no level sees that, no replay makes again:
such a write has the bytes stay from then on, as has the address.

Note [An address that was asked for stays good]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
`tensor.data_ptr()` is asked by what launches kernels of its own (Triton does), to read there and
to write. A replay would silently undo such a write: no operator has made it. So what is
asked for its address becomes resident, and stays where it is with what it holds, as long as the
program has it; so does what `apply_`, `map_` and `map2_` read and write element by element, and
what `torch.autograd.graph.allow_mutation_on_saved_tensors` asks about, which tells tensors apart by
their addresses. To ask whether a tensor is pinned is the operator
that does all that: Note [What is asked before bytes are read]. Code in C++ asks nobody, and gets
an error where a tensor is evicted.

Note [Arrays are seldom written]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
An array of `tensor.numpy()` may be written, too, but most are looked at, by what logs or draws.
To keep what they show for good would cost what such programs have to save. The mark that torch
leaves on the storage has it stay while a tensor of it lives. So its bytes are hashed when the
array is made, and again before an operator reads them: if they are others, somebody has written,
and from then on they stay. An operator that had read the old ones is not replayed from these:
Note [Evidence of contents].
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import has_torch_function_unary

from .. import _C


@functools.cache
def watch() -> None:
    """From now on, have storages tell the levels what is done to them. Once per process."""
    storage: Any = torch.UntypedStorage
    around(storage, "resize_", _resize)
    storage.__new__ = staticmethod(_new_counted)
    tell(storage, "copy_", _copies)
    for name in ("is_shared", "_write_file", "__getitem__"):
        tell(storage, name, lambda storage, *_, **__: _C.materialize_storage(storage))
    for name in ("data_ptr", "fill_", "__setitem__", "byteswap", "_set_from_file"):
        tell(storage, name, lambda storage, *_, **__: _C.keep_storage(storage))
    # These move the bytes to shared memory.
    for name in ("_share_fd_cpu_", "_share_filename_cpu_"):
        tell(storage, name, _moves)
    tell(torch.Tensor, "set_", _stands_over)
    for name in ("data_ptr", "apply_", "map_", "map2_"):
        tell(torch.Tensor, name, _keep)
    tell(torch.Tensor, "numpy", then=_note_array)
    for name in ("_get_tid", "_get_sid"):
        tell(torch.autograd.graph, name, _keep)
    for name in ("new", "new_tensor"):
        around(torch.Tensor, name, _build_as_without_key)


def around(owner: Any, name: str, run: Callable[..., Any]) -> None:
    """Have a method, or a function, be run by ``run``, which is given it and its arguments."""
    method = getattr(owner, name)

    @functools.wraps(method)
    def called(*args: Any, **kwargs: Any) -> Any:
        return run(method, *args, **kwargs)

    if owner in (torch.Tensor, torch.UntypedStorage):  # pickle looks for it there
        called.__module__, called.__qualname__ = "torch", f"{owner.__name__}.{name}"
    setattr(owner, name, called)


def tell(
    owner: Any,
    name: str,
    first: Callable[..., object] | None = None,
    then: Callable[[Any, Any], object] | None = None,
) -> None:
    """Have a method, or a function, tell what it is given before it runs, and its result after."""

    def run(method: Any, told: Any, /, *args: Any, **kwargs: Any) -> Any:
        if first is not None:
            first(told, *args, **kwargs)
        result = method(told, *args, **kwargs)
        if then is not None:
            then(told, result)
        return result

    around(owner, name, run)


def _resize(resize: Any, storage: torch.UntypedStorage, size: int, /) -> torch.UntypedStorage:
    if not (type(size) is int and size >= 0 and _C.resize_if_known(storage, size)):
        resize(storage, size)
    return storage


def _new_counted(kind: Any, /, *args: Any, **kwargs: Any) -> torch.UntypedStorage:
    """Make a storage whose bytes count, as a tensor's do: torch takes its default allocator."""
    if kwargs.get("device") in (None, "cpu", torch.device("cpu")) and "allocator" not in kwargs:
        kwargs.pop("device", None)
        kwargs["allocator"] = _C.cpu_allocator()
    made: torch.UntypedStorage = torch._C.StorageBase.__new__(kind, *args, **kwargs)
    return made


def _moves(storage: torch.UntypedStorage, *_: Any, **__: Any) -> None:
    _C.materialize_storage(storage)
    _C.note_move(storage)  # what it holds is taken down before


def _copies(storage: torch.UntypedStorage, source: Any, *_: Any, **__: Any) -> None:
    _C.keep_storage(storage)
    if isinstance(source, torch.UntypedStorage):
        _C.materialize_storage(source)


def _stands_over(_: Any, *args: Any, **__: Any) -> None:
    source = getattr(args[0], "_untyped_storage", args[0]) if args else None
    if isinstance(source, torch.UntypedStorage) and not _C.is_intercepting():
        _C.keep_storage(source)


# See Note [An address that was asked for stays good]
def _keep(*args: Any, **_: Any) -> None:
    for x in args:
        # A wrapper of functorch's has no address, and torch says so.
        is_tensor = isinstance(x, torch.Tensor) and _C.has_key(x)
        if is_tensor and not torch._C._functorch.is_functorch_wrapped_tensor(x):
            x.is_pinned()


# See Note [Arrays are seldom written]
def _note_array(tensor: torch.Tensor, _: object) -> None:
    if _C.has_key(tensor):
        _C.note_array(tensor)


def _build_as_without_key(build: Any, tensor: torch.Tensor, /, *args: Any, **kwargs: Any) -> Any:
    """Have a legacy constructor, which reads the device off the keys, read none of ours there."""
    # A subclass or a mode comes first, and comes here again.
    if _C.has_key(tensor) and not has_torch_function_unary(tensor):
        with _C.Outside():
            tensor = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return build(tensor, *args, **kwargs)
