# SPDX-License-Identifier: Apache-2.0
"""The cells of the benchmark's tables: one network, in one budget or under one peer.

Peaks are counted at the allocator, without rematfn's help; results are compared with eager's bit by
bit, a batch norm's statistics included.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import optree
import torch
from measure import compared, interleaved
from networks import Network, Step, in_order, untransformed
from peers import Peer, TookTooLongError, time_limit

import rematfn
from rematfn._transform.budget import parse_budget
from rematfn._transform.recorded import finish_searches
from rematfn.demo.task import Count
from rematfn.demo.train import bitwise_equal

Row = dict[str, Any]

POLICIES: dict[str, rematfn.policies.Policy] = {
    "online": rematfn.policies.ON(),
    "guided": rematfn.policies.Guided(),
}


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
        trace = rematfn.record(self.eager)
        self.cost, self.flops = trace.cost, trace.flops

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
        from rematfn.testing import MemoryTimeline

        with MemoryTimeline() as timeline:
            results, _ = self.run(step)
        return results, Count.of(timeline, results)

    def resident(self, step: Step) -> int | None:
        """Return how far the resident set of the process rises in ``step``, results included."""
        from rematfn.testing import ResidentPeak
        from rematfn.testing._resident import give_back

        give_back()
        with ResidentPeak() as peak:
            self.run(step)
        return peak.added

    def is_exact(self, results: Any) -> bool:
        """Whether the results, and what the step wrote to, are eager's, bit for bit."""
        found = self._all(results, clone=False)
        return len(found) == len(self._expected) and all(map(bitwise_equal, found, self._expected))

    def _all(self, results: Any, clone: bool) -> list[torch.Tensor]:
        tensors = [*optree.tree_leaves(results), *self.program.buffers]
        return [t.clone() for t in tensors] if clone else tensors


class Ours:
    """A network's step inside a budget."""

    def __init__(self, bench: Bench, budget: int, policy: rematfn.policies.Policy) -> None:
        self._bench = bench
        self._policy = policy
        self.transformed: Any = None
        self.budget = budget

        def transform(f: Callable[..., Any]) -> Callable[..., Any]:
            self.transformed = rematfn.remat(f, budget, policy=policy)
            return self.transformed  # type: ignore[no-any-return]

        self.step = bench.program.make_step(transform, in_order)

    def measure(self) -> Row:
        """Return the deterministic columns; with a guide, those of the calls that have a plan.

        Raises:
            rematfn.BudgetError: It does not fit.
        """
        exact = True
        if isinstance(self._policy, rematfn.policies.Guided):
            exact = self._bench.is_exact(self._bench.run(self.step)[0])  # is recorded
            exact = self._bench.is_exact(self._bench.run(self.step)[0]) and exact
            finish_searches()
        results, memory = self._bench.count(self.step)
        stats = rematfn.stats(self.transformed)
        return {
            "peak": memory.peak,
            "resident": self._bench.resident(self.step),
            "peak / budget": memory.peak / self.budget,
            "exact": self._bench.is_exact(results) and exact,
            "operators": stats.operators,
            "evictions": stats.evictions,
            "replays": stats.replays,
            "replayed cost": stats.replayed_cost,
            "replayed FLOPs": stats.replayed_flops,
        }


def budget_rows(bench: Bench, fraction: float, repeats: int) -> list[Row]:
    """Return a row for each policy, at ``fraction`` of eager's peak."""
    budget = int(fraction * bench.peak)
    ours, steps = _ours(bench, budget)
    times = _times(bench, steps, repeats)
    return [
        {"budget": fraction, "bytes": budget, "policy": name, **row, **times.get(name, {})}
        for name, row in ours.items()
    ]


def peer_row(bench: Bench, peer: Peer, repeats: int, patience: float) -> Row:
    """Return the row of a peer; under ``ours``, those with the peer's peak as the budget.

    A peer that has to be compiled gets ``patience`` seconds for its first run.
    """
    row: Row = {"peer": peer.name}
    torch._dynamo.reset()
    step = bench.program.make_step(peer.transform, peer.run)
    try:
        with time_limit(patience):
            bench.run(step)  # compiles
        results, memory = bench.count(step)
    except (Exception, TookTooLongError) as error:  # whatever it refuses with is its result
        return row | {"refused": _first_line(error, patience)}
    row |= {"peak": memory.peak, "of eager's": memory.peak / bench.peak}
    row["resident"] = bench.resident(step)
    row["exact"] = bench.is_exact(results)
    if peer.compiler and row["exact"] and memory.peak == bench.peak:
        return row | {"refused": "has no effect: runs as in eager"}
    if not peer.compiler:
        trace = rematfn.record(step)
        row["replayed cost"] = trace.cost / bench.cost - 1
        row["replayed FLOPs"] = trace.flops / bench.flops - 1
    del results
    row["ours"], steps = _ours(bench, memory.peak)
    times = _times(bench, {"peer": step, **steps}, repeats)
    row |= times.pop("peer", {})
    for name, measured in times.items():
        row["ours"][name] |= measured
    return row


def _ours(bench: Bench, budget: int) -> tuple[dict[str, Row], dict[str, Step]]:
    """Return the deterministic columns of each policy, and the steps that run."""
    rows: dict[str, Row] = {}
    steps: dict[str, Step] = {}
    for name, policy in POLICIES.items():
        ours = Ours(bench, budget, policy)
        try:
            rows[name] = ours.measure()
            steps[name] = ours.step
        except rematfn.BudgetError as error:
            rows[name] = _advice_followed(bench, error, policy)
    return rows, steps


def _times(bench: Bench, steps: dict[str, Step], repeats: int) -> dict[str, Row]:
    """Return what each step takes, and its ratio to eager's: medians of rounds, their spread."""
    if not steps or repeats == 0:
        return {}
    candidates = {"eager": bench.eager, **steps}
    seconds = interleaved(
        {name: lambda s=step: bench.run(s)[1] for name, step in candidates.items()}, repeats
    )
    rows: dict[str, Row] = {}
    for name in steps:
        ratios = compared(seconds[name], seconds["eager"])
        ratios["time ratio"] = ratios.pop("time / eager")
        rows[name] = {"seconds": median(seconds[name]), **ratios}
    return rows


def _advice_followed(
    bench: Bench, error: rematfn.BudgetError, policy: rematfn.policies.Policy
) -> Row:
    """Return what the error says is needed, and in how many such steps the program runs."""
    first = needed = advice(error)
    for attempts in range(1, 20):
        try:
            found = Ours(bench, needed, policy).measure()
        except rematfn.BudgetError as again:
            needed = advice(again)
            continue
        return {"needs": first, "runs in": needed, "advised": attempts, "exact": found["exact"]}
    return {"needs": first}


def advice(error: rematfn.BudgetError) -> int:
    """Return the budget that the message asks for, in bytes."""
    found = re.search(
        r"Raise the budget to (?:at least |about )?(?:.*?\((\d+) bytes\)|([0-9.]+ [A-Za-z]+))",
        str(error),
    )
    assert found is not None, f"a BudgetError without advice: {error}"
    nbytes = parse_budget(found[1] or found[2]).bytes
    assert nbytes is not None
    return nbytes


def _first_line(error: BaseException, patience: float) -> str:
    text = str(error).strip() or "no message"
    if TookTooLongError.__name__ in text or isinstance(error, TookTooLongError):
        return f"not ready within {patience:g} s"  # a compiler wraps what is raised in it
    return f"{type(error).__name__}: {text.splitlines()[0]}"
