# SPDX-License-Identifier: Apache-2.0
"""Scores of the literature, to compare with. None is better than those of `rematfn.policies`."""

from dataclasses import dataclass
from typing import ClassVar

from ._scores import Policy

__all__ = ["DTR", "LRU", "MSPS", "Eq", "Largest", "Local"]


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
