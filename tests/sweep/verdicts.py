# SPDX-License-Identifier: Apache-2.0
"""Whether a program under evict-everything is bitwise the untransformed one."""

import contextlib
import dataclasses
import functools
import itertools
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from helpers import (
    EVERY,
    assert_bitwise_equal,
    assert_nothing_keyed,
    assert_nothing_left,
    remains,
    untransformed,
)

import rematfn

from .kinds import KINDS, Kind
from .samples import DTYPES, UNINITIALISED, Sample, dtypes_of, name_of, samples

PASSED, REFUSED, FAILED = "passed", "refused", "failed"


@dataclasses.dataclass
class Tally:
    """The verdicts on all samples of one operator, kind and dtype."""

    counts: Counter[str] = dataclasses.field(default_factory=Counter)
    failure: str = ""  # the first one

    def add(self, verdict: str, why: str, sample: int) -> None:
        self.counts[verdict] += 1
        if verdict == FAILED and not self.failure:
            self.failure = f"sample {sample}: {why}"


def attempt(run: Any, transform: Any) -> tuple[Any, Exception | None]:
    """Return what `run` gave, or what it raised, without the frames that this holds."""
    torch.manual_seed(7)
    try:
        return transform(run), None
    except Exception as error:
        return None, error.with_traceback(None)


def judge(info: Any, kind: Kind, sample: Sample) -> tuple[str, str]:
    """Return the verdict on one program, and why it failed."""
    run = functools.partial(kind.program, info, sample)
    expected, refusal = attempt(run, lambda run: run(untransformed))
    actual, error = attempt(run, EVERY)
    if refusal is not None:
        if error is None:
            return FAILED, f"no {type(refusal).__name__}, which torch raises: {refusal}"
        if type(error) is not type(refusal):
            return FAILED, f"{error!r} instead of {refusal!r}"
        return REFUSED, ""
    if error is not None:
        return FAILED, repr(error)
    try:
        assert_nothing_keyed(actual)
        assert_bitwise_equal(actual, expected)
        rematfn.testing.check()
    except AssertionError as found:
        again, _ = attempt(run, lambda run: run(untransformed))
        try:
            assert_bitwise_equal(again, expected)
        except AssertionError:
            return FAILED, f"not reproducible in eager: {found}"
        return FAILED, str(found)
    return PASSED, ""


@contextlib.contextmanager
def filled_memory(info: Any) -> Iterator[None]:
    """Have torch fill uninitialised memory, for operators whose results depend on it."""
    if name_of(info) not in UNINITIALISED:
        yield
        return
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def sweep(info: Any, kinds: list[str], dtypes: list[str]) -> Iterator[tuple[str, str, Tally]]:
    """Yield the tally of each dtype and kind that the operator has."""
    before = remains()
    for dtype, requires_grad in itertools.product(dtypes_of(info), (False, True)):
        having = [
            kind
            for kind in map(KINDS.__getitem__, kinds)
            if kind.requires_grad == requires_grad and kind.applies(info, DTYPES[dtype])
        ]
        if dtype not in dtypes or not having:
            continue
        every = list(samples(info, DTYPES[dtype], requires_grad))
        for kind in having:
            yield kind.name, dtype, tally(info, kind, every, before)


def tally(info: Any, kind: Kind, every: list[Sample], before: dict[str, int]) -> Tally:
    """Return the verdicts on these samples; what they leave behind is a failure too."""
    result = Tally()
    with filled_memory(info):
        for number, sample in enumerate(every):
            result.add(*judge(info, kind, sample), sample=number)
    try:
        assert_nothing_left(before)
    except AssertionError as left:
        result.add(FAILED, str(left), sample=-1)
        before.update(remains())
    return result
