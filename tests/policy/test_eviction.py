# SPDX-License-Identifier: Apache-2.0
"""Scores and the choice of a victim, on numbers: no tensors needed."""

from random import Random

import pytest

from rematfn import _C

TICK = 5e-6  # the cost of the smallest operator, and the least age


def candidate(
    nbytes=1.0,
    cost=1.0,
    neighbours=0.0,
    last_access=0.0,
    consumed=True,
    pinned=False,
    pending=False,
):
    return _C.Candidate(nbytes, cost, neighbours, last_access, consumed, pinned, pending)


def victim(kind, candidates, now, spare_pending):
    indices, _, _ = _C.choose_victims(
        kind, candidates, now, spare_pending, 1, [0.0] * len(candidates)
    )
    return indices[0] if indices else None


def test_on_is_cost_and_half_the_ancestors_over_bytes_and_age_to_the_three_fifths():
    c = candidate(nbytes=8, cost=3, neighbours=4)
    assert _C.score("on", c, 2 - TICK) == pytest.approx((3 + 4 / 2) / (8 * 2**0.6), rel=1e-6)


def test_on_counts_four_times_until_somebody_has_read_the_value():
    fresh, read = candidate(consumed=False), candidate(consumed=True)
    assert _C.score("on", fresh, 1.0) == pytest.approx(4 * _C.score("on", read, 1.0))


@pytest.mark.parametrize("kind", ["dtr", "eq"])
def test_dtr_and_eq_are_cost_and_neighbourhood_over_bytes_and_age(kind):
    c = candidate(nbytes=8, cost=3, neighbours=4)
    assert _C.score(kind, c, 2 - TICK) == pytest.approx((3 + 4) / (8 * 2))


def test_local_leaves_the_neighbourhood_out():
    assert _C.score("local", candidate(8, 3, 100), 2 - TICK) == pytest.approx(3 / (8 * 2))


def test_the_least_age_is_one_small_operator():
    assert _C.score("local", candidate(), 0.0) == pytest.approx(1 / TICK)


def test_lru_takes_the_oldest_and_largest_the_largest():
    candidates = [candidate(nbytes=4, last_access=3), candidate(2, last_access=1), candidate(9)]
    candidates[2] = candidate(nbytes=9, last_access=2)
    assert victim("lru", candidates, 5.0, True) == 1
    assert victim("largest", candidates, 5.0, True) == 2


def test_the_first_of_equals_goes():
    assert victim("on", [candidate(), candidate()], 1.0, True) == 0


def test_cheap_and_large_goes_before_dear_and_small():
    candidates = [candidate(nbytes=1, cost=5), candidate(nbytes=5, cost=1)]
    for kind in ("on", "dtr", "eq", "local"):
        assert victim(kind, candidates, 1.0, True) == 1


def test_what_would_need_many_ancestors_stays_longer():
    candidates = [candidate(neighbours=10), candidate(cost=2)]
    assert victim("on", candidates, 1.0, True) == 1
    assert victim("local", candidates, 1.0, True) == 0


def test_a_pinned_candidate_is_never_a_victim():
    assert victim("on", [candidate(pinned=True)], 1.0, False) is None
    assert victim("on", [candidate(pinned=True), candidate(cost=9)], 1.0, True) == 1


def test_pending_readers_protect_softly():
    candidates = [candidate(pending=True), candidate(cost=9)]
    assert victim("on", candidates, 1.0, True) == 1
    assert victim("on", candidates, 1.0, False) == 0
    assert victim("on", candidates[:1], 1.0, True) is None


def test_nobody_is_the_victim_of_nobody():
    assert victim("on", [], 1.0, False) is None


def test_a_batch_is_the_lowest_in_order_and_the_lowest_that_is_left():
    costs = [5.0, 1.0, 4.0, 2.0, 3.0, 2.0]
    candidates = [candidate(cost=cost) for cost in costs]
    nothing = [0.0] * len(candidates)
    indices, left, _ = _C.choose_victims("local", candidates, 1 - TICK, True, 4, nothing)
    assert indices == [1, 3, 5, 4]
    assert left == 4.0
    indices, left, _ = _C.choose_victims("local", candidates, 1 - TICK, True, 9, nothing)
    assert sorted(indices) == list(range(6))
    assert left == float("inf")


@pytest.mark.parametrize("most", [1, 5, 40])
def test_what_is_stale_is_worked_out_only_at_the_front(most):
    """With numbers that are too low the choice is that of the true ones; few are asked for."""
    random = Random(most)
    known = [random.choice([0.0, random.uniform(0, 3)]) for _ in range(200)]
    true = [k + random.choice([0.0, 0.0, random.uniform(0, 20)]) for k in known]
    rest = [
        {"cost": random.uniform(1, 9), "nbytes": random.uniform(1, 9)} for _ in range(len(known))
    ]

    def choose(neighbours):
        candidates = [candidate(neighbours=n, **r) for n, r in zip(neighbours, rest, strict=True)]
        return _C.choose_victims("on", candidates, 1.0, True, most, true)

    chosen, left, asked = choose(known)
    expected, expected_left, _ = choose(true)
    assert chosen == expected
    assert left == expected_left
    assert set(chosen) <= set(asked)
    assert len(asked) <= 3 * most + 5
