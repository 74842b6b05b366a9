# SPDX-License-Identifier: Apache-2.0
"""Calls that vary are capped and guided all the same, by records of other calls."""

import gc
import threading
import weakref
from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import assert_bitwise_equal, assert_exact_within
from programs_traced import waves
from torch import Tensor, nn

import rematfn
from rematfn._transform.signature import signature_of
from rematfn.policies import Guided
from rematfn.testing import MemoryTimeline

AT_ONCE = Guided(search=0)
FRACTION = 0.4
X = torch.linspace(-1, 1, 4096)


def gradient(x: Tensor, steps: int = 12) -> Tensor:
    return torch.func.grad(lambda x: waves(x, steps))(x)


def kinds(
    f: Callable[..., Any], calls: list[tuple[Any, ...]], budget: Any = FRACTION, **options: Any
) -> list[str]:
    """Make the calls, each of them equal to `f` and within its cap; return what each was."""
    g = rematfn.remat(f, budget, policy=options.pop("policy", AT_ONCE))
    found = []
    largest = 0
    for args in calls:
        expected = f(*args)
        with MemoryTimeline() as timeline:
            actual = g(*args)
        assert_bitwise_equal(actual, expected)
        stats = rematfn.stats(g)
        found.append(stats.call)
        largest = max(largest, stats.unconstrained_bytes)
        if stats.call == "first" and not isinstance(budget, str):
            assert stats.budget is None
            continue
        assert stats.peak_bytes <= stats.budget
        assert timeline.peak_excluding_survivors <= stats.budget, (stats, len(found))
        if isinstance(budget, float):
            assert stats.budget <= budget * largest
    return found


@dataclass
class Batch:
    x: Tensor
    label: str
    step: int = 0


class Slotted:
    __slots__ = ("unset", "x")

    def __init__(self, x: Tensor) -> None:
        self.x = x


class Data:
    """As PyG's: a store of its own, and properties that are not to be called."""

    def __init__(self, x: Tensor) -> None:
        self._store = {"x": x, "me": self}
        self.num_steps = 3

    def __getattr__(self, name: str) -> Any:
        return self.__dict__["_store"][name]

    @property
    def costly(self) -> Any:
        raise AssertionError("it was asked for")


class Encoding(UserDict[str, Any]):
    """As transformers' BatchEncoding: a mapping that no registry knows."""


MADE: dict[str, Callable[[Tensor, int], Any]] = {
    "dataclass": lambda x, i: Batch(x, "train", i),
    "pyg-data": lambda x, i: Data(x),
    "batch-encoding": lambda x, i: Encoding({"x": x, "step": i}),
    "slots": lambda x, i: Slotted(x),
    "nested": lambda x, i: SimpleNamespace(x=x, rest=[{"a": (Batch(x, "b", i), i)}]),
}


@pytest.mark.parametrize("kind", MADE)
@pytest.mark.parametrize("budget", [FRACTION, "300kB"], ids=["fraction", "bytes"])
def test_tensors_are_found_in_any_object(kind: str, budget: Any) -> None:
    """A new object each time, and a number in it that changes; then another size."""
    made = MADE[kind]
    small = X[:2048].clone()

    def f(batch: Any) -> Tensor:
        return gradient(batch["x"] if isinstance(batch, Encoding) else batch.x)

    batches = [(made(X, i),) for i in range(4)] + [(made(small, i),) for i in range(3)]
    assert kinds(f, batches, budget) == ["first"] + ["guided"] * 6


def test_forty_shapes_are_capped_and_guided_at_once() -> None:
    sizes = [(torch.linspace(-1, 1, 1024 + 97 * i),) for i in range(40)]
    assert kinds(gradient, sizes + sizes) == ["first"] + ["guided"] * 79


def test_sizes_that_never_come_again_are_not_recorded() -> None:
    g = rematfn.remat(gradient, FRACTION, policy=AT_ONCE)
    for i in range(20):
        g(torch.linspace(-1, 1, 1024 + 97 * i))
    keys = g._history._keys.values()
    assert sum(len(key.programs) + len(key.pending) for key in keys) <= 5
    for i in range(20):  # again, and then they are
        g(torch.linspace(-1, 1, 1024 + 97 * i))
        g(torch.linspace(-1, 1, 1024 + 97 * i))
    assert sum(len(key.programs) + len(key.pending) for key in keys) >= 20


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)

    @rematfn.remat(budget=0.5, policy=AT_ONCE)
    def loss(self, x: Tensor) -> Tensor:
        return waves(self.layer(x), 3)


def test_a_function_that_was_called_keeps_no_model_and_no_data_alive() -> None:
    class Metadata:
        """A key of a mapping, an attribute, an argument that can be hashed."""

    @rematfn.remat(budget=0.5, policy=AT_ONCE)
    def f(model: nn.Module, x: Tensor, extra: Any, held: Any) -> Tensor:
        return waves(model(x), 3)

    def run() -> list[weakref.ref[Any]]:
        model, x, meta = Model(), torch.randn(256, 64), Metadata()
        for _ in range(3):
            f(model.layer, x, {meta: (meta, x)}, lambda: model).backward()
            model.loss(x).backward()
        kind = type("Local", (), {"x": x})
        f(model.layer, x, kind(), kind)
        return [weakref.ref(o) for o in (model, model.layer, x, meta, kind, model.layer.weight)]

    references = run()
    gc.collect()
    assert [r() for r in references] == [None] * len(references)


# --- calls that go another way than their record --------------------------------------------------


def stack(x: Tensor, layers: list[int], width: int) -> Tensor:
    weights = [torch.linspace(-1, 1, width * width).reshape(width, width) + i for i in layers]

    def loss(x: Tensor) -> Tensor:
        for weight in weights:
            x = x + torch.tanh(torch.nn.functional.layer_norm(x, (width,)) @ weight).square()
        return x.square().sum()

    return torch.func.grad(loss)(x)


ALL = list(range(16))
WAYS: dict[str, list[list[int]]] = {
    "a layer less": [ALL, ALL[:5] + ALL[6:]],
    "a layer more": [ALL[:5] + ALL[6:], ALL],
    "others dropped": [[i for i in ALL if i % 5], [i for i in ALL if i % 4]],
    "three quarters of it": [ALL, ALL[:12]],
}


@pytest.mark.parametrize("way", WAYS)
def test_a_guide_finds_its_place_again(way: str) -> None:
    """What the second call replays is about what a plan of its own would."""
    recorded, now = WAYS[way]
    x = torch.linspace(-1, 1, 64 * 32).reshape(64, 32)
    layers = recorded
    g = rematfn.remat(lambda x: stack(x, layers, 32), "192KiB", policy=Guided(search=20_000))
    g(x)
    layers = now
    assert_exact_within(192 * 1024, g, lambda x: stack(x, now, 32), x)
    found = rematfn.stats(g)
    assert found.call == "guided"
    assert found.replayed_cost > 0
    trace = rematfn.record(stack, x, now, 32)
    own = rematfn.simulate(trace, "192KiB", Guided(search=20_000)).replayed_cost
    assert 1 + found.replayed_cost < 1.15 * (1 + own)


# --- signatures -----------------------------------------------------------------------------------


def key(*args: Any, **kwargs: Any) -> Any:
    return signature_of(args, kwargs).key


@pytest.mark.parametrize("shorter_first", [True, False])
def test_calls_with_and_without_a_backward_in_turn_are_guided(shorter_first: bool) -> None:
    """See Note [Calls in turn]."""
    torch.manual_seed(0)
    net = nn.Sequential(*[m for _ in range(6) for m in (nn.Linear(64, 64), nn.Tanh())])
    x, parameters = torch.randn(256, 64), list(net.parameters())
    expected = torch.autograd.grad(net(x).square().mean(), parameters)
    g = rematfn.remat(net, 5 * x.nbytes, policy=AT_ONCE)

    def shorter() -> None:
        assert_bitwise_equal(g(x).detach(), net(x).detach())

    def longer() -> None:
        assert_bitwise_equal(torch.autograd.grad(g(x).square().mean(), parameters), expected)

    replayed = []
    for number in range(12):
        longer() if (number % 2 == 0) != shorter_first else shorter()
        replayed.append(rematfn.stats(g).replayed_cost)
        if number >= 6:
            assert rematfn.stats(g).call == "guided"
    alone = rematfn.remat(net, 5 * x.nbytes, policy=AT_ONCE)
    for _ in range(2):
        torch.autograd.grad(alone(x).square().mean(), parameters)
    assert max(replayed[6:]) <= rematfn.stats(alone).replayed_cost


def test_a_cycle_ends_and_what_is_deep_or_long_is_cut_off() -> None:
    cycle: list[Any] = [X]
    cycle.append(cycle)
    assert key(cycle) == key(cycle)
    deep: Any = X
    for _ in range(10_000):
        deep = [deep]
    assert len(key(deep)) < 100
    for long in (
        [[] for _ in range(100_000)],
        [(i, "a") for i in range(100_000)],
        {i: X for i in range(100_000)},
    ):
        assert key(long, X) == key(long, X)
        assert len(key(long, X)) < 20, "a digest is kept"
    assert key([X] * 300) != key([X] * 299 + [X[:3]])


# --- what is remembered is bounded ----------------------------------------------------------------


def test_a_call_that_another_thread_is_in_is_not_too_tight() -> None:
    # It may have given way already, to a peak that is still to come.
    began = [threading.Event() for _ in range(2)]
    go_on = threading.Event()

    def f(x: Tensor) -> Tensor:
        x = x.sin()
        for event in began:
            if not event.is_set():
                event.set()
                go_on.wait(60)
                break
        return waves(x)

    g = rematfn.remat(torch.func.grad(f), FRACTION, policy=AT_ONCE)
    found: list[Tensor] = []
    threads = [threading.Thread(target=lambda: found.append(g(X))) for _ in range(3)]
    for thread, event in zip(threads, [*began, None], strict=True):
        thread.start()
        if event is not None:
            assert event.wait(60)
    threads[2].join(60)
    go_on.set()
    for thread in threads:
        thread.join()
    expected = torch.func.grad(lambda x: waves(x.sin()))(X)
    assert_bitwise_equal(found, [expected.clone() for _ in range(3)])
