# SPDX-License-Identifier: Apache-2.0
"""A score that is written in Python."""

import math
import numbers
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from .. import _C
from ..errors import expect
from ._scores import Policy


class Candidate(NamedTuple):
    """What a score written in Python is given of a value that may be evicted.

    Attributes:
        nbytes: Its bytes.
        cost: What replaying its producer costs, in seconds of the cost model.
        ancestors: What replaying its evicted ancestors costs, which would come first.
        descendants: What replaying its evicted descendants costs, which would need it.
        age: Program time since the program last touched it, in the same seconds.
        next_use: Program time until the program reads it next, ``inf`` if it never will; None where
            that is not known.
        consumed: Whether an operator of the program has read it.
        producer: The operator that made it, as ``"aten::mm"``.
    """

    nbytes: float
    cost: float
    ancestors: float
    descendants: float
    age: float
    next_use: float | None
    consumed: bool
    producer: str


Scorer: TypeAlias = Callable[[Candidate], float]


@dataclass(frozen=True)
class Custom(Policy):
    """Evict what a function of Python scores lowest. For experiments.

    ``remat(f, budget, policy=score)`` is short for ``policy=Custom(score)``. At each eviction the
    function is called for each :class:`Candidate`, that is, for each resident value. So it is slow.
    Values marked with :func:`keep` are evicted last, whatever their scores. The function must not
    use tensors of the level. An exception of the function is raised by the operator that needed
    room (a TypeError as a RuntimeError); nothing is evicted then, and nothing is lost. A score
    that is no number is a ValueError.

    Attributes:
        scorer: From a candidate to a number; the value with the lowest is evicted first.

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
        expect(callable(self.scorer), "Custom(scorer)", "a function", self.scorer)

    def core(self) -> _C.Policy:
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

        return _C.Policy(custom_score=score)
