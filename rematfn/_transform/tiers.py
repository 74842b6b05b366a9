# SPDX-License-Identifier: Apache-2.0
"""Tiers: where values go that leave their device, and what an option says of them."""

from __future__ import annotations

import dataclasses
import functools
import math
import numbers
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Final, SupportsIndex, TypeAlias

import torch

from .. import _C
from .._interop.pytrees import tensors_of
from ..errors import OffloadError, expect
from .budget import SharedByCopies, parse_bytes
from .recorded import lock


def _told(name: str, doc: str, unknown: object) -> Any:
    """Return the property that is a figure of the core's."""

    def get(tier: Tier) -> Any:
        figures = {} if tier._opened is None else tier._opened.statistics()
        return figures.get(name) or unknown

    return property(get, doc=doc)


class Tier(SharedByCopies):
    """What lies there, and how fast it comes and goes."""

    word: ClassVar[str]  # what an option calls one without settings
    written: ClassVar[str]  # how an option may be written, for messages

    def __init__(self, budget: SupportsIndex | str | None = None) -> None:
        self.budget = parse_bytes(budget, type(self).__name__ + "(budget={})").bytes
        self._opened: _C.Tier | None = None

    def open(self) -> _C.Tier:
        """Return what the core moves to; the first time it is made, and its folder looked at."""
        with lock:
            if self._opened is None:
                self._opened = self._make()
            return self._opened

    def _make(self) -> _C.Tier:
        raise NotImplementedError

    held_bytes: int = _told("held_bytes", "Bytes that copies take there now.", 0)
    peak_bytes: int = _told("peak_bytes", "The most bytes that copies took there at once.", 0)
    bytes_out: int = _told("bytes_out", "Bytes of the values that have gone there.", 0)
    bytes_in: int = _told("bytes_in", "Bytes of the values that have come back.", 0)
    # The core says 0 for what it does not know yet.
    bandwidth_out: float | None = _told(
        "bandwidth_out", "Bytes per second that went there recently; None until some have.", None
    )
    bandwidth_in: float | None = _told(
        "bandwidth_in", "Bytes per second that came back recently; None until some have.", None
    )

    def _settings(self) -> dict[str, Any]:
        """Return what it was given, and is not the default."""
        names = ("path", "budget", "verify", "bandwidth")
        return {name: given for name in names if (given := getattr(self, name, None))}

    def __repr__(self) -> str:
        settings = self._settings().items()
        given = [repr(x) if name == "path" else f"{name}={x!r}" for name, x in settings]
        return f"{type(self).__name__}({', '.join(given)})"

    def __reduce__(self) -> tuple[object, ...]:
        return functools.partial(type(self), **self._settings()), ()


class Disk(Tier):
    """A file that values on the CPU are moved to, and come back from.

    The file has no name, so nothing of it is left when the process ends, however it ends. Only this
    process can read it. It never shrinks; it is closed with the process, or when this object and
    all functions and values that use it are freed. Writes and reads bypass the page cache where the
    file system supports that, since cached bytes would still be in memory. Functions that are given
    the same object share its file, its budget and its threads. So does a copy of a model
    (:func:`copy.deepcopy`).

    Args:
        path: An existing folder, on a disk: one that lies in memory (tmpfs) is refused. None: the
            folder for temporary files, or else ``/var/tmp`` or the current one, whichever is the
            first on a disk; :attr:`folder` tells.
        budget: The most bytes that may lie there at once, as :func:`remat` takes them: ``4096``,
            ``"64GiB"``. A hard cap: what does not fit stays where it is. Values are kept in units
            of 4 KiB. None: half of the free space when a function with this tier is first called.
            If values may be computed again, too, that call first writes and reads 4 MiB to measure
            the bandwidth.
        verify: Compare a checksum of the bytes read with that of the bytes written.
        bandwidth: The most bytes per second in each direction, for a disk that others use too, or
            for experiments. None: no limit.

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

    word = "disk"
    written = """
  "disk"                     a file in the folder for temporary files
  "/scratch", Path("/scratch")  a file in that folder
  rematfn.Disk("/scratch", "64GiB")  the same, with a cap"""

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        budget: SupportsIndex | str | None = None,
        *,
        verify: bool = False,
        bandwidth: float | None = None,
    ) -> None:
        is_path = isinstance(path, str | os.PathLike | None)
        expect(is_path, "Disk(path)", "a folder or None", path)
        needed = "the name of a folder or None"
        expect(path is None or _is_name(path), "Disk(path)", needed, path, ValueError)
        super().__init__(budget)
        expect(isinstance(verify, bool), "Disk(verify=...)", "True or False", verify)
        given: Any = bandwidth
        is_number = isinstance(given, numbers.Real) and not isinstance(given, bool)
        call, needed = "Disk(bandwidth=...)", "a number of bytes per second, above 0,"
        expect(bandwidth is None or is_number, call, needed, bandwidth)
        expect(bandwidth is None or bandwidth > 0, call, needed, bandwidth, ValueError)
        # The file is made later, when the current folder may be another one.
        self.path = None if path is None else os.path.abspath(os.fsdecode(path))
        self.verify = verify
        self.bandwidth = None if bandwidth is None else float(bandwidth)
        self.folder = self.path  # that the file lies in; None until one has been chosen

    def _make(self) -> _C.Tier:
        bandwidth = math.inf if self.bandwidth is None else self.bandwidth
        refused: list[OSError] = []
        given = self.path
        for find in _DEFAULT_FOLDERS if given is None else [lambda: given]:
            try:
                folder: str = find()
                budget = self.budget or shutil.disk_usage(folder).free // 2
                made = _C.open_disk(os.fsencode(folder), budget, self.verify, bandwidth)
            except OSError as error:
                refused.append(error)
                continue
            self.folder = folder
            return made
        if len(refused) == 1 and isinstance(refused[0], OffloadError):
            raise refused[0]
        reasons = "".join(f"\n  {error}" for error in refused)
        raise OffloadError(f"{self!r}: no folder can be used:{reasons}") from refused[-1]


class Host(Tier):
    """Pinned memory of the host that values on an accelerator are moved to, and come back from.

    Copies run in streams of their own, beside the kernels, in both directions at once. The memory
    is allocated as it is needed, in few large pieces, and freed with the object. Functions that are
    given the same object share its memory and its budget. So does a copy of a model
    (:func:`copy.deepcopy`).

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

    word = "host"
    written = """
  "host"                     pinned memory of the host, for values on an accelerator
  rematfn.Host("16GiB")      the same, with a cap"""

    def _make(self) -> _C.Tier:
        if not torch.accelerator.is_available():
            raise OffloadError(
                f"{self!r}: values on an accelerator are moved to the host's memory, and torch "
                "knows of no accelerator here. Values on a CPU are moved to a disk: rematfn.Disk()."
            )
        return _C.open_host(self.budget or _C.memory_left() // 2)

    pinned_bytes: int = _told(
        "pinned_bytes", "Bytes that are pinned, whether something lies there or not.", 0
    )
    waited: float = _told(
        "waited", "Seconds that the accelerator waited for copies, as far as known by now.", 0.0
    )


class Packed(Tier):
    """The memory itself: values on a CPU that are not in use are compressed in place, without loss.

    A value is packed where it lies, and unpacked when it is read, on the threads that operators run
    on. Until then its packed bytes count in the budget. The encodings are

    - one bit for each element, where there are two values: booleans, a dropout's noise;
    - one bit for each element, and those that are not zero: results of a ReLU or a dropout;
    - narrower elements: a float that was a ``bfloat16`` or a ``float16``, an integer that fits in
      fewer bits;
    - one element for a block in which all are equal.

    A sample of its bytes says which of them a value takes. Values of less than 64 KiB, and those
    that would keep more than three quarters of their bytes, stay as they are. So do values on an
    accelerator. Where nothing else can make room, a packed value moves on to a :class:`Disk`, if
    the function is given one, too; with ``remat``, it may be dropped, if it can be computed again.

    Jain et al., *Gist* (ISCA 2018), encode activations so for the backward. Chen et al., *ActNN*
    (ICML 2021), quantise them, which is not exact.

    Args:
        verify: Compare a checksum of what is unpacked with that of what was packed.

    Raises:
        TypeError: An argument is of the wrong type.

    Example:
        >>> import torch, rematfn
        >>> packed = rematfn.Packed()
        >>> g = rematfn.offload(lambda x: x.relu().relu().relu().relu().relu().sum(), to=packed)
        >>> x = torch.randn(1 << 18, requires_grad=True)
        >>> g(x).backward()
        >>> packed.held_bytes, 0 < packed.peak_bytes < packed.bytes_out
        (0, True)
    """

    word = "packed"
    written = """
  "packed"                   the memory itself, for values on a CPU: in fewer bytes
  rematfn.Packed(verify=True)  the same; checksums are compared"""

    def __init__(self, *, verify: bool = False) -> None:
        super().__init__()
        expect(isinstance(verify, bool), "Packed(verify=...)", "True or False", verify)
        self.verify = verify

    def _make(self) -> _C.Tier:
        return _C.open_packed(self.verify)


def _is_name(path: str | os.PathLike[str]) -> bool:
    """Return whether a folder could have this name."""
    try:
        name = os.fsencode(path)
    except UnicodeEncodeError:
        return False
    return name != b"" and b"\0" not in name


_DEFAULT_FOLDERS: Final[list[Callable[[], str]]] = [
    tempfile.gettempdir,
    lambda: "/var/tmp",
    os.getcwd,
]

_KINDS: Final[tuple[type[Tier], ...]] = (Host, Disk, Packed)


@dataclasses.dataclass(frozen=True)
class Tiers:
    """Where values may go: each to the cheapest of those that take it and have room."""

    all: tuple[Tier, ...] = ()
    as_there_are: bool = False  # nobody asked for any of them

    def open(self) -> list[_C.Tier]:
        """Return the tiers as the core knows them.

        Raises:
            OffloadError: One that was asked for cannot be used, or none can.
        """
        opened, refused = [], []
        for tier in self.all:
            try:
                opened.append(tier.open())
            except OffloadError as error:
                # A traceback kept here would keep its frames, and what the caller holds.
                refused.append(error.with_traceback(None))
        if refused and not (opened and self.as_there_are):
            raise refused.pop()
        return opened

    def link(self, drops: bool, values: object = ()) -> _C.Link | None:
        """Return what is planned for: the way to the first that is used, beside the packed one.

        It has the room of all tiers that take the same values.

        Where nothing has moved yet, ``values``, which the function is called with, tell whether it
        works on an accelerator.
        """
        if not self.all:
            return None
        opened = self.open()
        far = [tier for tier in opened if not tier.packs]
        used = [tier for tier in far if tier.statistics()["bytes_out"] > 0]
        if len(far) > 1 and not used:
            device = torch.accelerator.current_accelerator()
            is_there = any(device and x.device.type == device.type for x in tensors_of(values))
            used = [tier for tier in far if tier.for_accelerators == is_there]
        return _C.link_to(sorted(opened, key=lambda tier: tier not in used), drops)

    def __bool__(self) -> bool:
        return bool(self.all)

    def as_option(self, transform: str) -> str:
        """Return what one writes for these in a call of `remat` or `offload`, after the budget."""
        if self.as_there_are or not self.all:
            return ", offload=True" if self.all and transform == "remat" else ""
        given = repr(self.all[0] if len(self.all) == 1 else list(self.all))
        return f", {'offload' if transform == 'remat' else 'to'}={given}"


_TIERS: Final = (
    "".join(kind.written for kind in reversed(_KINDS))
    + """
  [rematfn.Disk("/fast", "8GiB"), "/large"]  each value goes where it is back soonest"""
)
_DEFAULT: Final = "the host's memory for an accelerator, a disk for a CPU"
_ACCEPTED: Final = f"""
A tier is one of
  None                       {_DEFAULT}{_TIERS}"""
_ACCEPTED_BESIDE_REPLAYS: Final = f"""
It is one of
  False, None                nowhere: what does not fit is computed again
  True                       {_DEFAULT}{_TIERS}"""
_OneTier: TypeAlias = Tier | str | os.PathLike[str]
TierLike: TypeAlias = _OneTier | Sequence[_OneTier] | None


def tiers_of(offload: object, call: str) -> Tiers:
    """Return the tiers that an option says, which may be True or False."""
    if offload is False or offload is None:
        return Tiers()
    return parse_tiers(None if offload is True else offload, call, _ACCEPTED_BESIDE_REPLAYS)


def parse_tiers(to: object, call: str, accepted: str = _ACCEPTED) -> Tiers:
    """Return the tiers that ``to`` means; ``call`` is what it was given to, for messages."""
    if to is None:
        return Tiers((Host(), Disk()), as_there_are=True)
    given = to if isinstance(to, list | tuple) and to else [to]
    return Tiers(tuple(_parse_tier(each, call, accepted) for each in given))


def _parse_tier(to: object, call: str, accepted: str) -> Tier:
    for kind in _KINDS:
        if isinstance(to, kind):
            return to
        if to == kind.word:
            return kind()
    if not isinstance(to, str | os.PathLike):
        raise TypeError(f"{call}: a tier is needed, got {to!r}.{accepted}")
    if not os.path.isdir(to):
        raise ValueError(f"{call}: {os.fspath(to)!r} is no folder that exists.{accepted}")
    return Disk(to)
