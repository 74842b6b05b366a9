# SPDX-License-Identifier: Apache-2.0
"""Policies that say what to keep."""

from dataclasses import dataclass
from typing import ClassVar

from .. import _C
from ._scores import Policy


@dataclass(frozen=True)
class Speed(Policy):
    """Keep the results of matrix products, convolutions and attention; what is cheap goes first.

    So are values marked with :func:`keep`. They go when nothing else is left, and then by the score
    of :class:`ON`, as all others do before them. Without a budget all others go when the function
    returns, and are computed again when the backward pass reads them.

    After the strategy ``'speed'`` of Salimans and Bulatov, *Saving memory using
    gradient-checkpointing* (github.com/cybertronai/gradient-checkpointing, 2018);
    ``jax.checkpoint_policies.dots_saveable`` and the selective checkpointing of torch are alike.
    Its weakness: when little more than the products fits, the cheap values between them are
    replayed over and over, and a product that is cheap for its bytes is kept all the same.
    """

    discards: ClassVar[bool] = True

    def core(self) -> _C.Policy:
        """Return the policy as the core takes it."""
        return _C.Policy(keeping=_C.Keeping(products=True))


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

    def core(self) -> _C.Policy:
        """Return the policy as the core takes it."""
        given = (("only", self.only), ("but", self.but), ("all but", self.drop))
        marks, names = next(((m, n) for m, n in given if n is not None), ("all", ()))
        return _C.Policy(keeping=_C.Keeping(marks=marks, names=list(names)))
