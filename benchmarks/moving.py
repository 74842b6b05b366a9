# SPDX-License-Identifier: Apache-2.0
"""Steps that hold a budget by moving, by computing again, or by either; what they did and took."""

from __future__ import annotations

import math
import mmap
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from cells import Bench, Row, advice
from measure import OthersLoad, compared
from networks import Step, in_order

import rematfn
from rematfn import Disk
from rematfn._transform.recorded import finish_searches

MIB = 2**20
Way = Literal["remat", "offload", "hybrid"]
WAYS: tuple[Way, ...] = ("remat", "offload", "hybrid")
# A call that is recorded; three whose times are taken, of eight at the most; one that begins the
# search by these times.
WARM_UP = {"remat": 2, "offload": 7, "hybrid": 10}  # at most
QUIET = 0.3  # cores that others may keep busy
CLOSE = 1.03  # a hybrid that takes so much of the better of its parts is timed longer:
MORE = 6  # so many times the rounds besides


@dataclass(frozen=True)
class DiskSpeed:
    """What the disk carries while nobody computes, in bytes per second."""

    out: float
    into: float

    @classmethod
    def measured(cls, nbytes: int = 256 * MIB, chunk: int = 8 * MIB) -> DiskSpeed:
        """Write a file past the page cache with one thread, read it back; a median of three."""
        speeds: list[tuple[float, float]] = []
        file = _scratch_file()
        try:
            with mmap.mmap(-1, chunk) as buffer:
                buffer[:] = os.urandom(4096) * (chunk // 4096)
                for _ in range(3):
                    taken = []
                    for carry in (os.pwritev, os.preadv):
                        start = time.perf_counter()
                        for offset in range(0, nbytes, chunk):
                            if carry(file, [buffer], offset) != chunk:
                                raise OSError("a short transfer")
                        taken.append(time.perf_counter() - start)
                    speeds.append((nbytes / taken[0], nbytes / taken[1]))
        finally:
            os.close(file)
        out, into = (statistics.median(s) for s in zip(*speeds, strict=True))
        return cls(out, into)

    def __str__(self) -> str:
        return f"{self.out / 1e6:,.0f} MB/s out, {self.into / 1e6:,.0f} MB/s in"


def _scratch_file() -> int:
    """Return a file where a `Disk` puts its own, past the page cache."""
    for folder in (tempfile.gettempdir(), "/var/tmp", os.getcwd()):
        try:
            return os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_DIRECT, 0o600)
        except OSError:
            continue
    raise OSError("no folder whose file system has O_TMPFILE and O_DIRECT")


class Candidate:
    """A step under one way to hold a budget."""

    def __init__(self, bench: Bench, way: Way, budget: int, bandwidth: float | None = None) -> None:
        self.way = way
        self.budget = budget
        self.disk = None if way == "remat" else Disk(bandwidth=bandwidth)
        self.transformed: Any = None

        def transform(f: Callable[..., Any]) -> Callable[..., Any]:
            if way == "offload":
                self.transformed = rematfn.offload(f, budget, to=self.disk)
            else:
                self.transformed = rematfn.remat(f, budget, offload=self.disk)
            return self.transformed  # type: ignore[no-any-return]

        self.step: Step = bench.program.make_step(transform, in_order)

    def warm_up(self, bench: Bench) -> Row:
        """Run until calls follow the plan that the search comes to; return what one of them does.

        Raises:
            rematfn.BudgetError: It does not fit.
        """
        exact = bench.is_exact(bench.run(self.step)[0])
        for _ in range(1, WARM_UP[self.way]):
            self.timed(bench)
            if self.way == "hybrid" and rematfn.stats(self.transformed).settled:
                break
        finish_searches()
        results, memory = bench.count(self.step)
        exact = bench.is_exact(results) and exact
        return {"peak / budget": memory.peak / self.budget, "exact": exact}

    def timed(self, bench: Bench) -> float:
        """Run the step with no search beside it; return its seconds."""
        finish_searches()
        return bench.run(self.step)[1]

    def did(self, bench: Bench, speed: DiskSpeed, eager: float, seconds: float) -> Row:
        """Return what the last call did; a step took ``seconds``, and ``eager`` without a level."""
        stats = rematfn.stats(self.transformed)
        replayed = stats.replayed_cost or 0.0
        row: Row = {"call": stats.call, "replays": stats.replays, "replayed cost": replayed}
        if self.disk is None:
            return row
        out, back = stats.moved_bytes or 0, stats.returned_bytes or 0
        row |= {
            "MiB out": out / MIB,
            "MiB back": back / MIB,
            "late": stats.late_returns,
            "turned back": stats.turned_back,
            "waited, s": stats.waited,
        }
        if out:
            # Beyond eager and what was computed again. The directions share the disk.
            row["exposed, s"] = max(0.0, seconds - (1 + replayed) * eager)
            row["bytes / bandwidth, s"] = out / speed.out + back / speed.into
        return row

    def planned(self) -> rematfn._C.Program | None:
        """Return the program whose plan the next call follows."""
        last = self.transformed.last_call
        program = None if last is None else last.program
        return None if program is None else program.planned

    def predicted(self) -> float | None:
        """Return the seconds of a step by the plan that the next call follows."""
        planned = self.planned()
        return None if planned is None else planned.elapsed + planned.overhead()


def measured(
    bench: Bench, candidates: Sequence[Candidate], repeats: int, speed: DiskSpeed
) -> list[Row]:
    """Return a row for each candidate; their steps and eager's take turns."""
    rows: list[Row] = []
    for candidate in candidates:
        row: Row = {"way": candidate.way}
        try:
            row |= candidate.warm_up(bench)
        except rematfn.BudgetError as error:
            row["does not fit, needs MiB"] = advice(error) / MIB
        rows.append(row)
    fitting = [c for c, row in zip(candidates, rows, strict=True) if "exact" in row]
    steps: dict[str, Step] = {c.way: c.step for c in fitting}
    seconds, others = times(bench, steps, repeats)
    if beside_better(seconds).get("time / better", 0.0) > CLOSE:
        again, meanwhile = times(bench, steps, MORE * repeats)
        others = (others + MORE * meanwhile) / (1 + MORE)
        seconds = {name: found + again[name] for name, found in seconds.items()}
    for candidate, row in zip(candidates, rows, strict=True):
        if candidate.way in steps:
            mine, eager = seconds[candidate.way], seconds["eager"]
            row |= compared(mine, eager)
            eager_second, second = statistics.median(eager), statistics.median(mine)
            row |= {"rounds": len(mine), "eager, s": eager_second, "others, cores": others}
            row |= candidate.did(bench, speed, eager_second, second)
            if candidate.way == "hybrid":
                row |= beside_better(seconds)
    return rows


def beside_better(seconds: Mapping[str, Sequence[float]]) -> Row:
    """Return the hybrid's ratio to the better of its two parts: the median of those of a round."""
    parts = [seconds[way] for way in ("remat", "offload") if way in seconds]
    if not parts or "hybrid" not in seconds:
        return {}
    better = min(parts, key=lambda part: compared(part, seconds["eager"])["time / eager"])
    return {"time / better": compared(seconds["hybrid"], better)["time / eager"]}


def times(
    bench: Bench, steps: Mapping[str, Step], repeats: int
) -> tuple[dict[str, list[float]], float]:
    """Return the seconds of each step and of eager's, by rounds, and what cores others kept busy.

    Where others disturb a round there is one more, up to as many again; the quietest ones count.
    As in :func:`measure.interleaved`, each step runs after one of its own kind that does not count.
    """
    if not steps:
        return {}, 0.0
    names = ["eager", *steps]
    both: dict[str, Step] = {"eager": bench.eager, **steps}
    rounds: list[tuple[float, dict[str, float]]] = []
    while len(rounds) < 2 * repeats:
        names = [*names[1:], names[0]]  # each goes first in turn
        with OthersLoad() as others:
            seconds = {name: _second(bench, both[name]) for name in names}
        rounds.append((others.cores or 0.0, seconds))
        if sum(cores < QUIET for cores, _ in rounds) >= repeats:
            break
    quietest = sorted(rounds, key=lambda found: found[0])[:repeats]
    found = {name: [seconds[name] for _, seconds in quietest] for name in names}
    return found, statistics.fmean(cores for cores, _ in quietest)


def _second(bench: Bench, step: Step) -> float:
    """Run ``step`` twice; return the seconds of the second time."""
    bench.run(step)
    return bench.run(step)[1]


def below_floor(bench: Bench) -> int | None:
    """Return a budget in which recomputing alone does not fit, though each operator does."""
    trace = rematfn.record(bench.eager)
    fits = trace.peak_bytes
    need = refused = rematfn.simulate(trace, fits, rematfn.policies.ON()).min_budget or 1
    while fits > 1.02 * refused:
        middle = math.isqrt(fits * refused)
        try:
            rematfn.simulate(trace, middle, rematfn.policies.ON())
            fits = middle
        except rematfn.BudgetError:
            refused = middle
    return math.isqrt(need * refused) if refused > 1.04 * need else None
