# SPDX-License-Identifier: Apache-2.0
"""What every policy is, the score that looks back, and policies that say what to keep.

The score lives once, in the C++ core. `c` is the cost of recomputing a version from its inputs, `m`
its bytes, `age` the program time since the program last touched it; the candidate with the lowest
score is evicted first.
"""

from dataclasses import dataclass
from typing import ClassVar

from .. import _C
from ..errors import expect


@dataclass(frozen=True)
class Policy:
    """What all policies have in common: a score, and that marked values are evicted last."""

    # Without a budget, what is not kept is discarded when the function returns.
    discards: ClassVar[bool] = False
    # To replay a lot is what it is for: nobody is warned.
    replays_freely: ClassVar[bool] = False

    def core(self) -> _C.Policy:
        """Return the policy as the core takes it: for a plan, until there is one."""
        return _C.Policy()


@dataclass(frozen=True)
class ON(Policy):
    """Evict the smallest ``(c + a / 2) / (m * age ** 0.6)``: it knows only the past.

    ``c`` is the cost of recomputing a value from its inputs, ``m`` its bytes, and ``age`` the
    program time since the program last touched it. ``a`` is the cost of its evicted ancestors,
    which would have to be recomputed first; an ancestor that the program has dropped counts twice.
    Until an operator of the program has read the value, the score is multiplied by 4.
    A backward reads values in reverse. So once replays in it are costly, the distance from the
    value that it read last replaces ``age``.
    """


@dataclass(frozen=True)
class Speed(Policy):
    """Keep the results of matrix products, convolutions and attention; evict others first.

    Values marked with :func:`keep` are kept, too. Kept values are evicted only if nothing else is
    left. Both the others and the kept ones are evicted by the score of :class:`ON`. Without a
    budget all others are discarded when the function returns, and are computed again when the
    backward pass reads them.

    After the strategy ``'speed'`` of Salimans and Bulatov, *Saving memory using
    gradient-checkpointing* (github.com/cybertronai/gradient-checkpointing, 2018);
    ``jax.checkpoint_policies.dots_saveable`` and the selective checkpointing of torch are alike.
    Its weaknesses: when little more than the products fits, the cheap values between them are
    replayed again and again; and a product that is cheap for its bytes is kept, too.
    """

    discards: ClassVar[bool] = True

    def core(self) -> _C.Policy:
        return _C.Policy(keeping=_C.Keeping(products=True))


@dataclass(frozen=True)
class Manual(Policy):
    """Keep what the program has marked with :func:`keep`; evict everything else first.

    A marked value is evicted only if nothing else is left, except what replays are about to read.
    The budget holds even then. Both marked and other values are evicted by the score of
    :class:`ON`. Without a budget all others are discarded when the function returns, and are
    computed again when the backward pass reads them, as in ``jax.checkpoint``.

    Names choose among the marks, as in ``jax.checkpoint_policies``. Without marks, this is its
    ``nothing_saveable``. Its weakness: what is kept does not change with the budget.

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
            fits = isinstance(names, tuple) and all(isinstance(n, str) and n for n in names)
            needed = 'a tuple of names, such as ("attention",),'
            expect(fits, f"Manual({option}=...)", needed, names)

    def core(self) -> _C.Policy:
        given = (("only", self.only), ("but", self.but), ("all but", self.drop))
        marks, names = next(((m, n) for m, n in given if n is not None), ("all", ()))
        return _C.Policy(keeping=_C.Keeping(marks=marks, names=list(names)))
