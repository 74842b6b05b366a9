# SPDX-License-Identifier: Apache-2.0
"""What every policy is, and the scores that look back.

Each names a score that lives once, in the C++ core. `c` is the cost of recomputing a version from
its inputs, `m` its bytes, `age` the program time since the program last touched it; the candidate
with the lowest score goes first.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from .. import _C


@dataclass(frozen=True)
class Policy:
    """What all policies have in common: a score, and that marked values go last."""

    kind: ClassVar[str] = "on"
    evict_everything: ClassVar[bool] = False
    # Without a budget, what is not kept goes when the function returns.
    discards: ClassVar[bool] = False

    def score(self) -> _C.Score:
        """Return the score as the core takes it."""
        return _C.Score(self.kind, 0.5, 0.6, 4.0)

    def keeping(self) -> _C.Keeping:
        """Return what goes only when nothing else is left."""
        return _C.Keeping(False, "heeded", [])

    def judge(self) -> Callable[..., float] | None:
        """Return a score written in Python, if the policy is one."""
        return None


@dataclass(frozen=True)
class ON(Policy):
    """Evict the smallest ``(c + ancestors * a) / (m * age ** exponent)``: the best that looks back.

    ``a`` is the cost of the evicted versions that would have to be recomputed first. The score
    counts ``unread`` times until an operator of the program has read the value. Where replays in a
    backward cost more than the program does, the distance from what that backward read last takes
    the place of ``age``: a backward reads in reverse.

    Attributes:
        ancestors: What the evicted ancestors count, at least 0.
        exponent: What age counts, at least 0.
        unread: At least 1.
    """

    kind: ClassVar[str] = "on"
    ancestors: float = 0.5
    exponent: float = 0.6
    unread: float = 4.0

    def __post_init__(self) -> None:
        if not (self.ancestors >= 0 and self.exponent >= 0 and self.unread >= 1):
            raise ValueError(f"ancestors >= 0, exponent >= 0 and unread >= 1 are needed: {self!r}.")

    def score(self) -> _C.Score:
        """Return the score as the core takes it."""
        return _C.Score(self.kind, self.ancestors, self.exponent, self.unread)
