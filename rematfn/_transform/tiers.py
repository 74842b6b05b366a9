# SPDX-License-Identifier: Apache-2.0
"""Tiers: where values go that leave their device."""

from __future__ import annotations

import dataclasses
import math
import numbers
import os
import shutil
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, SupportsIndex, TypeAlias

import torch

from .. import _C
from .._interop.pytrees import tensors_of
from ..errors import OffloadError
from .budget import BYTES, parse_budget

if TYPE_CHECKING:
    from typing_extensions import Self

_DEFAULT: Final = "the host's memory for an accelerator, a disk for a CPU"
_TIERS: Final = """
  "disk"                     a file in the folder for temporary files
  "/scratch", Path("/scratch")  a file in that folder
  rematfn.Disk("/scratch", "64GiB")  the same, with a cap
  "host"                     pinned memory of the host, for values on an accelerator
  rematfn.Host("16GiB")      the same, with a cap"""
_ACCEPTED: Final = f"""
A tier is one of
  None                       {_DEFAULT}{_TIERS}"""
_ACCEPTED_BESIDE_REPLAYS: Final = f"""
It is one of
  False, None                nowhere: what does not fit is computed again
  True                       {_DEFAULT}{_TIERS}"""

_opening = threading.RLock()
os.register_at_fork(
    before=_opening.acquire, after_in_parent=_opening.release, after_in_child=_opening.release
)


class _Tier:
    """What lies there, and how fast it comes and goes."""

    def __init__(self, budget: SupportsIndex | str | None) -> None:
        limit = parse_budget(budget, type(self).__name__ + "(budget={})", BYTES)
        if limit.fraction is not None or limit.shared is not None:
            raise TypeError(
                f"{type(self).__name__}(budget={budget!r}): a number of bytes is needed, such as "
                '4096 or "64GiB".'
            )
        self.budget = limit.bytes
        self._opened: _C.Tier | None = None

    def open(self) -> _C.Tier:
        """Return what the core moves to; the first time it is made, and its folder looked at."""
        with _opening:
            if self._opened is None:
                self._opened = self._make()
            return self._opened

    def _make(self) -> _C.Tier:
        raise NotImplementedError

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
        """Bytes that have been moved there."""
        return self._figure("bytes_out")

    @property
    def bytes_in(self) -> int:
        """Bytes that have come back from there."""
        return self._figure("bytes_in")

    @property
    def bandwidth_out(self) -> float | None:
        """Bytes per second that went there of late; None until some have."""
        return self._bandwidth("bandwidth_out")

    @property
    def bandwidth_in(self) -> float | None:
        """Bytes per second that came back of late; None until some have."""
        return self._bandwidth("bandwidth_in")

    def _figure(self, name: str) -> int:
        return 0 if self._opened is None else int(self._opened.statistics()[name])

    def _bandwidth(self, name: str) -> float | None:
        # The core says 0 for what it does not know yet.
        return None if self._opened is None else float(self._opened.statistics()[name]) or None

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        return self


class Disk(_Tier):
    """A file that values on the CPU are moved to, and come back from.

    The file has no name, so that nothing of it is left when the process ends, however it ends; only
    this process can read it. It stays as long as it has become until then, or until this object and
    all functions and values that use it have gone. It is written and read past the page cache where
    the file system can do that, since what lies in the page cache is memory that is not saved.
    Functions that were given the same object share its file, its budget and its threads; a copy of
    a model (:func:`copy.deepcopy`) is such another function.

    Args:
        path: An existing folder, on a disk: one that lies in memory (tmpfs) is refused. None: the
            folder for temporary files, or else ``/var/tmp`` or the current one, whichever is the
            first on a disk; :attr:`folder` tells.
        budget: The most bytes that may lie there at once, as :func:`remat` takes them: ``4096``,
            ``"64GiB"``. A hard cap: what does not fit stays where it is. Values are kept in units
            of 4 KiB. None: half of what is free when a function with this tier is first called.
            Where values may be computed again as well, that call also writes and reads up to 17
            MiB, to learn the bandwidth.
        verify: Compare a checksum of what comes back with that of what left.
        bandwidth: The most bytes per second in each direction, for a disk that others use too, or
            for experiments. None: as fast as it goes.

    Raises:
        ValueError: The budget or the bandwidth means nothing.
        TypeError: An argument is of the wrong type.
        OffloadError: (when a function with this tier is called, or by :meth:`open`) the folder is
            not there, cannot be written to, or lies in memory.

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
        if path is not None and not _is_name(path):
            raise ValueError(f"Disk(path): the name of a folder or None is needed, got {path!r}.")
        super().__init__(budget)
        if not isinstance(verify, bool):
            raise TypeError(f"Disk(verify=...): True or False is needed, got {verify!r}.")
        given: Any = bandwidth
        is_number = isinstance(given, numbers.Real) and not isinstance(given, bool)
        if not (given is None or is_number):
            raise TypeError(
                f"Disk(bandwidth=...): bytes per second as a number are needed, got {bandwidth!r}."
            )
        if bandwidth is not None and not bandwidth > 0:
            raise ValueError(
                f"Disk(bandwidth=...): bytes per second above 0 are needed, got {bandwidth!r}."
            )
        # The file is made later, when the current folder may be another one.
        self.path = None if path is None else os.path.abspath(os.fsdecode(path))
        self.verify = verify
        self.bandwidth = None if bandwidth is None else float(bandwidth)
        self._folder = self.path

    @property
    def folder(self) -> str | None:
        """The folder that the file lies in; None until one has been chosen."""
        return self._folder

    def _make(self) -> _C.Tier:
        bandwidth = math.inf if self.bandwidth is None else self.bandwidth
        refused: list[OSError] = []
        given = self.path
        for find in _DEFAULT_FOLDERS if given is None else [lambda: given]:
            try:
                folder: str = find()
                budget = self.budget
                if budget is None:
                    budget = shutil.disk_usage(folder).free // 2
                made = _C.open_disk(os.fsencode(folder), budget, self.verify, bandwidth)
            except OSError as error:
                refused.append(error)
                continue
            self._folder = folder
            return made
        if len(refused) == 1 and isinstance(refused[0], OffloadError):
            raise refused[0]
        reasons = "".join(f"\n  {error}" for error in refused)
        raise OffloadError(f"{self!r}: no folder can be used:{reasons}") from refused[-1]

    def __repr__(self) -> str:
        given = [] if self.path is None else [repr(self.path)]
        if self.budget is not None:
            given.append(f"budget={self.budget}")
        return f"Disk({', '.join(given)})"

    def __reduce__(self) -> tuple[object, ...]:
        return _disk, (self.path, self.budget, self.verify, self.bandwidth)


class Host(_Tier):
    """Pinned memory of the host that values on an accelerator are moved to, and come back from.

    Copies run in streams of their own, beside the kernels, in both directions at once. The memory
    is asked for as it is needed, in few large pieces, and given back when the object goes.
    Functions that were given the same object share its memory and its budget; a copy of a model
    (:func:`copy.deepcopy`) is such another function.

    Args:
        budget: The most bytes that may be pinned, as :func:`remat` takes them: ``4096``,
            ``"16GiB"``. A hard cap: what does not fit stays where it is. Values are kept in units
            of 4 KiB. None: half of the host's memory that is free when a function with this tier is
            first called. Where several processes use one machine, give each of them a number.

    Raises:
        ValueError: The budget means nothing.
        TypeError: An argument is of the wrong type.
        OffloadError: (when a function with this tier is called) torch knows of no accelerator here.

    Example:
        >>> import rematfn
        >>> rematfn.Host("16GiB")
        Host(budget=17179869184)
    """

    def __init__(self, budget: SupportsIndex | str | None = None) -> None:
        super().__init__(budget)

    def _make(self) -> _C.Tier:
        if not torch.accelerator.is_available():
            raise OffloadError(
                f"{self!r}: values on an accelerator are moved to the host's memory, and torch "
                "knows of no accelerator here. Values on a CPU are moved to a disk: rematfn.Disk()."
            )
        return _C.Host(_C.memory_left() // 2 if self.budget is None else self.budget)

    @property
    def pinned_bytes(self) -> int:
        """Bytes that are pinned, whether something lies there or not."""
        return self._figure("pinned_bytes")

    @property
    def waited(self) -> float:
        """Seconds that the accelerator waited for copies, as far as known by now."""
        return 0.0 if self._opened is None else float(self._opened.statistics()["waited"])

    def __repr__(self) -> str:
        return "Host()" if self.budget is None else f"Host(budget={self.budget})"

    def __reduce__(self) -> tuple[object, ...]:
        return Host, (self.budget,)


@dataclasses.dataclass(frozen=True)
class Tiers:
    """Where values may go: from a CPU to a disk, from an accelerator to the host's memory."""

    disk: Disk | None = None
    host: Host | None = None
    as_there_are: bool = False  # nobody asked for either of them

    def open(self) -> list[_C.Tier]:
        """Return the tiers as the core knows them, an accelerator's first.

        Raises:
            OffloadError: One that was asked for cannot be used, or none can.
        """
        opened: list[_C.Tier] = []
        if self.host and (not self.as_there_are or torch.accelerator.is_available()):
            opened.append(self.host.open())
        if self.disk:
            try:
                opened.append(self.disk.open())
            except OffloadError:
                if not opened:
                    raise
        return opened

    def link(self, drops: bool, values: object = ()) -> _C.Link | None:
        """Return what is planned for: the way to the host, if that is used.

        Args:
            drops: Whether values may be dropped as well.
            values: What the function is called with. Where nothing has moved yet, these tell
                whether it works on an accelerator.
        """
        opened = self.open()
        if len(opened) > 1 and self.host and self.disk:
            nothing_moved = self.host.bytes_out == self.disk.bytes_out == 0
            if self.host.bytes_out > 0 or (nothing_moved and _on_an_accelerator(values)):
                opened.pop()
        return opened[-1].link(drops) if opened else None

    def __bool__(self) -> bool:
        return self.disk is not None or self.host is not None

    def as_option(self, transform: str) -> str:
        """Return what one writes for these in a call of `remat` or `offload`, after the budget."""
        if self.as_there_are:
            return ", offload=True" if transform == "remat" else ""
        name = "offload" if transform == "remat" else "to"
        return "".join(f", {name}={tier!r}" for tier in (self.host, self.disk) if tier is not None)


def tiers_of(offload: object, call: str) -> Tiers:
    """Return the tiers that an option says, which may be True or False."""
    if offload is False or offload is None:
        return Tiers()
    return parse_tiers(None if offload is True else offload, call, _ACCEPTED_BESIDE_REPLAYS)


def _on_an_accelerator(values: object) -> bool:
    device = torch.accelerator.current_accelerator()
    return device is not None and any(x.device.type == device.type for x in tensors_of(values))


def _is_name(path: str | os.PathLike[str]) -> bool:
    """Return whether a folder could have this name."""
    try:
        name = os.fsencode(path)
    except UnicodeEncodeError:
        return False
    return name != b"" and b"\0" not in name


def _disk(path: str | None, budget: int | None, verify: bool, bandwidth: float | None) -> Disk:
    return Disk(path, budget, verify=verify, bandwidth=bandwidth)


_DEFAULT_FOLDERS: Final[list[Callable[[], str]]] = [
    tempfile.gettempdir,
    lambda: "/var/tmp",
    os.getcwd,
]


TierLike: TypeAlias = Disk | Host | str | os.PathLike[str] | None


def parse_tiers(to: object, call: str, accepted: str = _ACCEPTED) -> Tiers:
    """Return the tiers that ``to`` means; ``call`` is what it was given to, for messages.

    Raises:
        TypeError: It is none of the accepted forms.
        ValueError: It is a string that is no folder.
    """
    if to is None:
        return Tiers(Disk(), Host(), as_there_are=True)
    if to == "disk":
        return Tiers(Disk())
    if to == "host":
        return Tiers(host=Host())
    if isinstance(to, Disk):
        return Tiers(to)
    if isinstance(to, Host):
        return Tiers(host=to)
    if not isinstance(to, str | os.PathLike):
        raise TypeError(f"{call}: a tier is needed, got {to!r}.{accepted}")
    if not _is_name(to) or not Path(os.fsdecode(to)).is_dir():
        raise ValueError(f"{call}: {os.fspath(to)!r} is no folder that exists.{accepted}")
    return Tiers(Disk(to))
