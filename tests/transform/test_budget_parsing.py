# SPDX-License-Identifier: Apache-2.0
"""Budgets: what is accepted, what is meant, how it prints, what is refused and in which words."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rematfn._C import format_bytes
from rematfn._transform.budget import Limit, parse_budget

# The same numbers each time, however long each takes.
always_the_same = settings(deadline=None, derandomize=True, database=None)


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        (4096, 4096),
        ("1", 1),
        (np.int64(4096), 4096),
        ("4096", 4096),
        (" 4096 ", 4096),
        ("4096B", 4096),
        ("12KiB", 12 * 1024),
        ("1.5GiB", 3 * 2**29),
        ("1.5 GIB", 3 * 2**29),
        (".5 MiB", 2**19),
        ("64 kB", 64_000),
        ("200MB", 200_000_000),
        ("4.1kB", 4100),  # 4.1 * 1000 is 4099.999... in floating point
        ("1.9999B", 1),
        ("0.3KiB", 307),  # 307.2
    ],
)
def test_bytes_are_read_as_written(written, meant):
    assert parse_budget(written) == Limit(bytes=meant)
    assert type(parse_budget(written).bytes) is int


@pytest.mark.parametrize(
    ("budget", "problem"),
    [
        (1, "that is one byte. 1.0 is the whole peak."),
        (np.int64(1), "that is one byte. 1.0 is the whole peak."),
        ("2G", "there is no unit 'G'. Did you mean \"2GiB\"?"),
        ("8 Gi", "there is no unit 'Gi'. Did you mean \"8GiB\"?"),
        ("50 %", 'did you mean "50%"?'),
        ("0.3", "Did you mean the fraction 0.3?"),
        ("150%", "as a fraction it must be in (0, 1]."),
        (0, "at least one byte"),
        ("0.5B", "at least one byte"),
        (0.0, "in (0, 1]"),
        (1.5, "in (0, 1]"),
        (4096.0, "in (0, 1]. Bytes are an int: did you mean 4096?"),
        (float("nan"), "in (0, 1]"),
        (np.float32(2.0), "in (0, 1]. Bytes are an int: did you mean 2?"),
        (2**63, "more than any memory has"),
        ("", "whole bytes"),
        ("-5MiB", "whole bytes"),
        ("1e9", "whole bytes"),
        ("GiB", "whole bytes"),
        ("1GiB 5MiB", "whole bytes"),
        ("²KiB", "whole bytes"),
        ("2 gigabytes", "no unit 'gigabytes'"),
    ],
)
def test_what_means_nothing_is_a_value_error(budget, problem):
    with pytest.raises(ValueError, match="budget") as caught:
        parse_budget(budget)
    assert problem in str(caught.value)
    assert_shows_the_accepted_forms(str(caught.value), budget)


@pytest.mark.parametrize(
    ("budget", "problem"),
    [
        (True, "a bool is not a budget"),
        (np.True_, "got a bool"),
        (b"1GiB", "got a bytes"),
        (1j, "got a complex"),
        ((1, "GiB"), "got a tuple"),
        ([4096], "got a list"),
        (object, "got a type"),
    ],
)
def test_what_is_no_budget_at_all_is_a_type_error(budget, problem):
    with pytest.raises(TypeError, match="budget") as caught:
        parse_budget(budget)
    assert problem in str(caught.value)
    assert_shows_the_accepted_forms(str(caught.value), budget)


def assert_shows_the_accepted_forms(message, budget):
    assert message.startswith(f"remat(f, budget={budget!r}): ")
    for form in ("4096", '"1.5GiB"', '"200MB"', "0.3", "(0, 1]", "None"):
        assert form in message


@pytest.mark.parametrize(
    ("n", "like", "text"),
    [
        (64 * 2**20, "", "64 MiB"),
        (100_000, "", "97.66 KiB"),
        (100_000, "MB", "100 kB"),
        (512, "", "512 B"),
        (2**64 - 1, "", "16777216 TiB"),
    ],
)
def test_bytes_are_printed_in_the_largest_unit_that_fits(n, like, text):
    assert format_bytes(n, like) == text


@always_the_same
@given(st.integers(min_value=1, max_value=2**50))
def test_what_is_printed_is_enough_and_close(n):
    read = parse_budget(format_bytes(n)).bytes
    assert n <= read <= n + Fraction(n, 100)
