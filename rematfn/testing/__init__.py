# SPDX-License-Identifier: Apache-2.0
"""For tests: evict everything, check the core's invariants, count bytes without asking rematfn."""

from dataclasses import dataclass
from typing import ClassVar

from .. import _C
from ..policies import Policy
from ._resident import ResidentPeak
from ._timeline import MemoryTimeline

__all__ = ["EvictEverything", "MemoryTimeline", "ResidentPeak", "check"]


@dataclass(frozen=True)
class EvictEverything(Policy):
    """Evict all that is not pinned after every operator.

    For tests: each value is then recomputed whenever it is read. So an operator whose replay gives
    other bits than its first run is found at once. Marks of :func:`rematfn.keep` are ignored, since
    they would hide what is to be tested.
    """

    replays_freely: ClassVar[bool] = True

    def core(self) -> _C.Policy:
        """Return the policy as the core takes it."""
        return _C.Policy(evict_everything=True)


def check() -> None:
    """Assert the invariants of every live lineage table.

    Raises:
        RuntimeError: One is broken. That is a bug in rematfn; please report it.
    """
    _C.testing.check()
