# SPDX-License-Identifier: Apache-2.0
"""Policies: which version to evict when room is needed.

Each names a score that lives once, in the C++ core. `c` is the cost of recomputing a version from
its inputs, `m` its bytes, `age` the program time since the program last touched it; the candidate
with the lowest score goes first.
"""

import math
import numbers
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple, TypeAlias

from . import _C

_MOST_SEARCHES = 10  # times the operators that may bring nothing


@dataclass(frozen=True)
class Policy:
    """What all policies have in common: a score."""

    kind: ClassVar[str] = "on"
    evict_everything: ClassVar[bool] = False
    # Without a budget, what is not kept goes when the function returns.
    discards: ClassVar[bool] = False

    def score(self) -> _C.Score:
        """Return the score as the core takes it."""
        return _C.Score(self.kind, 0.5, 0.6, 4.0)

    def keeping(self) -> _C.Keeping:
        """Return what goes only when nothing else is left."""
        return _C.Keeping(False, "ignored", [])

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


@dataclass(frozen=True)
class Planned(Policy, ABC):
    """A policy that records the first call of each signature and has a plan for those after it.

    Attributes:
        first: The policy of calls about which nothing is known.
    """

    first: Policy = field(default=ON(), kw_only=True)

    def __post_init__(self) -> None:
        scores = isinstance(self.first, Policy) and not self.first.discards
        if not scores or isinstance(self.first, Planned):
            raise TypeError(
                f"{type(self).__name__}(first=...): a policy that scores, such as ON(), is needed, "
                f"got {self.first!r}."
            )

    def score(self) -> _C.Score:
        """Return the score of calls about which nothing is known."""
        return self.first.score()

    def judge(self) -> Callable[..., float] | None:
        """Return the score of such calls, if it is written in Python."""
        return self.first.judge()

    @abstractmethod
    def plan(
        self,
        program: _C.Program,
        budget: int,
        at_most: int | None = None,
        like: _C.Program | None = None,
    ) -> None:
        """Have the program look for a plan, and begin with the settings of that of ``like``.

        If it takes a search, that simulates about ``at_most`` operators.
        """

    def plan_later(self, program: _C.Program, budget: int) -> None:
        """Have a thread look for a better plan, if there is anything to look for."""


@dataclass(frozen=True)
class Guided(Planned):
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
        search: Operators that a thread may simulate in vain, without a plan that replays a
            hundredth less, once for each signature and budget; ten times as many in all. So what is
            found in the end is the same on every machine. A million takes one or two seconds. The
            second call waits for the first 30,000, later calls use what has been found by then.
            With 0, no thread is started: the first plan that fits.
    """

    search: int = 1_000_000

    def __post_init__(self) -> None:
        super().__post_init__()
        if type(self.search) is not int or self.search < 0:
            raise ValueError(
                f"Guided(search=...): a number of operators is needed, such as 1_000_000, "
                f"got {self.search!r}."
            )

    def plan(
        self,
        program: _C.Program,
        budget: int,
        at_most: int | None = None,
        like: _C.Program | None = None,
    ) -> None:
        """Have the program look for a plan while that pays, for ``at_most`` operators."""
        most = _MOST_SEARCHES * self.search
        program.search(
            budget, self.search, most if at_most is None else min(at_most, most), like=like
        )

    def plan_later(self, program: _C.Program, budget: int) -> None:
        """Have a thread look for a better plan while that pays."""
        if self.search > 0:
            program.search_later(budget, self.search, _MOST_SEARCHES * self.search)


@dataclass(frozen=True)
class Sqrt(Planned):
    """Cut the recorded sequence into segments, keep what crosses, and compute the rest again.

    The forward part of a call is cut into segments that make about as many bytes each. A value that
    a later segment reads is held dear; of the rest goes what is read last. With about the square
    root of n segments a chain of n operators needs memory for twice that many values, and runs each
    operator twice at most.

    The first call of a signature is recorded and runs with ``first``, as with :class:`Guided`. So
    does a call for which no number of segments fits the budget. Without a budget nothing has to go.

    After Chen et al., *Training Deep Nets with Sublinear Memory Cost* (arXiv 1604.06174, 2016), who
    drop all of the rest at once; here it goes when room is needed. Its weakness: segments know
    bytes alone, not what a value costs, and what a long skip carries crosses every boundary.

    Attributes:
        segments: How many; None: of those that fit, the number that recomputes least.
    """

    segments: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        found = self.segments
        if found is not None and (type(found) is not int or found < 1):
            raise ValueError(f"Sqrt(segments=...): a number from 1 or None, got {found!r}.")

    def plan(
        self,
        program: _C.Program,
        budget: int,
        at_most: int | None = None,
        like: _C.Program | None = None,
    ) -> None:
        """Have the program cut itself into segments."""
        program.cut_into(budget, self.segments or 0)


@dataclass(frozen=True)
class Memory(Planned):
    """Keep the cut points of the recorded graph, and compute what is between them again.

    A cut point is a value through which all paths of the forward go: an articulation point of its
    graph, such as the stream between two residual blocks. Each of them is held dear, or every
    second one, or so on: as recomputes least within the budget. Values that depend on no argument
    (a mask), and small ones, may go around them.

    The first call of a signature is recorded and runs with ``first``, as with :class:`Guided`. So
    does a call for which no choice fits the budget. Without a budget nothing has to go.

    After the strategy ``'memory'`` of Salimans and Bulatov, *Saving memory using
    gradient-checkpointing* (github.com/cybertronai/gradient-checkpointing, 2018). Its weakness: a
    graph with a skip from end to end, such as a U-Net's, has no cut points.
    """

    def plan(
        self,
        program: _C.Program,
        budget: int,
        at_most: int | None = None,
        like: _C.Program | None = None,
    ) -> None:
        """Have the program find its cut points."""
        program.cut_at_points(budget)


@dataclass(frozen=True)
class Speed(Policy):
    """Keep the results of matrix products, convolutions and attention; what is cheap goes first.

    They go when nothing else is left, and then by the score of :class:`ON`, as all others do before
    them. Without a budget all others go when the function returns, and are computed again when the
    backward pass reads them.

    After the strategy ``'speed'`` of Salimans and Bulatov, *Saving memory using
    gradient-checkpointing* (github.com/cybertronai/gradient-checkpointing, 2018);
    ``jax.checkpoint_policies.dots_saveable`` and the selective checkpointing of torch are alike.
    Its weakness: when little more than the products fits, the cheap values between them are
    replayed over and over, and a product that is cheap for its bytes is kept all the same.
    """

    discards: ClassVar[bool] = True

    def keeping(self) -> _C.Keeping:
        """Return what goes only when nothing else is left."""
        return _C.Keeping(True, "ignored", [])


@dataclass(frozen=True)
class Manual(Policy):
    """Keep what the program has marked with :func:`keep`; all else goes first.

    A marked value goes when nothing else is left but what replays are about to read, and then by
    the score of :class:`ON`, as all others do before it: the budget comes first. Without a budget
    all others go when the function returns, and are computed again when the backward pass reads
    them, as in ``jax.checkpoint``.

    Names narrow it down, as in ``jax.checkpoint_policies``. Without marks, this is its
    ``nothing_saveable``. Its weakness is that of hands: what is kept does not change with the
    budget.

    Attributes:
        only: Keep what is marked with one of these names (``save_only_these_names``).
        but: Keep what is marked, except with one of these (``save_any_names_but_these``).
        drop: Keep everything, marked or not, except what is marked with one of these
            (``save_anything_except_these_names``). At most one of the three is given.
    """

    discards: ClassVar[bool] = True
    only: tuple[str, ...] | None = None
    but: tuple[str, ...] | None = None
    drop: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        given = {k: v for k in ("only", "but", "drop") if (v := getattr(self, k)) is not None}
        if len(given) > 1:
            raise ValueError(f"Manual(...): one of only, but and drop, got {', '.join(given)}.")
        for option, names in given.items():
            if not isinstance(names, tuple) or not all(isinstance(n, str) and n for n in names):
                raise TypeError(
                    f'Manual({option}=...): a tuple of names is needed, such as ("attention",), '
                    f"got {names!r}."
                )

    def keeping(self) -> _C.Keeping:
        """Return what goes only when nothing else is left."""
        if self.only is not None:
            return _C.Keeping(False, "only", list(self.only))
        if self.but is not None:
            return _C.Keeping(False, "but", list(self.but))
        if self.drop is not None:
            return _C.Keeping(False, "all but", list(self.drop))
        return _C.Keeping(False, "all", [])


class Candidate(NamedTuple):
    """What a score written in Python is shown of a value that may go.

    Attributes:
        nbytes: Its bytes.
        cost: What replaying its producer costs, in seconds of the cost model.
        ancestors: What replaying its evicted ancestors costs, which would come first.
        age: Program time since the program last touched it, in the same seconds.
        next_use: Program time until the program reads it next, ``inf`` if it never will; None where
            that is not known.
        consumed: Whether an operator of the program has read it.
        producer: The operator that made it, as ``"aten::mm"``.
    """

    nbytes: float
    cost: float
    ancestors: float
    age: float
    next_use: float | None
    consumed: bool
    producer: str


Scorer: TypeAlias = Callable[[Candidate], float]


@dataclass(frozen=True)
class Custom(Policy):
    """Evict what a function of Python scores lowest. For experiments.

    ``remat(f, budget, policy=score)`` is short for ``policy=Custom(score)``. The function is given
    each :class:`Candidate` each time that something is to go, which is slow: a call of Python for
    each value that is resident. It must not use tensors of the level. What it raises, the operator
    that room was made for raises (a RuntimeError instead of a TypeError); nothing is evicted then,
    and nothing lost. A score that is no number is a ValueError.

    Attributes:
        scorer: From a candidate to a number; the lowest goes first.

    Example:
        >>> import torch, rematfn
        >>> def loss(x):
        ...     return x.sin().cos().exp().sum()
        >>> g = rematfn.remat(torch.func.grad(loss), 0.9, policy=lambda c: c.cost / c.nbytes)
        >>> g(torch.zeros(3))
        tensor([-0., -0., -0.])
    """

    scorer: Scorer

    def __post_init__(self) -> None:
        if not callable(self.scorer):
            raise TypeError(f"Custom(scorer): a function is needed, got {self.scorer!r}.")

    def judge(self) -> Callable[..., float]:
        """Return the score on the fields of a candidate."""

        def score(*fields: object) -> float:
            candidate = Candidate(*fields)  # type: ignore[arg-type]
            try:
                found: object = self.scorer(candidate)
            except TypeError as error:
                # Raised from `x * y`, it would tell Python that tensors cannot be multiplied.
                raise RuntimeError(f"policy={self.scorer!r}: {error}") from error
            if not isinstance(found, numbers.Real):
                raise ValueError(f"policy={self.scorer!r}: a score is a number, got {found!r}.")
            number = float(found)
            if math.isnan(number):
                raise ValueError(f"policy={self.scorer!r}: NaN is no score; it is {candidate}'s.")
            return number

        return score


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
