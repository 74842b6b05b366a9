# SPDX-License-Identifier: Apache-2.0
"""Policies: which version to evict when room is needed.

Each names a score that lives once, in the C++ core. `c` is the cost of recomputing a version from
its inputs, `m` its bytes, `age` the program time since the program last touched it; the candidate
with the lowest score goes first.
"""

from dataclasses import dataclass
from typing import ClassVar

from . import _C


@dataclass(frozen=True)
class Policy:
    """What all policies have in common: a score."""

    kind: ClassVar[str]
    evict_everything: ClassVar[bool] = False

    def score(self) -> _C.Score:
        """Return the score as the core takes it."""
        return _C.Score(self.kind, 0.5, 0.6, 4.0)


@dataclass(frozen=True)
class ON(Policy):
    """Evict the smallest ``(c + ancestors * a) / (m * age ** exponent)``: the best that looks back.

    ``a`` is the cost of the evicted versions that would have to be recomputed first. The score
    counts ``unread`` times until an operator of the program has read the value.

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


@dataclass(frozen=True)
class Guided(Policy):
    """Measure the first call of each signature, and guide those after it; the default.

    The first call is run with the policy ``first`` and recorded: the sequence of operators, what
    each reads, and when the program lets go of a value. Later calls of the same signature know
    every next use: what is never read again goes first, and the score weighs time since the last
    access against time to the next. Which weighing does best at this budget is found by simulating
    the recorded call. Each operator is compared with the record; at the first difference the call
    goes on with ``first``, and the next call is recorded anew. Results never depend on the record.

    Recording and guiding as in Peng et al., *Capuchin* (ASPLOS 2020).

    Attributes:
        first: The policy of calls about which nothing is known.
        search: Seconds a thread may look for a better plan, once for each signature and budget.
            The second call waits for it a twentieth of a second, later calls use what it has found
            by then. With 0 nothing depends on how fast the machine is: the first plan that fits.
    """

    kind: ClassVar[str] = "on"
    first: Policy = ON()
    search: float = 1.0

    def __post_init__(self) -> None:
        if not isinstance(self.first, Policy) or isinstance(self.first, Guided):
            raise TypeError(f"Guided(first=...): another policy is needed, got {self.first!r}.")
        if not self.search >= 0:
            raise ValueError(f"Guided(search=...): seconds are needed, got {self.search!r}.")

    def score(self) -> _C.Score:
        """Return the score of calls about which nothing is known."""
        return self.first.score()


@dataclass(frozen=True)
class DTR(Policy):
    """Evict the smallest ``(c + neighbourhood) / (m * age)``, exactly: the reference.

    The neighbourhood is every evicted ancestor and descendant. This is h_DTR of Kirisame et al.,
    *Dynamic Tensor Rematerialization* (ICLR 2021). Slow: each eviction walks the neighbourhood of
    each candidate.
    """

    kind: ClassVar[str] = "dtr"


@dataclass(frozen=True)
class Eq(Policy):
    """As :class:`DTR`, with undirected components kept by union-find (h_DTR^eq, ibid.)."""

    kind: ClassVar[str] = "eq"


@dataclass(frozen=True)
class Local(Policy):
    """Evict the smallest ``c / (m * age)`` (h_local, ibid.)."""

    kind: ClassVar[str] = "local"


@dataclass(frozen=True)
class MSPS(Policy):
    """Evict the smallest ``(c + ancestors) / m``: memory saving per second.

    After Peng et al., *Capuchin* (ASPLOS 2020), as Kirisame et al. compare with it.
    """

    kind: ClassVar[str] = "msps"


@dataclass(frozen=True)
class LRU(Policy):
    """Evict what the program has not touched for longest."""

    kind: ClassVar[str] = "lru"


@dataclass(frozen=True)
class Largest(Policy):
    """Evict the largest version."""

    kind: ClassVar[str] = "largest"


@dataclass(frozen=True)
class EvictEverything(Policy):
    """Evict all that is not pinned after every operator.

    For tests: each value is then recomputed whenever it is read, so that an operator whose replay
    is not its first run's twin shows at once.
    """

    kind: ClassVar[str] = "on"
    evict_everything: ClassVar[bool] = True
