# SPDX-License-Identifier: Apache-2.0
"""A pool of tensors and its eager twin, under levels that open, close and fail at any time.

Every rule does one thing to both: to ours on the test's thread, inside the levels that are open;
to the twin on a thread of its own, which no level ever sees. What torch refuses of the twin it has
to refuse of ours. `PYTHONPATH=tests python tests/whole/test_stateful.py MINUTES` searches on, with
a seed of its own.
"""

import gc
import inspect
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from helpers import EXHAUSTIVE, bits, remains
from hypothesis import HealthCheck, Phase, note, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from steps import NEW, VIEWS, WRITES, rows
from torch import Tensor

import rematfn
from rematfn import _C
from rematfn._transform.level import LevelOptions

MOST_PAIRS = 14
MOST_LEVELS = 3

METADATA: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "t_": lambda a, b: a.t_() if a.dim() == 2 else a.unsqueeze_(0),
    "squeeze_": lambda a, b: a.squeeze_(),
    "detach_": lambda a, b: a.detach_(),
    "shrink": lambda a, b: a.resize_(min(a.numel() // 2, elements_left(a))),
    "set_": lambda a, b: a.set_(b),
    "data": lambda a, b: setattr(a, "data", b),
    "requires_grad_": lambda a, b: a.requires_grad_(not a.requires_grad),
}
FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "chain": lambda x: (x.sin() * x).exp().tanh(),
    "in place": lambda x: x.cos().mul_(x).add_(1),
    "matrix": lambda x: (rows(x).t() @ rows(x)).tanh().sum(0),
    "views": lambda x: torch.cat([p.sin() for p in x.reshape(-1).split(2)]) * 0.5,
    "dropout": lambda x: torch.nn.functional.dropout(x.exp(), 0.5),
}
EVERYTHING = rematfn.testing.EvictEverything()
POLICIES = [
    rematfn.policies.ON(),
    rematfn.policies.reference.DTR(),
    rematfn.policies.reference.Local(),
    rematfn.policies.reference.LRU(),
]
WORDS = ["remat", "everything", "tight", "grad", "vmap", "jvp"]
Tier = rematfn.Disk | rematfn.Host
# By a word, what it does with a function, a large tier and a small one.
MOVES: dict[str, Callable[[Callable[..., Any], Tier, Tier], Callable[..., Any]]] = {
    "offload": lambda f, to, _: rematfn.offload(f, to=to),
    "offload tight": lambda f, to, _: rematfn.offload(f, 2048, to=to),
    "offload everything": lambda f, to, _: rematfn.offload(f, to=to, policy=EVERYTHING),
    "hybrid": lambda f, to, _: rematfn.remat(f, 2048, offload=to),
    "hybrid everything": lambda f, to, _: rematfn.remat(f, offload=to, policy=EVERYTHING),
    "little room": lambda f, _, small: rematfn.offload(f, to=small, policy=EVERYTHING),
}
# Of a level of the test's own: whether it drops, whether it moves, and whether it does so early.
WAYS = {
    "drop": (None, True, False),
    "move": ("large", False, False),
    "move early": ("large", False, True),
    "either": ("large", True, False),
    "little room": ("small", True, False),
}


@dataclass
class Pair:
    ours: Tensor
    twin: Tensor


@dataclass
class Open:
    active: _C.ActiveLevel
    level: _C.Level
    budget: int | None

    def check(self) -> None:
        record = self.level.report().read()
        if self.budget is not None:
            assert record["resident_bytes"] <= self.budget, record
            assert record["peak_bytes"] <= self.budget, record


def spell(
    word: str, f: Callable[[Tensor], Tensor], ours: bool, tiers: dict[str, Tier]
) -> Callable[[Tensor], Tensor]:
    """Wrap one transform around `f`; `remat` only if the result is to be ours."""
    if word == "grad":
        return torch.func.grad(lambda x: f(x).square().sum())
    if word == "vmap":
        # The rows of a matrix, else the whole: random operators differ by row.
        return lambda x: torch.func.vmap(f, randomness="different")(x.unsqueeze(0)).squeeze(0)
    if word == "jvp":
        return lambda x: torch.func.jvp(f, (x,), (torch.ones_like(x),))[1]
    if not ours:
        return f
    if word in MOVES:
        return MOVES[word](f, tiers["large"], tiers["small"])
    if word == "everything":
        return rematfn.remat(f, policy=EVERYTHING)
    return rematfn.remat(f, budget=2048 if word == "tight" else None)


def look(t: Tensor) -> tuple[Any, ...]:
    """Return all that can be seen of a tensor: its properties, and its bits."""
    return (
        *(t.dtype, tuple(t.shape), t.stride(), t.storage_offset(), t.requires_grad, t.is_leaf),
        rematfn.materialize(bits(t).cpu()).tolist(),
    )


def look_behind(t: Tensor) -> list[float]:
    """Read the bytes themselves, which no operator sees."""
    return rematfn.materialize(rematfn.materialize(t).detach().cpu()).tolist()


class Twins(RuleBasedStateMachine):
    """Ours and the twin: the same program, of which only one knows of levels."""

    # Large enough for all, checked as it is read; and a small one, which is often full.
    tiers: ClassVar[dict[str, Tier]] = {
        "large": rematfn.Disk(verify=True),
        "small": rematfn.Disk(budget=20_000),
    }

    def __init__(self) -> None:
        super().__init__()
        self.before = remains()
        self.elsewhere = ThreadPoolExecutor(1)
        self.pairs: list[Pair] = []
        self.open: list[Open] = []
        self.closed: list[Open] = []
        self.held: list[Any] = []
        self.ended = False  # some level has, and its graph may be alive
        self.may_be_lost = False  # something that an ended level has read may have been written
        self.apart: set[int] = set()  # storages whose tensors may count their versions apart
        self.knotted = False  # a graph may hold itself

    # --- both at once ---------------------------------------------------------------------------

    def both(self, do: Callable[..., Any], *pairs: Pair, whole: bool = True) -> Any:
        """Do the same to ours and to the twin. Returns what both gave, or None if they refused.

        If ours does not fit in a budget, nothing has happened, and the twin does nothing either.
        What is not `whole` may have happened in part: then we start with other tensors.
        """
        before = self.random_state()
        ours, refusal = attempt(do, [p.ours for p in pairs], True)
        if isinstance(refusal, rematfn.BudgetError | rematfn.ReplayError):
            note(f"refused: {refusal}")
            self.set_random_state(before)
            if isinstance(refusal, rematfn.ReplayError):
                assert self.may_be_lost, refusal
            if isinstance(refusal, rematfn.ReplayError) or not whole:
                self.start()
            return None
        after = self.random_state()
        self.set_random_state(before)
        twin, expected = self.elsewhere.submit(attempt, do, [p.twin for p in pairs], False).result()
        same = type(refusal) is type(expected) and str(refusal) == str(expected)
        assert same, f"{refusal!r} instead of {expected!r}"
        assert torch.equal(self.random_state(), after), "the random stream differs"
        return None if refusal is not None else (ours, twin)

    def random_state(self) -> Tensor:
        # Five kilobytes, which under a level would count in it.
        return self.elsewhere.submit(torch.get_rng_state).result()

    def set_random_state(self, state: Tensor) -> None:
        torch.set_rng_state(state)

    def make(self, do: Callable[..., Any], *pairs: Pair) -> None:
        made = self.both(do, *pairs)
        if made is not None:
            self.add(Pair(*made))

    def write_to(self, do: Callable[..., Any], *pairs: Pair) -> None:
        if self.ended and any(storage_of(pair.twin) in self.apart for pair in pairs):
            return  # a replay may read what this overwrites, and not notice: docs/limitations.md
        leaves = self.leaves()
        self.both(do, *pairs)
        self.may_be_lost |= self.ended
        # Autograd keeps a saved tensor itself. If it is then written, and the write is recorded,
        # the tensor holds the graph that holds it, and neither is ever freed, in eager as here.
        self.knotted |= any(pair.twin.requires_grad for pair in pairs)
        still = {id(pair) for pair in self.leaves()}
        self.knotted |= not all(id(pair) in still for pair in leaves)

    def leaves(self) -> list[Pair]:
        # Asked of both on their threads: to ask for the node of a view can make a new one.
        found = self.both(lambda *ts: [is_leaf(t) for t in ts], *self.pairs)
        return [pair for pair, is_one in zip(self.pairs, found[1], strict=True) if is_one]

    def add(self, pair: Pair) -> None:
        self.pairs.append(pair)
        if len(self.pairs) > MOST_PAIRS:
            del self.pairs[0]

    def compare(self, pair: Pair) -> None:
        found = self.both(look, pair)
        assert found is None or found[0] == found[1], f"{found[0]} instead of {found[1]}"

    def compare_all(self) -> None:
        for pair in list(self.pairs):
            self.compare(pair)

    def pick(self, i: int) -> Pair:
        return self.pairs[i % len(self.pairs)]

    def pick_recorded(self, i: int) -> Pair:
        """Pick one that autograd knows, if there is any."""
        recorded = [pair for pair in self.pairs if pair.twin.requires_grad] or self.pairs
        return recorded[i % len(recorded)]

    # --- rules ----------------------------------------------------------------------------------

    number = st.integers(0, MOST_PAIRS - 1)
    budget = st.sampled_from([None, 256, 512, 1024])
    policy = st.sampled_from([*POLICIES, EVERYTHING])
    way = st.sampled_from(sorted(WAYS))

    def start(self) -> None:
        self.pairs.clear()
        for shape, requires_grad in [((2, 3), True), ((4,), False), ((), False), ((3, 2), True)]:
            self.make(lambda s=shape, r=requires_grad: leaf_of(s).requires_grad_(r))

    @initialize(levels=st.lists(st.tuples(budget, policy, way), max_size=2))
    def begin(self, levels: list[tuple[int | None, Any, str]]) -> None:
        torch.manual_seed(5)
        for level in levels:
            self.open_level(*level)
        self.start()

    @rule(name=st.sampled_from(sorted(NEW)), i=number, j=number)
    def compute(self, name: str, i: int, j: int) -> None:
        self.make(lambda a, b: NEW[name](a, b).clamp(-2, 2), self.pick(i), self.pick(j))

    @rule(name=st.sampled_from(sorted(NEW)), i=number, j=number)
    def compute_and_forget(self, name: str, i: int, j: int) -> None:
        """The result takes the place of what it was made of: links of a chain that are gone."""
        found = self.both(lambda a, b: NEW[name](a, b).tanh(), self.pick(i), self.pick(j))
        if found is not None:
            self.pairs[i % len(self.pairs)] = Pair(*found)

    @rule(name=st.sampled_from(sorted(NEW)), i=number, j=number)
    def compute_unrecorded(self, name: str, i: int, j: int) -> None:
        def do(a: Tensor, b: Tensor) -> Tensor:
            with torch.no_grad():
                return NEW[name](a, b).sin()

        self.make(do, self.pick(i), self.pick(j))

    @rule(name=st.sampled_from(sorted(VIEWS)), i=number, grad=st.booleans())
    def view(self, name: str, i: int, grad: bool) -> None:
        def do(a: Tensor) -> Tensor:
            with torch.set_grad_enabled(grad):
                return VIEWS[name](a, a)

        self.make(do, self.pick(i))

    @rule(name=st.sampled_from(sorted(WRITES)), i=number, j=number, grad=st.booleans())
    def write(self, name: str, i: int, j: int, grad: bool) -> None:
        def do(a: Tensor, b: Tensor) -> None:
            with torch.set_grad_enabled(grad):
                WRITES[name](a, b)

        self.write_to(do, self.pick(i), self.pick(j))

    @rule(name=st.sampled_from(sorted(METADATA)), i=number, j=number)
    def change_metadata(self, name: str, i: int, j: int) -> None:
        self.write_to(METADATA[name], self.pick(i), self.pick(j))
        if name in ("data", "set_"):
            self.apart |= {storage_of(self.pick(k).twin) for k in (i, j)}

    @rule(
        function=st.sampled_from(sorted(FUNCTIONS)),
        words=st.lists(st.sampled_from([*WORDS, *MOVES]), min_size=1, max_size=3),
        i=number,
    )
    def nest(self, function: str, words: list[str], i: int) -> None:
        def do(x: Tensor, ours: bool) -> Tensor:
            f = FUNCTIONS[function]
            for word in words:
                f = spell(word, f, ours, self.tiers)
            return f(x)

        self.ended = True
        self.make(do, self.pick(i))

    @rule(i=number, j=number, retain=st.booleans(), create=st.booleans())
    def differentiate(self, i: int, j: int, retain: bool, create: bool) -> None:
        def do(y: Tensor, x: Tensor) -> Tensor | None:
            loss = (y * y).sum()
            (g,) = torch.autograd.grad(
                loss, x, retain_graph=retain, create_graph=retain and create, allow_unused=True
            )
            return g

        made = self.both(do, self.pick_recorded(i), self.pick_recorded(j), whole=retain)
        if made is not None:
            assert (made[0] is None) == (made[1] is None)
            if made[0] is not None:
                self.add(Pair(*made))

    @rule(i=number, retain=st.booleans())
    def backward(self, i: int, retain: bool) -> None:
        def do(y: Tensor) -> None:
            y.sin().sum().backward(retain_graph=retain)

        if self.both(do, self.pick_recorded(i), whole=False) is None:
            return
        for pair in self.leaves():
            assert (pair.ours.grad is None) == (pair.twin.grad is None)
            if pair.ours.grad is not None:
                self.compare(Pair(pair.ours.grad, pair.twin.grad))

    @rule(i=number)
    def drop(self, i: int) -> None:
        if len(self.pairs) > 2:
            del self.pairs[i % len(self.pairs)]

    @rule(i=number)
    def read(self, i: int) -> None:
        self.compare(self.pick(i))

    @rule(i=number)
    def evict(self, i: int) -> None:
        _C.testing.evict(self.pick(i).ours)

    @precondition(lambda self: self.open or self.closed)
    @rule(i=number)
    def evict_a_level(self, i: int) -> None:
        levels = [*self.open, *self.closed]
        levels[i % len(levels)].level.discard(spare_kept=False)

    @rule(i=number)
    def materialize(self, i: int) -> None:
        self.both(look_behind, self.pick(i))

    @rule(i=number)
    def hold_bytes(self, i: int) -> None:
        """Somebody takes the storage, past the dispatcher, and keeps it for a while."""
        found = self.both(lambda t: rematfn.materialize(t).untyped_storage(), self.pick(i))
        if found is not None:
            self.held.append(found[0])

    @rule()
    def let_go_of_bytes(self) -> None:
        self.held.clear()

    # --- levels ---------------------------------------------------------------------------------

    @precondition(lambda self: len(self.open) < MOST_LEVELS)
    @rule(budget=budget, policy=policy, way=way)
    def open_level(self, budget: int | None, policy: Any, way: str) -> None:
        size, drops, leaves_early = WAYS[way]
        tier = None if size is None else self.tiers[size]
        options = LevelOptions(
            budget=budget,
            shared=None,
            policy=policy.core(),
            discards=False,
            timed=False,
            verify=False,
            name="f",
            tiers=[] if tier is None else [tier.open()],
            drops=drops,
            leaves_early=leaves_early,
        )
        active = options.level()
        self.open.append(Open(active, active.__enter__(), budget))

    @precondition(lambda self: self.open)
    @rule(leaving=st.sets(number))
    def close_level(self, leaving: set[int]) -> None:
        """Some tensors are results; the others have left through side effects."""
        level = self.open.pop()
        level.active.__exit__(None, None, None)
        self.closed.append(level)
        self.ended = True
        results = [self.pick(i) for i in leaving]

        def seal(*tensors: Tensor, ours: bool) -> bool:
            if ours:
                _C.hand_out(level.level, list(tensors), True)
            return True

        if self.both(seal, *results) is not None and not self.open:
            assert not any(_C.has_key(pair.ours) for pair in results)

    @precondition(lambda self: self.open)
    @rule()
    def fail_level(self) -> None:
        level = self.open.pop()
        level.active.__exit__(RuntimeError, RuntimeError(), None)
        self.closed.append(level)
        self.ended = True

    # --- what always holds ----------------------------------------------------------------------

    @invariant()
    def holds(self) -> None:
        rematfn.testing.check()
        assert _C.stack_depth() == len(self.open)
        for level in (*self.open, *self.closed):
            level.check()

    def teardown(self) -> None:
        try:
            self.compare_all()
        finally:
            self.knotted |= sys.exc_info()[0] is not None  # its traceback keeps what it can
            while self.open:
                self.open.pop().active.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)
            self.pairs.clear()
            self.closed.clear()
            self.held.clear()
            self.elsewhere.shutdown()
        rematfn.testing.check()
        after = remains()
        assert self.knotted or all(after[k] <= self.before[k] for k in after), f"left: {after}"
        held = [tier.held_bytes for tier in self.tiers.values()]
        assert self.knotted or after["levels"] > 0 or held == [0, 0], f"in the tiers: {held}"


def elements_left(a: Tensor) -> int:
    """How many elements there are to resize to: what a larger storage holds is not defined."""
    return a.untyped_storage().nbytes() // a.element_size() - a.storage_offset()


def leaf_of(shape: tuple[int, ...]) -> Tensor:
    numel = torch.Size(shape).numel()
    return torch.linspace(-1, 1, numel).view(shape).clone()


def storage_of(t: Tensor) -> int:
    return t.untyped_storage()._cdata


def is_leaf(t: Tensor) -> bool:
    try:
        return t.is_leaf
    except RuntimeError:  # autograd refuses to say, of some views that were written
        return False


def attempt(do: Callable[..., Any], tensors: list[Tensor], ours: bool) -> tuple[Any, Any]:
    """Return what `do` gives, and what torch refused it with."""
    extra = {"ours": ours} if "ours" in inspect.signature(do).parameters else {}
    try:
        return do(*tensors, **extra), None
    except (RuntimeError, IndexError, TypeError, ValueError, rematfn.BudgetError) as error:
        return None, error.with_traceback(None)


def search(machine: type[Twins] = Twins, **options: Any) -> None:
    """Run many of these programs."""
    run_state_machine_as_test(
        machine,
        settings=settings(
            deadline=None,
            database=None,
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
            **options,
        ),
    )


@pytest.fixture(autouse=True)
def nothing_is_left_behind(costs_at_random: None) -> Iterator[None]:
    """Each program is asked as it ends: a graph that holds itself stays, in eager as well."""
    torch.set_num_threads(1)
    yield
    assert _C.stack_depth() == 0


def test_any_program_under_any_levels_is_its_twin() -> None:
    search(max_examples=300 if EXHAUSTIVE else 100, stateful_step_count=30, derandomize=True)


def search_on(minutes: float) -> None:
    """Search with new seeds until the time is up, or something is found."""
    end, found = time.monotonic() + 60 * minutes, 0
    torch.set_num_threads(1)
    gc.freeze()  # what is there already need not be looked through after each of them
    _C.testing.draw_link_costs(True)
    while time.monotonic() < end:
        search(max_examples=500, stateful_step_count=50, phases=[Phase.generate])
        found += 500
        print(f"{found} programs, {(end - time.monotonic()) / 60:.0f} minutes left", flush=True)


if __name__ == "__main__":
    search_on(float(sys.argv[1]))
