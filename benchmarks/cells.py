# SPDX-License-Identifier: Apache-2.0
"""The cells of the benchmark's tables: one network, in one budget or under one peer.

Peaks are counted at the allocator, without rematfn's help; results are compared with eager's bit by
bit, a batch norm's statistics included.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable
from typing import Any

import optree
import torch
from measure import interleaved
from networks import Network, Step, in_order, untransformed
from peers import Peer, TookTooLongError, time_limit

import rematfn
from rematfn._budget import parse_budget
from rematfn.demo.task import Count
from rematfn.demo.train import bitwise_equal

Row = dict[str, Any]

POLICIES: dict[str, rematfn.Policy] = {"online": rematfn.ON(), "guided": rematfn.Guided()}
# A peer that has to be compiled gets so many seconds.
PATIENCE = 120.0


class Bench:
    """A network, and what it does in eager."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self.program = network.make()
        self._buffers = [b.clone() for b in self.program.buffers]
        self.eager = self.program.make_step(untransformed, in_order)
        self.run(self.eager)  # what torch sets up once
        results, memory = self.count(self.eager)
        self.peak = memory.peak
        self._expected = self._all(results, clone=True)
        self.cost = rematfn.record(self.eager).cost

    def run(self, step: Step) -> tuple[Any, float]:
        """Run ``step`` from the same state as ever; return its results and seconds."""
        with torch.no_grad():
            for buffer, saved in zip(self.program.buffers, self._buffers, strict=True):
                buffer.copy_(saved)
        torch.manual_seed(0)
        start = time.perf_counter()
        results = step()
        return results, time.perf_counter() - start

    def count(self, step: Step) -> tuple[Any, Count]:
        """Run ``step``; return its results and its memory at the allocator."""
        # Imported late: the profiler is slow to load.
        from rematfn._memory import MemoryTimeline

        with MemoryTimeline() as timeline:
            results, _ = self.run(step)
        return results, Count.of(timeline, results)

    def is_exact(self, results: Any) -> bool:
        """Whether the results, and what the step wrote to, are eager's, bit for bit."""
        found = self._all(results, clone=False)
        return len(found) == len(self._expected) and all(map(bitwise_equal, found, self._expected))

    def _all(self, results: Any, clone: bool) -> list[torch.Tensor]:
        tensors = [*optree.tree_leaves(results), *self.program.buffers]
        return [t.clone() for t in tensors] if clone else tensors


class Ours:
    """A network's step inside a budget."""

    def __init__(self, bench: Bench, budget: int, policy: rematfn.Policy) -> None:
        self._bench = bench
        self._policy = policy
        self._made: list[Any] = []
        self.budget = budget

        def transform(f: Callable[..., Any]) -> Callable[..., Any]:
            self._made.append(rematfn.remat(f, budget, policy=policy))
            return self._made[-1]  # type: ignore[no-any-return]

        self.step = bench.program.make_step(transform, in_order)

    def measure(self) -> Row:
        """Return the deterministic columns; with a guide, those of the calls that have a plan.

        Raises:
            rematfn.BudgetError: It does not fit.
        """
        exact = True
        if isinstance(self._policy, rematfn.Guided):
            exact = self._bench.is_exact(self._bench.run(self.step)[0])  # is recorded
            exact = self._bench.is_exact(self._bench.run(self.step)[0]) and exact
            time.sleep(self._policy.search)  # a thread looks for a better plan
        results, memory = self._bench.count(self.step)
        stats = self._made[0].stats
        return {
            "peak": memory.peak,
            "peak / budget": memory.peak / self.budget,
            "exact": self._bench.is_exact(results) and exact,
            "operators": stats.operators,
            "evictions": stats.evictions,
            "replays": stats.replays,
            "replayed cost": stats.replayed_cost,
        }


def budget_rows(bench: Bench, fraction: float, repeats: int) -> list[Row]:
    """Return a row for each policy, at ``fraction`` of eager's peak."""
    budget = int(fraction * bench.peak)
    rows: list[Row] = []
    steps: dict[str, Step] = {}
    for name, policy in POLICIES.items():
        row: Row = {"budget": fraction, "bytes": budget, "policy": name}
        ours = Ours(bench, budget, policy)
        try:
            row |= ours.measure()
            steps[name] = ours.step
        except rematfn.BudgetError as error:
            row |= _advice_followed(bench, error, policy)
        rows.append(row)
    _add_times(bench, rows, steps, repeats)
    return rows


def peer_row(bench: Bench, peer: Peer, repeats: int) -> Row:
    """Return the row of a peer, and of ours with the peer's peak as the budget."""
    row: Row = {"peer": peer.name}
    torch._dynamo.reset()
    step = bench.program.make_step(peer.transform, peer.run)
    try:
        with time_limit(PATIENCE):
            bench.run(step)  # compiles
            results, memory = bench.count(step)
    except Exception as error:  # whatever it refuses with is its result
        return row | {"refused": _first_line(error)}
    row |= {
        "peak": memory.peak,
        "of eager's peak": memory.peak / bench.peak,
        "exact": bench.is_exact(results),
    }
    if not peer.compiled:
        row["replayed cost"] = rematfn.record(step).cost / bench.cost - 1
    del results
    rows: list[Row] = []
    steps = {"peer": step}
    for name, policy in POLICIES.items():
        ours = Ours(bench, memory.peak, policy)
        found: Row = {"policy": name}
        try:
            found |= ours.measure()
            steps[name] = ours.step
        except rematfn.BudgetError as error:
            found |= _advice_followed(bench, error, policy)
        rows.append(found)
    _add_times(bench, [row | {"policy": "peer"}, *rows], steps, repeats, into=[row, *rows])
    for found in rows:
        name = found.pop("policy")
        row |= {f"{name}: {column}": value for column, value in found.items()}
    return row


def _add_times(
    bench: Bench,
    rows: Iterable[Row],
    steps: dict[str, Step],
    repeats: int,
    into: Iterable[Row] | None = None,
) -> None:
    """Add the ratio of the fastest run to eager's fastest run, all having taken turns."""
    if not steps or repeats == 0:
        return
    candidates = {"eager": bench.eager, **steps}
    for step in steps.values():
        bench.run(step)
    seconds = interleaved(
        {name: lambda s=step: bench.run(s)[1] for name, step in candidates.items()}, repeats
    )
    for row, target in zip(rows, into or rows, strict=True):
        if row["policy"] in seconds:
            target["seconds"] = min(seconds[row["policy"]])
            target["time ratio"] = target["seconds"] / min(seconds["eager"])


def _advice_followed(bench: Bench, error: rematfn.BudgetError, policy: rematfn.Policy) -> Row:
    """Return what the error says is needed, and in how many such steps the program runs."""
    first = needed = _advice(error)
    for attempts in range(1, 20):
        try:
            found = Ours(bench, needed, policy).measure()
        except rematfn.BudgetError as again:
            needed = _advice(again)
            continue
        return {"needs": first, "runs in": needed, "advised": attempts, "exact": found["exact"]}
    return {"needs": first}


def _advice(error: rematfn.BudgetError) -> int:
    found = re.search(r"at least ([0-9.]+ [A-Za-z]+)", str(error))
    assert found is not None, f"a BudgetError without advice: {error}"
    nbytes = parse_budget(found.group(1)).bytes
    assert nbytes is not None
    return nbytes


def _first_line(error: BaseException) -> str:
    name = "too slow" if isinstance(error, TookTooLongError) else type(error).__name__
    return f"{name}: {(str(error).strip() or 'no message').splitlines()[0]}"
