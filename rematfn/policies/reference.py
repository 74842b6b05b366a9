# SPDX-License-Identifier: Apache-2.0
"""Scores of the literature, to compare with. None is better than those of `rematfn.policies`.

They are custom scores: slow, as all of Python's. `c` is what replaying a version's producer costs,
`m` its bytes, `age` the program time since the program last touched it.
"""

from dataclasses import dataclass, field

from ._custom import Candidate, Custom, Scorer

__all__ = ["DTR", "LRU", "MSPS", "Largest", "Local"]

_LEAST_AGE = 5e-6  # seconds: what the smallest operator costs


def _staleness(c: Candidate) -> float:
    return c.nbytes * (c.age + _LEAST_AGE)


@dataclass(frozen=True)
class _Reference(Custom):
    scorer: Scorer = field(init=False, repr=False)  # the class's, and no method


class DTR(_Reference):
    """Evict the smallest ``(c + neighbourhood) / (m * age)``.

    The neighbourhood is every evicted ancestor and descendant. This is h_DTR of Kirisame et al.,
    *Dynamic Tensor Rematerialization* (ICLR 2021).
    """

    scorer: Scorer = staticmethod(lambda c: (c.cost + c.ancestors + c.descendants) / _staleness(c))


class Local(_Reference):
    """Evict the smallest ``c / (m * age)`` (h_local, ibid.)."""

    scorer: Scorer = staticmethod(lambda c: c.cost / _staleness(c))


class MSPS(_Reference):
    """Evict the smallest ``(c + ancestors) / m``: memory saving per second.

    After Peng et al., *Capuchin* (ASPLOS 2020), as Kirisame et al. compare with it.
    """

    scorer: Scorer = staticmethod(lambda c: (c.cost + c.ancestors) / c.nbytes)


class LRU(_Reference):
    """Evict what the program has not touched for longest."""

    scorer: Scorer = staticmethod(lambda c: -c.age)


class Largest(_Reference):
    """Evict the largest version."""

    scorer: Scorer = staticmethod(lambda c: -c.nbytes)
