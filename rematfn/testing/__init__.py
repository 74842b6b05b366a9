# SPDX-License-Identifier: Apache-2.0
"""For tests: evict everything, check the core's invariants, count bytes without asking rematfn."""

from dataclasses import dataclass
from typing import ClassVar

from .._inspection import check
from ..policies import Policy
from ._memory import MemoryTimeline, ResidentPeak

__all__ = ["EvictEverything", "MemoryTimeline", "ResidentPeak", "check"]


@dataclass(frozen=True)
class EvictEverything(Policy):
    """Evict all that is not pinned after every operator.

    For tests: each value is then recomputed whenever it is read, so that an operator whose replay
    is not its first run's twin shows at once.
    """

    kind: ClassVar[str] = "on"
    evict_everything: ClassVar[bool] = True
