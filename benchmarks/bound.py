# SPDX-License-Identifier: Apache-2.0
"""What no schedule can beat: a lower bound on what a program replays within a budget.

Writes a table of bounds for the benchmark's cells, beside what guided calls replay in the
simulator, and what they would after a longer search. The benchmark's document takes its bounds from
there.

Note [Every schedule is a solution]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Checkmate (Jain et al., MLSys 2020) writes the choice of what to keep and what to compute again as
an integer program, with a stage for each operator. Ours has few stages, each from one cut to the
next. A cut is a moment in the program: a call is about to run, its inputs are there, room for what
it allocates is made. Take any run that keeps the program's order and the budget. Let S[v, i] be 1
if value v is resident at cut i, and R[c, w] be 1 if call c, made before window w begins, is
replayed in w, a stretch from a cut to a later one or to the end. Then:

1. The bytes resident at a cut, and those that its call allocates, are within the budget.
2. What is read in a window, by the program or by a replay, or is resident at its end, was resident
   where it begins, or has been made in it, by the program or by a replay.
3. A call is replayed in a window if and only if it is in one of the two parts of the window.

So the run is a solution; its cost is that of the shortest windows' replays, or more: two of a call
in one window count once. The rest is left out in favour of the run: what the program has dropped
may stay, what the program makes in a window is there for all of it, what has left as a result is
there for nothing from then on, and so is what came from outside. Replays that serve nothing in the
rest of the program are not looked at: without them a run is still one. So no run costs less than
the cheapest solution, and none of the engine's can.

More cuts make the bound higher and the program harder. So their number is doubled until the bound
reaches what a plan costs, which is then proven to be the best, or the time is up. A program that is
not solved by then has the bound that the solver has come to. Windows longer than the shortest are
implied for integers, but not for the fractions that the solver begins with: half of a value would
serve two halves of its readers, in two windows, in full. Between few cuts they make the bounds of
long programs much better; between many they make the program too large.

The bound is the solver's word, within its tolerance of 1e-6: HiGHS (Huangfu and Hall, 2018).
"""

from __future__ import annotations

import argparse
import json
import math
import time
from bisect import bisect_right
from collections import defaultdict
from typing import Any

import numpy as np
import torch
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

import rematfn
from rematfn import _C
from rematfn._transform.transformed import transformed_of

BUDGETS = (0.7, 0.5, 0.4, 0.3, 0.2, 0.15, 0.1)
FEWEST_CUTS, MOST_WITH_LONG_WINDOWS = 2, 8
GAP = 1e-3  # between a plan's total cost and the bound, that counts as none
UNITS = 1e3  # of cost in a program: the solver's tolerances are absolute, and seconds are too few
NOTHING_FITS = "nothing fits"
ABOUT = """
Total cost, that of the program and its replays, over that of the program. *Lower bound*: what no
schedule that keeps the program's order can do without, by integer programming, as far as a solver
proves it in the time that it is given for a cell. *Guided*: what calls come to that follow the
default search; beside it what a longer search finds, in millions of simulated operators. Where
*guided / bound* is 1, the plan is proven to be the best, within a thousandth. *Target*: what a
study of policies by simulation reached for a network of the same kind at another size.
"""
_INFEASIBLE = 2  # a status of milp


class Call:
    """A call of the program, by the values that it reads and makes."""

    def __init__(self, data: Any, unrecorded: int) -> None:
        _, self.cost, _, outputs, scratch, self.replayable, _, _, reads, makes = data
        self.reads = list(dict.fromkeys(value for value, _ in reads))
        self.makes = [value for value, _ in makes]
        self.needs = outputs + scratch + unrecorded  # bytes beside those of its inputs


class Value:
    """A value whose bytes count, from the call that makes it on.

    Attributes:
        sealed: The last call before it leaves as a result; infinity if it does not.
        needed: The last call for which it, or what can be replayed from it, has to be there.
        reads: The calls that read it while its bytes count, and the last before it is a result.
    """

    def __init__(self, nbytes: int, made: int, replayable: bool) -> None:
        self.nbytes, self.made, self.replayable = nbytes, made, replayable
        self.sealed = math.inf
        self.needed = -1.0
        self.reads: list[float] = []


class Story:
    """A trace by calls and values."""

    def __init__(self, trace: rematfn.Trace) -> None:
        self.cost = trace.cost
        self.calls: list[Call] = []
        self.values: dict[int, Value] = {}
        sizes = trace._core.values()
        unrecorded = 0
        for kind, data in trace._core.events():
            if kind == "unrecorded":
                unrecorded = data
            elif kind == "call":
                call = Call(data, unrecorded)
                for v in call.makes:
                    self.values[v] = Value(sizes[v][0], len(self.calls), call.replayable)
                self.calls.append(call)
            elif kind == "seal" and data in self.values:
                self.values[data].sealed = len(self.calls) - 1
            elif kind == "settle" and data in self.values:
                self.values[data].replayable = False
        for at in range(len(self.calls)):
            for value in self.inputs(at):
                value.reads.append(at)
        for value in self.values.values():
            if value.sealed < math.inf:
                value.reads.append(value.sealed)
        for at in reversed(range(len(self.calls))):
            made = [self.values[v] for v in self.calls[at].makes]
            for value in made:
                value.needed = min(max([value.needed, *value.reads]), value.sealed)
            served = max((value.needed for value in made if value.replayable), default=-1.0)
            for value in self.inputs(at):
                value.needed = max(value.needed, served)

    def inputs(self, at: int) -> list[Value]:
        """Return the values whose bytes count as call number ``at`` reads them."""
        found = [self.values[v] for v in self.calls[at].reads if v in self.values]
        return [value for value in found if at <= value.sealed]

    def cuts(self, budget: int, most: int) -> list[int]:
        """Return calls that leave little room, over all where what is read again does not fit."""
        waiting = np.zeros(len(self.calls) + 1)
        for value in self.values.values():
            waiting[value.made + 1] += value.nbytes
            waiting[int(max([value.made, *value.reads])) + 1] -= value.nbytes
        calls = range(len(self.calls))
        demand = np.cumsum(waiting)[:-1] + [self.calls[at].needs for at in calls]
        above = np.flatnonzero(demand > budget)
        if len(above) == 0:
            return []
        needs = [self.calls[at].needs + sum(v.nbytes for v in self.inputs(at)) for at in calls]
        found = {int(max(above, key=lambda at: demand[at]))}
        for stretch in np.array_split(above, most):
            if len(stretch):
                found.add(int(max(stretch, key=lambda at: (needs[at], demand[at]))))
        return sorted(found)


class IntegerProgram:
    """Columns that are 0 or 1, each with a cost; rows that say ``row @ x <= limit``."""

    def __init__(self) -> None:
        self._costs: list[float] = []
        self._least: list[float] = []
        self._limits: list[float] = []
        self._rows: list[int] = []
        self._columns: list[int] = []
        self._factors: list[float] = []

    def column(self, cost: float = 0.0, least: float = 0.0) -> int:
        """Add a column and return its number."""
        self._costs.append(cost)
        self._least.append(least)
        return len(self._costs) - 1

    def row(self, entries: list[tuple[int, float]], limit: float) -> None:
        """Add a row of pairs of a column and a factor."""
        for column, factor in entries:
            self._rows.append(len(self._limits))
            self._columns.append(column)
            self._factors.append(factor)
        self._limits.append(limit)

    def bound(self, seconds: float) -> float:
        """Return a lower bound on the least cost; infinity if there is no solution."""
        shape = (len(self._limits), len(self._costs))
        matrix = csr_array((self._factors, (self._rows, self._columns)), shape=shape)
        found = milp(
            self._costs,
            integrality=np.ones(len(self._costs)),
            bounds=Bounds(self._least, np.ones(len(self._least))),
            constraints=LinearConstraint(matrix, -np.inf, self._limits),
            options={"time_limit": seconds, "mip_rel_gap": GAP},
        )
        if found.status == _INFEASIBLE:
            return math.inf
        return max(0.0, found.mip_dual_bound or 0.0)


def windows_between(cuts: int) -> list[tuple[int, int, int | None]]:
    """Return triples: the cuts where a window begins, ends, and is parted.

    They are as long as a power of two, or go on to the end. Between many cuts, the shortest alone.
    """
    if cuts > MOST_WITH_LONG_WINDOWS:
        return [(begin, begin + 1, None) for begin in range(cuts)]
    found: list[tuple[int, int, int | None]] = []
    for begin in range(cuts):
        length = 1
        while begin + length <= cuts:
            found.append((begin, begin + length, begin + length // 2 if length > 1 else None))
            length *= 2
        if begin + length // 2 < cuts:
            found.append((begin, cuts, begin + 1))
    return found


def lower_bound(
    trace: rematfn.Trace, budget: int, seconds: float, known: float | None = None
) -> float:
    """Return a cost of replays that no run of ``trace`` within ``budget`` bytes can go below.

    As a fraction of the program's own, as ``Stats.replayed_cost`` is; infinity if there is no run.
    No better bound is looked for once it has come to ``known``, what some run replays. See Note
    [Every schedule is a solution].
    """
    story, end, most, found = Story(trace), time.monotonic() + seconds, FEWEST_CUTS, 0.0
    while (left := end - time.monotonic()) > 0:
        cuts = story.cuts(budget, most)
        if not cuts:
            return 0.0
        found = max(found, _program(story, budget, cuts).bound(left) / UNITS)
        proven = known is not None and 1 + known <= (1 + found) * (1 + GAP)
        if found == math.inf or proven or most > len(story.calls):
            break
        most *= 2
    if known is not None and found > known + GAP:
        raise RuntimeError(f"a plan replays {known:.4f}, less than the bound of {found:.4f}")
    return found


def _program(story: Story, budget: int, cuts: list[int]) -> IntegerProgram:
    program = IntegerProgram()
    values = story.values

    def stage(at: float) -> int:
        return bisect_right(cuts, at) - 1

    first = {v: stage(value.made) + 1 for v, value in values.items()}
    last = {v: stage(value.needed) for v, value in values.items()}
    read_in = {v: {stage(at) for at in x.reads if at <= x.sealed} for v, x in values.items()}

    resident: dict[tuple[int, int], int] = {}
    for i, at in enumerate(cuts):
        inputs = story.inputs(at)
        row = []
        for v, value in values.items():
            if first[v] <= i <= last[v]:
                resident[v, i] = program.column(least=float(value in inputs))
                row.append((resident[v, i], value.nbytes / budget))
        program.row(row, 1 - story.calls[at].needs / budget)  # 1

    replayed: dict[tuple[int, int], dict[int, int]] = defaultdict(dict)
    windows = windows_between(len(cuts))
    for begin, end, middle in windows:
        columns = replayed[begin, end]
        for c, call in enumerate(story.calls):
            served = [last[v] for v in call.makes if values[v].replayable]
            if served and first[call.makes[0]] <= begin <= max(served):
                cost = 0.0 if middle else UNITS * call.cost / story.cost
                columns[c] = program.column(cost)

    def there(v: int, begin: int, end: int) -> list[tuple[int, float]]:
        """Return what it takes that v is there in a window; nothing if it is in any case."""
        if v not in values or begin < first[v] or stage(values[v].sealed) < begin:
            return []
        found = [(resident[v, begin], -1.0)]
        if values[v].replayable:
            found.append((replayed[begin, end][values[v].made], -1.0))
        return found

    for begin, end, middle in windows:
        for v in values:  # 2
            if first[v] > begin or last[v] < begin:
                continue
            if any(begin <= i < end for i in read_in[v]):
                program.row(there(v, begin, end), -1.0)
            if (v, end) in resident:
                program.row([(resident[v, end], 1.0), *there(v, begin, end)], 0.0)
        for c, column in replayed[begin, end].items():
            for v in story.calls[c].reads:  # 2
                if sources := there(v, begin, end):
                    program.row([(column, 1.0), *sources], 0.0)
            if middle is None:
                continue
            halves = [replayed[begin, middle], replayed[middle, end]]  # 3
            parts = [columns[c] for columns in halves if c in columns]
            program.row([(column, 1.0), *((part, -1.0) for part in parts)], 0.0)
            for part in parts:
                program.row([(part, 1.0), (column, -1.0)], 0.0)
    return program


def recorded(bench: Any) -> rematfn.Trace:
    """Return the trace of the level that the benchmark measures: of what is under its transform."""
    from cells import Ours

    ours = Ours(bench, 1 << 50, rematfn.policies.Guided(search=0))
    bench.run(ours.step)
    (key,) = transformed_of(ours.transformed, "recorded")[0]._history._keys.values()
    ((_, call),) = key.pending
    trace = call.report.take_trace()
    assert trace is not None
    return rematfn.Trace(trace)


def best_found(trace: rematfn.Trace, budget: int, millions: float | None = None) -> float | None:
    """Return what the best plan replays that so many operators of search find, or Guided's."""
    program = _C.Program(trace._core)
    if millions is None:
        rematfn.policies.Guided().begin(program, budget)
    else:
        operators = int(millions * 1e6)
        program.search(budget, operators, operators)
    program.finish()
    found = program.overhead() < math.inf
    return program.overhead() / trace.cost if found else None


def saved_rows(column: str) -> dict[tuple[str, float], dict[str, Any]]:
    """Return the rows of earlier runs that have ``column``, by network and budget."""
    from measure import RESULTS

    path = RESULTS / "bound.json"
    rows = json.loads(path.read_text())["rows"] if path.exists() else []
    return {(row["network"], row["budget"]): row for row in rows if column in row}


def main() -> None:
    """Bound the cells asked for and save them in the table, where the others stay."""
    from cells import Bench
    from measure import save
    from networks import NETWORKS
    from report import TARGETS

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--networks", nargs="*", default=list(NETWORKS), choices=list(NETWORKS))
    parser.add_argument("--budgets", type=float, nargs="+", default=list(BUDGETS))
    parser.add_argument(
        "--search", type=float, default=50, help="millions of operators of the longer search"
    )
    parser.add_argument("--seconds", type=float, default=60, help="for the bound of a cell")
    parser.add_argument(
        "--saved-bounds", action="store_true", help="search anew, with the bounds of the table"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)  # as in the benchmark: kernels' scratch depends on it
    longer = f"{options.search:g} million"
    rows, bounds = saved_rows(longer), saved_rows("lower bound")
    for name in options.networks:
        bench = Bench(NETWORKS[name])
        trace = recorded(bench)
        for fraction in options.budgets:
            budget = int(fraction * bench.peak)
            row: dict[str, Any] = {"network": name, "budget": fraction, "lower bound": None}
            for column, millions in (("guided", None), (longer, options.search)):
                found = best_found(trace, budget, millions)
                row[column] = None if found is None else 1 + found
            if options.saved_bounds:
                row["lower bound"] = bounds[name, fraction]["lower bound"]
            else:
                least = min((row[c] for c in ("guided", longer) if row[c]), default=None)
                known = None if least is None else least - 1
                bound = lower_bound(trace, budget, options.seconds, known)
                row["lower bound"] = NOTHING_FITS if bound == math.inf else 1 + bound
            if row["guided"] is not None and row[longer] is not None:
                row["guided / bound"] = row["guided"] / row["lower bound"]
                row[f"guided / {longer}"] = row["guided"] / row[longer]
            row["target"] = TARGETS.get(name, {}).get(fraction, (None, None))[1]
            rows[name, fraction] = row
            print(row, flush=True)
    order = [(name, fraction) for name in NETWORKS for fraction in BUDGETS]
    save(
        "bound",
        "Lower bounds of total cost, and what guided calls come to",
        [rows[cell] for cell in order if cell in rows],
        about=ABOUT,
    )


if __name__ == "__main__":
    main()
