# SPDX-License-Identifier: Apache-2.0
"""Tiers: where values go that leave their device."""

from __future__ import annotations

import math
import os
import shutil
import tempfile
import threading
from pathlib import Path
from typing import Final, SupportsIndex, TypeAlias

from .. import _C
from .._errors import OffloadError
from .budget import parse_budget

_ACCEPTED: Final = """
A tier is one of
  None, "disk"               a file in the folder for temporary files
  "/scratch", Path("/scratch")  a file in that folder
  rematfn.Disk("/scratch", "64GiB")  the same, with a cap"""


class Disk:
    """A file that values on the CPU are moved to, and come back from.

    The file has no name, so that nothing of it is left when the process ends, however it ends; only
    this process can read it. It is written and read past the page cache where the file system can
    do that, since what lies in the page cache is memory that is not saved. Functions that were
    given the same object share its file, its budget and its threads; a copy of a model
    (:func:`copy.deepcopy`) is such another function.

    Args:
        path: An existing folder, on a disk: one that lies in memory (tmpfs) is refused. None: the
            folder for temporary files, or else ``/var/tmp`` or the current one, whichever is the
            first on a disk.
        budget: The most bytes that may lie there at once, as :func:`remat` takes them: ``4096``,
            ``"64GiB"``. A hard cap: what does not fit stays where it is. Values are kept in units
            of 4 KiB. None: half of what is free when the first value is moved there.
        verify: Compare a checksum of what comes back with that of what left.
        bandwidth: The most bytes per second in each direction, for a disk that others use too, or
            for experiments. None: as fast as it goes.

    Raises:
        ValueError: The budget or the bandwidth means nothing.
        TypeError: An argument is of the wrong type.
        OffloadError: (when the first value is moved, or by :meth:`open`) the folder is not there,
            cannot be written to, or lies in memory.

    Example:
        >>> import torch, rematfn
        >>> disk = rematfn.Disk(budget="1GiB")
        >>> g = rematfn.offload(lambda x: x.sin().cos().exp().sum(), "3MiB", to=disk)
        >>> x = torch.ones(1 << 18, requires_grad=True)
        >>> g(x).backward()
        >>> disk.held_bytes, disk.peak_bytes > 0
        (0, True)
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        budget: SupportsIndex | str | None = None,
        *,
        verify: bool = False,
        bandwidth: float | None = None,
    ) -> None:
        if path is not None and not isinstance(path, str | os.PathLike):
            raise TypeError(f"Disk(path): a folder or None is needed, got {path!r}.")
        limit = parse_budget(budget)
        if limit.fraction is not None or limit.shared is not None:
            raise TypeError(
                f'Disk(budget={budget!r}): a number of bytes is needed, such as 4096 or "64GiB".'
            )
        if not isinstance(verify, bool):
            raise TypeError(f"Disk(verify=...): True or False is needed, got {verify!r}.")
        if bandwidth is not None and not bandwidth > 0:
            raise ValueError(
                f"Disk(bandwidth=...): bytes per second above 0 are needed, got {bandwidth!r}."
            )
        self.path = None if path is None else os.fspath(path)
        self.budget = limit.bytes
        self.verify = verify
        self.bandwidth = bandwidth
        self._lock = threading.Lock()
        self._disk: _C.Disk | None = None

    def open(self) -> _C.Disk:
        """Return what the core writes to; the first time, look at the folder."""
        with self._lock:
            if self._disk is None:
                self._disk = self._make()
            return self._disk

    def _make(self) -> _C.Disk:
        given = self.path is not None
        folders = [self.path] if self.path is not None else _default_folders()
        for last, folder in enumerate(folders, start=1 - len(folders)):
            try:
                budget = self.budget
                if budget is None:
                    budget = shutil.disk_usage(folder).free // 2
                bandwidth = math.inf if self.bandwidth is None else self.bandwidth
                return _C.Disk(folder, budget, True, self.verify, bandwidth)
            except OSError as error:
                if last != 0:
                    continue
                if isinstance(error, OffloadError):
                    raise
                raise OffloadError(f"{self!r}: {folder} cannot be used: {error}") from error
        raise AssertionError(given)

    @property
    def held_bytes(self) -> int:
        """Bytes that lie there now."""
        return self._figure("held_bytes")

    @property
    def peak_bytes(self) -> int:
        """The most bytes that lay there at once."""
        return self._figure("peak_bytes")

    @property
    def bytes_out(self) -> int:
        """Bytes that have been written there."""
        return self._figure("bytes_out")

    @property
    def bytes_in(self) -> int:
        """Bytes that have been read from there."""
        return self._figure("bytes_in")

    @property
    def bandwidth_out(self) -> float | None:
        """Bytes per second that were written of late; None if nothing has been."""
        return self._bandwidth("bandwidth_out")

    @property
    def bandwidth_in(self) -> float | None:
        """Bytes per second that were read of late; None if nothing has been."""
        return self._bandwidth("bandwidth_in")

    def _figure(self, name: str) -> int:
        return 0 if self._disk is None else int(self._disk.statistics()[name])

    def _bandwidth(self, name: str) -> float | None:
        # The core says 0 for what it does not know yet.
        return None if self._disk is None else float(self._disk.statistics()[name]) or None

    def __repr__(self) -> str:
        given = [] if self.path is None else [repr(self.path)]
        if self.budget is not None:
            given.append(f"budget={self.budget}")
        return f"Disk({', '.join(given)})"

    def __copy__(self) -> Disk:
        return self

    def __deepcopy__(self, memo: dict[int, object]) -> Disk:
        return self

    def __reduce__(self) -> tuple[object, ...]:
        return _made_of, (self.path, self.budget, self.verify, self.bandwidth)


def tier_of(offload: object, call: str) -> Disk | None:
    """Return the tier that an option says, which may be True or False."""
    if offload is False or offload is None:
        return None
    return parse_tier(None if offload is True else offload, call)


def _made_of(
    path: str | None, budget: int | None, verify: bool, bandwidth: float | None
) -> Disk:
    return Disk(path, budget, verify=verify, bandwidth=bandwidth)


def _default_folders() -> list[str]:
    return [tempfile.gettempdir(), "/var/tmp", os.getcwd()]


TierLike: TypeAlias = Disk | str | os.PathLike[str] | None


def parse_tier(to: object, call: str) -> Disk:
    """Return the tier that ``to`` means; ``call`` is what it was given to, for messages.

    Raises:
        TypeError: It is none of the accepted forms.
        ValueError: It is a string that is no folder.
    """
    if to is None or to == "disk":
        return Disk()
    if isinstance(to, Disk):
        return to
    if not isinstance(to, str | os.PathLike):
        raise TypeError(f"{call}: a tier is needed, got {to!r}.{_ACCEPTED}")
    if not Path(to).is_dir():
        raise ValueError(f"{call}: {os.fspath(to)!r} is no folder that exists.{_ACCEPTED}")
    return Disk(to)
