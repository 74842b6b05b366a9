# SPDX-License-Identifier: Apache-2.0
"""Policies that record a call and have a plan for those after it."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

from .. import _C
from ..errors import expect
from ._scores import ON, Policy

_MOST_SEARCHES = 10  # times the operators that may bring nothing


@dataclass(frozen=True)
class Planned(Policy, ABC):
    """A policy that records the first call of each signature and has a plan for those after it.

    Attributes:
        first: The policy of calls about which nothing is known.
    """

    first: Policy = field(default=ON(), kw_only=True)

    def __post_init__(self) -> None:
        scores = isinstance(self.first, Policy) and not self.first.discards
        scores = scores and not isinstance(self.first, Planned)
        call = f"{type(self).__name__}(first=...)"
        expect(scores, call, "a policy that scores, such as ON(),", self.first)

    def core(self) -> _C.Policy:
        """Return the policy of calls about which nothing is known."""
        return self.first.core()

    @abstractmethod
    def begin(self, program: _C.Program, budget: int, **how: Any) -> None:
        """Begin a search for a plan, unless one has begun.

        ``how``, as of `_C.Program.search`: what is known of ``like`` is tried first; values may be
        moved over ``link``; local search follows, unless not ``local``.
        """


@dataclass(frozen=True)
class Guided(Planned):
    """Measure the first call of each signature, and guide those after it; the default.

    The first call is run with the policy ``first`` and recorded: the sequence of operators, what
    each reads, and when the program drops a value. Later calls of the same signature know every
    next use. They first evict what is never read again. For other values the score weighs the time
    since the last access against the time to the next. Simulations of the recorded call find the
    best weights for the budget. Each operator is compared with the record. A call of other sizes,
    or one that leaves out operators or runs others, follows the nearest record and finds its place
    there again. While most of its operators are in no record, it follows ``first``. Results never
    depend on the record.

    Recording and guiding as in Peng et al., *Capuchin* (ASPLOS 2020).

    Attributes:
        first: The policy of calls about which nothing is known.
        search: How many operators are simulated without a better plan before the search ends, where
            the best plan replays half of the program or more. Where it replays less, fewer will do,
            in proportion. A plan is better if it replays a hundredth less. At most ten times as
            many are simulated for each signature and budget. A million takes two to ten seconds.
            A thread simulates beside the calls, and each call follows the best plan so far; the
            second call simulates until one fits, and a schedule where that replays much. With 0,
            all calls follow the first plan that fits.
    """

    search: int = 1_000_000

    def __post_init__(self) -> None:
        super().__post_init__()
        is_number = type(self.search) is int and self.search >= 0
        needed = "a number of operators, such as 1_000_000,"
        expect(is_number, "Guided(search=...)", needed, self.search, ValueError)

    def begin(self, program: _C.Program, budget: int, **how: Any) -> None:
        most = _MOST_SEARCHES * self.search
        program.search(budget, self.search, most, online=self.first.core(), **how)


@dataclass(frozen=True)
class Sqrt(Planned):
    """Cut the recorded sequence into segments, keep what crosses, and compute the rest again.

    The forward part of a call is cut into segments that make about as many bytes each. Values that
    a later segment reads are evicted last. Of the others, those that are read last are evicted
    first. With about the square root of n segments a chain of n operators needs memory for twice
    that many values, and runs each operator twice at most.

    The first call of a signature is recorded and runs with ``first``, as with :class:`Guided`. So
    does a call for which no number of segments fits the budget. Without a budget nothing is
    evicted.

    After Chen et al., *Training Deep Nets with Sublinear Memory Cost* (arXiv 1604.06174, 2016), who
    discard all other values at once; here they are evicted when room is needed. Its weakness:
    segments are chosen by bytes, not by costs, and a long skip crosses every boundary.

    Attributes:
        segments: How many; None: of those that fit, the number that recomputes least.
    """

    segments: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        found = self.segments
        fits = found is None or (type(found) is int and found >= 1)
        expect(fits, "Sqrt(segments=...)", "a number from 1 or None", found, ValueError)

    def begin(self, program: _C.Program, budget: int, **_: Any) -> None:
        program.cut_into(budget, self.segments or 0)


@dataclass(frozen=True)
class Memory(Planned):
    """Keep the cut points of the recorded graph, and compute what is between them again.

    A cut point is a value through which all paths of the forward go: an articulation point of its
    graph, such as the stream between two residual blocks. All of them are evicted last, or every
    second one, and so on: the choice that recomputes least within the budget. Paths of small
    values, and of values that depend on no argument (a mask), are ignored.

    The first call of a signature is recorded and runs with ``first``, as with :class:`Guided`. So
    does a call for which no choice fits the budget. Without a budget nothing is evicted.

    After the strategy ``'memory'`` of Salimans and Bulatov, *Saving memory using
    gradient-checkpointing* (github.com/cybertronai/gradient-checkpointing, 2018). Its weakness: a
    graph with a skip from end to end, such as a U-Net's, has no cut points.
    """

    def begin(self, program: _C.Program, budget: int, **_: Any) -> None:
        program.cut_at_points(budget)
