# SPDX-License-Identifier: Apache-2.0
"""The benchmark's lower bound: no policy goes below it, nor does the best of all schedules."""

from __future__ import annotations

import heapq
import math
import random
import sys
from dataclasses import dataclass, field
from pathlib import Path

import rematfn
from rematfn import _C

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from bound import lower_bound


@dataclass
class Tiny:
    """A program of a few operators, small enough to try out every schedule."""

    sizes: list[int] = field(default_factory=list)
    costs: list[int] = field(default_factory=list)
    scratch: list[int] = field(default_factory=list)
    reads: list[list[int]] = field(default_factory=list)
    sealed: list[list[int]] = field(default_factory=list)  # after each call
    replayable: list[bool] = field(default_factory=list)

    @classmethod
    def random(cls, seed: int) -> Tiny:
        dice = random.Random(seed)
        tiny = cls()
        for at in range(8):
            tiny.sizes.append(dice.randint(1, 3))
            tiny.costs.append(dice.randint(1, 9))
            tiny.scratch.append(dice.choice([0, 0, 1]))
            tiny.reads.append(dice.sample(range(at), min(at, dice.randint(0, 2))))
            tiny.replayable.append(dice.random() < 0.85)
            gone = {v for values in tiny.sealed for v in values}
            free = [v for v in range(at + 1) if v not in gone]
            tiny.sealed.append([dice.choice(free)] if dice.random() < 0.3 else [])
        return tiny

    def trace(self) -> rematfn.Trace:
        core = _C.Trace()
        for v, size in enumerate(self.sizes):
            assert core.add_value(size, True) == v
        for at, reads in enumerate(self.reads):
            core.add_call(
                "f", float(self.costs[at]), 0.0, self.sizes[at], self.scratch[at],
                self.replayable[at], False, False, [(v, False) for v in reads], [(at, -1)],
            )  # fmt: skip
            for v in self.sealed[at]:
                core.add_seal(v)
        return rematfn.Trace(core)

    def optimum(self, budget: int) -> float:
        """Return the least cost of replays of any schedule, by Dijkstra's algorithm.

        A state is how many operators have run and what is resident, results that have left beside.
        """
        costs: dict[tuple[int, frozenset[int]], int] = {(0, frozenset()): 0}
        queue: list[tuple[int, int, tuple[int, ...]]] = [(0, 0, ())]
        while queue:
            cost, at, listed = heapq.heappop(queue)
            resident = frozenset(listed)
            if cost > costs[at, resident]:
                continue
            if at == len(self.sizes):
                return cost / sum(self.costs)
            left = {v for values in self.sealed[:at] for v in values}
            used = sum(self.sizes[v] for v in resident)
            after = [(cost, at, resident - {v}) for v in resident]
            for call in [*range(at), at]:
                replay = call < at
                fits = used + self.sizes[call] + self.scratch[call] <= budget
                there = resident | left >= set(self.reads[call])
                if not fits or not there or call in resident | left:
                    continue
                now = resident | {call}
                if replay and self.replayable[call]:
                    after.append((cost + self.costs[call], at, now))
                elif not replay and now | left >= set(self.sealed[at]):
                    after.append((cost, at + 1, now - set(self.sealed[at])))
            for price, place, state in after:
                if price < costs.get((place, state), math.inf):
                    costs[place, state] = price
                    heapq.heappush(queue, (price, place, tuple(sorted(state))))
        return math.inf


def test_no_schedule_of_small_random_programs_costs_less() -> None:
    bounds, optima = [], []
    for seed in range(150):
        tiny = Tiny.random(seed)
        trace = tiny.trace()
        for budget in range(3, trace.peak_bytes + 1):
            bound, optimum = lower_bound(trace, budget), tiny.optimum(budget)
            assert bound <= optimum + 1e-9, (seed, budget)
            if 0 < optimum < math.inf:
                bounds.append(bound)
                optima.append(optimum)
    assert len(optima) > 100
    assert sum(bounds) > 0.5 * sum(optima), "a bound that says something"
