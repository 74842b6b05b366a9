# SPDX-License-Identifier: Apache-2.0
"""What an option says of tiers: the kinds that may be written, and those that it means."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from typing import Final, TypeAlias

import torch

from .. import _C
from .._interop.pytrees import tensors_of
from ..errors import OffloadError
from .tiers import DEFAULTS, KINDS, Disk, Packed, Tier


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

        Where nothing has moved yet, ``values``, which the function is called with, tell whether it
        works on an accelerator.
        """
        if not self.all:
            return None
        packed = [kind.open() for kind in self.all if isinstance(kind, Packed)]
        opened = [tier for tier in self.open() if tier not in packed]
        used = [tier for tier in opened if tier.statistics()["bytes_out"] > 0]
        if len(opened) > 1 and not used:
            device = torch.accelerator.current_accelerator()
            is_there = any(device and x.device.type == device.type for x in tensors_of(values))
            used = [tier for tier in opened if tier.for_accelerators == is_there]
        return _C.link_to([*(used or opened), *packed], drops)

    def __bool__(self) -> bool:
        return bool(self.all)

    def as_option(self, transform: str) -> str:
        """Return what one writes for these in a call of `remat` or `offload`, after the budget."""
        if self.as_there_are or not self.all:
            return ", offload=True" if self.all and transform == "remat" else ""
        given = repr(self.all[0] if len(self.all) == 1 else list(self.all))
        return f", {'offload' if transform == 'remat' else 'to'}={given}"


_TIERS: Final = (
    "".join(kind.written for kind in reversed(KINDS))
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
        return Tiers(tuple(kind() for kind in DEFAULTS), as_there_are=True)
    given = to if isinstance(to, list | tuple) and to else [to]
    return Tiers(tuple(_parse_tier(each, call, accepted) for each in given))


def _parse_tier(to: object, call: str, accepted: str) -> Tier:
    for kind in KINDS:
        if isinstance(to, kind):
            return to
        if to == kind.word:
            return kind()
    if not isinstance(to, str | os.PathLike):
        raise TypeError(f"{call}: a tier is needed, got {to!r}.{accepted}")
    if not os.path.isdir(to):
        raise ValueError(f"{call}: {os.fspath(to)!r} is no folder that exists.{accepted}")
    return Disk(to)
