# SPDX-License-Identifier: Apache-2.0
"""Budgets: how they are written, what they mean, how they print."""

import contextlib
import numbers
import operator
import re
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, Final, SupportsIndex, TypeAlias

from .. import _C

BINARY: Final = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_UNITS: Final = BINARY | {"kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_WITH_UNIT: Final = re.compile(r"([0-9]+(?:\.[0-9]+)?|\.[0-9]+)(\s*)([A-Za-z]+|%)")
_LETTERS: Final = {unit[0].lower(): unit for unit in ("KiB", "MiB", "GiB", "TiB")}

_BYTES: Final = """
A budget is one of
  4096, "4096"          bytes
  "1.5GiB", "12 KiB"    binary units: KiB, MiB, GiB, TiB
  "200MB", "64 kB"      decimal units: kB, MB, GB, TB"""
_ACCEPTED: Final = (
    _BYTES
    + """
  0.3, "30%"            a float in (0, 1], or per cent: this fraction of the unconstrained peak
  rematfn.Budget("8GiB")  bytes that all functions which are given this object share
  None                  no cap"""
)


class SharedByCopies:
    """What copies of a model share with it, since all need memory of the same process."""

    def __copy__(self) -> Any:
        return self

    def __deepcopy__(self, memo: dict[int, object]) -> Any:
        return self


class Budget(SharedByCopies):
    """Bytes that several functions share: the sum over all their live calls stays within them.

    A call lives until the graph that it leaves behind is freed. So the blocks of a model, each
    transformed by itself, may together hold as much as one function around all of them. The same
    is true of microbatches whose backward passes come later, and of calls on several threads. A
    call that needs room may evict values of the others: those that are cheapest to replay. Results
    do not change.

    The object is the budget: functions share it if they are given the same one. Calls nested in
    each other that share a budget count once. A copy of a model (:func:`copy.deepcopy`) shares its
    budget, since both need memory of the same process. An unpickled model has a budget of its own.

    Args:
        nbytes: How many, as :func:`remat` takes them: ``4096``, ``"8GiB"``. A fraction is refused,
            since several functions have no common peak.

    Attributes:
        bytes: How many.

    Raises:
        ValueError: The number of bytes means nothing.
        TypeError: It is no number of bytes.

    Example:
        >>> import torch, rematfn
        >>> shared = rematfn.Budget("16KiB")
        >>> def block(x):
        ...     return x.sin().cos().exp()
        >>> x = torch.ones(1024, requires_grad=True)
        >>> y = x
        >>> for _ in range(4):
        ...     y = rematfn.remat(block, shared)(y)
        >>> y.sum().backward()
        >>> shared.peak_bytes <= 16 * 1024, shared.resident_bytes
        (True, 0)
    """

    def __init__(self, nbytes: SupportsIndex | str) -> None:
        limit = parse_bytes(nbytes, "Budget({})")
        if limit.bytes is None:
            raise TypeError(f"Budget({nbytes!r}): bytes are needed.{_BYTES}")
        self.bytes: int = limit.bytes
        self._unit = limit.unit
        self._shared = _C.SharedBudget(limit.bytes)

    @property
    def resident_bytes(self) -> int:
        """Bytes in use now, those that running operators are about to allocate included."""
        return self._shared.resident_bytes()

    @property
    def peak_bytes(self) -> int:
        """The most bytes that were in use at once."""
        return self._shared.peak_bytes()

    def __repr__(self) -> str:
        return f"Budget({_C.format_bytes(self.bytes, self._unit)!r})"

    def __reduce__(self) -> tuple[object, ...]:
        return Budget, (self.bytes,)


BudgetLike: TypeAlias = Budget | SupportsIndex | float | str | None


@dataclass(frozen=True)
class Limit:
    """A budget as it was meant: bytes, a fraction of the unconstrained peak, or no cap."""

    bytes: int | None = None  # the most that a level may keep resident
    fraction: float | None = None  # of the unconstrained peak, which every call measures
    shared: Budget | None = None  # whose bytes these are, if others use them too
    unit: str = field(default="", compare=False, repr=False)  # in which they were given

    def __post_init__(self) -> None:
        if self.fraction is not None and not 0 < self.fraction <= 1:  # NaN is turned away too
            raise ValueError(_NO_FRACTION)
        if self.bytes is not None and self.bytes < 1:
            raise ValueError("it must be at least one byte.")
        if self.bytes is not None and self.bytes >= 2**63:
            raise ValueError("it is more than any memory has.")

    def of(self, peak: int) -> int | None:
        """Return the bytes that this comes to, of an unconstrained ``peak``; None: no cap."""
        return self.bytes if self.fraction is None else max(1, int(self.fraction * peak))

    def __str__(self) -> str:
        if self.shared is not None:
            return repr(self.shared)
        if self.bytes is not None:
            return _C.format_bytes(self.bytes, self.unit)
        if self.fraction is not None:
            return f"{self.fraction:g} of the unconstrained peak"
        return "no cap"


_NO_FRACTION: Final = "as a fraction it must be in (0, 1]."


def parse_budget(
    budget: BudgetLike, call: str = "remat(f, budget={})", accepted: str = _ACCEPTED
) -> Limit:
    """Return the budget that a user's argument stands for.

    Units are read without regard to case, so ``"1gib"`` is binary and ``"1gb"`` decimal. ``1.0`` is
    the whole peak; ``1`` is turned away, since one byte is hardly meant. Fractions of a byte are
    dropped: a budget is an upper bound.

    For messages: ``call`` is what the user has written, with braces for the budget, and
    ``accepted`` what a budget may be there.

    Example:
        >>> parse_budget("1.5GiB")
        Limit(bytes=1610612736, fraction=None, shared=None)
        >>> print(parse_budget(65536), "|", parse_budget(0.3), "|", parse_budget(None))
        64 KiB | 0.3 of the unconstrained peak | no cap
    """
    try:
        return _parse(budget)
    except (TypeError, ValueError) as problem:
        said = f"{call.format(repr(budget))}: {problem}{accepted}"
        raise type(problem)(said) from None


def parse_bytes(given: BudgetLike, call: str) -> Limit:
    """Return the bytes that a user's argument stands for, or no cap; no fraction, no Budget."""
    limit = parse_budget(given, call, _BYTES)
    if limit.fraction is not None or limit.shared is not None:
        raise TypeError(f"{call.format(repr(given))}: bytes are needed.{_BYTES}")
    return limit


def _parse(budget: BudgetLike) -> Limit:
    if budget is None:
        return Limit()
    if isinstance(budget, Budget):
        return Limit(bytes=budget.bytes, shared=budget, unit=budget._unit)
    if isinstance(budget, str):
        return _parse_text(budget)
    if isinstance(budget, bool):
        raise TypeError("a bool is not a budget.")
    try:
        size = operator.index(budget)  # type: ignore[arg-type]  # floats are tried next
    except TypeError:
        if isinstance(budget, numbers.Real):
            number = float(budget)
            if 1 < number < 2**63 and number.is_integer():
                raise ValueError(
                    f"{_NO_FRACTION} Bytes are an int: did you mean {int(number)}?"
                ) from None
            return Limit(fraction=number)
        raise TypeError(f"got a {type(budget).__name__}.") from None
    if size == 1:
        raise ValueError("that is one byte. 1.0 is the whole peak.")
    return Limit(bytes=size)


def _parse_text(text: str) -> Limit:
    stripped = text.strip()
    if re.fullmatch(r"[0-9]+", stripped):
        return Limit(bytes=int(stripped))
    match = _WITH_UNIT.fullmatch(stripped)
    if match is None:
        problem = "neither whole bytes nor a number with a unit."
        with contextlib.suppress(ValueError):
            if 0 < float(stripped) <= 1:  # bytes come whole, a fraction is a float
                problem += f" Did you mean the fraction {float(stripped)}?"
        raise ValueError(problem)
    number, space, unit = match.groups()
    if unit == "%" and space:
        raise ValueError(f'did you mean "{number}%"?')
    if unit == "%":
        return Limit(fraction=float(Fraction(number) / 100))
    named = next((name for name in _UNITS if name.lower() == unit.lower()), None)
    if named is None:
        meant = _LETTERS.get(unit.lower()) or _LETTERS.get(unit.lower().removesuffix("i"))
        guess = f' Did you mean "{number}{meant}"?' if meant else ""
        raise ValueError(f"there is no unit {unit!r}.{guess}")
    return Limit(bytes=int(Fraction(number) * _UNITS[named]), unit=named)
