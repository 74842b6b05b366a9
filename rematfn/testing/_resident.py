# SPDX-License-Identifier: Apache-2.0
"""What the operating system counts of a process's memory, and kills for."""

from __future__ import annotations

import ctypes
import gc
from pathlib import Path

from .. import _C


class ResidentPeak:
    """The resident set of this process: as a ``with`` block begins, and at its highest inside.

    It includes what libraries and the interpreter hold, and what allocators keep for later. The
    figures are the kernel's, in whole pages. Each block resets the kernel's high-water mark: if
    blocks are nested, `after` of the outer one is the highest since the inner one began. Where the
    kernel has no such figures, both are None.
    """

    def __init__(self) -> None:
        self.before: int | None = None
        self.after: int | None = None

    @property
    def added(self) -> int | None:
        """Bytes that the resident set rose by."""
        return None if self.before is None or self.after is None else self.after - self.before

    def __enter__(self) -> ResidentPeak:
        try:
            Path("/proc/self/clear_refs").write_text("5")
        except OSError:
            return self
        self.before = _status("VmRSS")
        return self

    def __exit__(self, *exception: object) -> None:
        if self.before is not None:
            self.after = _status("VmHWM")


def give_back() -> None:
    """Give back to the system what the C library and rematfn keep for later."""
    gc.collect()
    _C.testing.give_back_pages()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
    if trim is not None:
        trim(0)


def _status(field: str) -> int | None:
    """Return the bytes that the kernel names in this process's status."""
    status = Path("/proc/self/status").read_text()
    found = status.split(f"{field}:")
    return int(found[1].split()[0]) * 1024 if len(found) > 1 else None
