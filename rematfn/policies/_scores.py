# SPDX-License-Identifier: Apache-2.0
"""What every policy is, and the score that looks back.

It lives once, in the C++ core. `c` is the cost of recomputing a version from its inputs, `m` its
bytes, `age` the program time since the program last touched it; the candidate with the lowest
score goes first.
"""

from dataclasses import dataclass
from typing import ClassVar

from .. import _C

_DEFAULT = _C.Score()


@dataclass(frozen=True)
class Policy:
    """What all policies have in common: a score, and that marked values go last."""

    # Without a budget, what is not kept goes when the function returns.
    discards: ClassVar[bool] = False
    # To replay a lot is what it is for: nobody is warned.
    replays_freely: ClassVar[bool] = False

    def core(self) -> _C.Policy:
        """Return the policy as the core takes it: for a plan, until there is one."""
        return _C.Policy()


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

    ancestors: float = _DEFAULT.ancestors
    exponent: float = _DEFAULT.exponent
    unread: float = _DEFAULT.unread

    def __post_init__(self) -> None:
        if not (self.ancestors >= 0 and self.exponent >= 0 and self.unread >= 1):
            raise ValueError(f"ancestors >= 0, exponent >= 0 and unread >= 1 are needed: {self!r}.")

    def core(self) -> _C.Policy:
        """Return the policy as the core takes it."""
        return _C.Policy(score=_C.Score(self.ancestors, self.exponent, self.unread))
