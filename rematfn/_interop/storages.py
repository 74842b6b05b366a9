# SPDX-License-Identifier: Apache-2.0
"""Resizes of storages: methods of Python's, which levels are told of.

The reason is in the core: Note [Resizes are operators].
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from .. import _C


@functools.cache
def watch() -> None:
    """From now on, have storages tell the levels before their bytes go. Once per process."""
    storage: Any = torch.UntypedStorage
    resize = storage.resize_

    @functools.wraps(resize)
    def resize_(self: torch.UntypedStorage, size: int, /) -> torch.UntypedStorage:
        if type(size) is int and size >= 0 and _C.resize_if_known(self, size):
            return self
        resize(self, size)
        return self

    storage.resize_ = resize_
    # These move the bytes to shared memory.
    storage._share_fd_cpu_ = _moving(storage._share_fd_cpu_)
    storage._share_filename_cpu_ = _moving(storage._share_filename_cpu_)


def _moving(move: Any) -> Any:
    @functools.wraps(move)
    def told(self: torch.UntypedStorage, *args: Any, **kwargs: Any) -> Any:
        _C.note_move(self)
        return move(self, *args, **kwargs)

    return told
