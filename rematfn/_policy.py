# SPDX-License-Identifier: Apache-2.0
"""Policies: which version to evict when room is needed.

Each names a score that lives once, in the C++ core. `c` is the cost of recomputing a version from
its inputs, `m` its bytes, `age` the program time since the program last touched it; the candidate
with the lowest score goes first.
"""

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class Policy:
    """What all policies have in common: the name of a score."""

    score: ClassVar[str]
    evict_everything: ClassVar[bool] = False


@dataclass(frozen=True)
class ON(Policy):
    """Evict the smallest ``(c + ancestors / 2) / (m * age ** 0.6)``, the default.

    ``ancestors`` is the cost of the evicted versions that would have to be recomputed first. The
    score counts four times until an operator of the program has read the value.
    """

    score: ClassVar[str] = "on"


@dataclass(frozen=True)
class DTR(Policy):
    """Evict the smallest ``(c + neighbourhood) / (m * age)``, exactly: the reference.

    The neighbourhood is every evicted ancestor and descendant. This is h_DTR of Kirisame et al.,
    *Dynamic Tensor Rematerialization* (ICLR 2021). Slow: each eviction walks the neighbourhood of
    each candidate.
    """

    score: ClassVar[str] = "dtr"


@dataclass(frozen=True)
class Eq(Policy):
    """As :class:`DTR`, with undirected components kept by union-find (h_DTR^eq, ibid.)."""

    score: ClassVar[str] = "eq"


@dataclass(frozen=True)
class Local(Policy):
    """Evict the smallest ``c / (m * age)`` (h_local, ibid.)."""

    score: ClassVar[str] = "local"


@dataclass(frozen=True)
class LRU(Policy):
    """Evict what the program has not touched for longest."""

    score: ClassVar[str] = "lru"


@dataclass(frozen=True)
class Largest(Policy):
    """Evict the largest version."""

    score: ClassVar[str] = "largest"


@dataclass(frozen=True)
class EvictEverything(Policy):
    """Evict all that is not pinned after every operator.

    For tests: each value is then recomputed whenever it is read, so that an operator whose replay
    is not its first run's twin shows at once.
    """

    score: ClassVar[str] = "on"
    evict_everything: ClassVar[bool] = True
