# SPDX-License-Identifier: Apache-2.0
"""Training steps over several calls: every optimiser, wherever it steps, whatever is returned.

Parameters, the optimiser's state and what is returned are those of eager, bit for bit.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from helpers import EVERYTHING, assert_bitwise_equal, same_as_untransformed, some, spread
from torch import Tensor, nn, optim
from torch.optim import Optimizer

import rematfn

CALLS = 4
Parameters = list[nn.Parameter]
Build = Callable[[Parameters], Optimizer]
Transform = Callable[..., Any]


def matrices(build: Callable[..., Optimizer], parameters: Parameters) -> Optimizer:
    """Return an optimiser of the matrices alone: Muon takes no other."""
    return build([p for p in parameters if p.dim() == 2])


VARIANTS: dict[str, tuple[Callable[..., Optimizer], dict[str, Any]]] = {
    "SGD": (optim.SGD, {}),
    "SGD, momentum": (optim.SGD, {"momentum": 0.9}),
    "SGD, Nesterov": (optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    "Adam": (optim.Adam, {}),
    "Adam, amsgrad": (optim.Adam, {"amsgrad": True}),
    "AdamW": (optim.AdamW, {}),
    "AdamW, amsgrad": (optim.AdamW, {"amsgrad": True}),
    "NAdam": (optim.NAdam, {}),
    "NAdam, decoupled": (optim.NAdam, {"weight_decay": 0.1, "decoupled_weight_decay": True}),
    "RAdam": (optim.RAdam, {}),
    "Adamax": (optim.Adamax, {}),
    "Adadelta": (optim.Adadelta, {}),
    "Adagrad": (optim.Adagrad, {"lr_decay": 0.1}),
    "RMSprop": (optim.RMSprop, {}),
    "RMSprop, centred": (optim.RMSprop, {"centered": True, "momentum": 0.9}),
    "ASGD": (optim.ASGD, {"t0": 2}),
    "Rprop": (optim.Rprop, {}),
}
FUSED = ["SGD", "SGD, momentum", "Adam", "Adam, amsgrad", "AdamW", "Adagrad"]


def variants() -> Iterator[tuple[str, Build]]:
    for name, (kind, options) in VARIANTS.items():
        for suffix, extra in {
            "": {"foreach": False},
            ", foreach": {"foreach": True},
            ", maximise": {"foreach": False, "maximize": True},
        }.items():
            yield name + suffix, functools.partial(kind, lr=0.01, **options, **extra)
    for name in FUSED:
        kind, options = VARIANTS[name]
        options = {k: v for k, v in options.items() if k != "lr_decay"}
        yield f"{name}, fused", functools.partial(kind, lr=0.01, **options, fused=True)
    yield "Adafactor", functools.partial(optim.Adafactor, lr=0.01)
    yield "Adafactor, foreach", functools.partial(optim.Adafactor, lr=0.01, foreach=True)
    if hasattr(optim, "Muon"):
        yield "Muon", functools.partial(matrices, functools.partial(optim.Muon, lr=0.01))


OPTIMISERS = dict(variants())
# What reads in its step what it has written in the step before, in one way or another.
SOME = ["SGD, momentum", "Adam, amsgrad", "Adam, amsgrad, foreach", "RMSprop, centred", "Adadelta"]

MODES: dict[str, Transform] = {
    "plain": rematfn.remat,
    "tight": functools.partial(rematfn.remat, budget="40KiB"),
    "fraction": functools.partial(rematfn.remat, budget=0.7),
    "everything": EVERYTHING,
}
EVICTING = ["tight", "everything"]  # for the long tables: the two that evict most


def roomier(transform: Transform, budget: str) -> Transform:
    """Return `transform`, or one with another budget if it has any."""
    if transform in (MODES["tight"], MODES["fraction"]):
        return functools.partial(rematfn.remat, budget=budget)
    return transform


@pytest.fixture(params=MODES.values(), ids=MODES.keys())
def transform(request: pytest.FixtureRequest) -> Transform:
    return request.param


def network() -> nn.Module:
    layers = [layer for _ in range(4) for layer in (nn.Linear(16, 16), nn.Tanh())]
    return nn.Sequential(nn.Linear(8, 16), *layers, nn.Linear(16, 4))


def batches(calls: int = CALLS) -> Iterator[tuple[Tensor, Tensor]]:
    for _ in range(calls):
        yield torch.randn(64, 8), torch.randn(64, 4)


def loss_of(net: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    logits = net(x)
    return (logits - y).square().mean(), logits


def held(net: nn.Module, *optimisers: Optimizer) -> list[Any]:
    """Return the parameters and the optimisers' states, as copies."""
    found: list[Any] = [p.detach().clone() for p in net.state_dict().values()]
    for optimiser in optimisers:
        for state in optimiser.state.values():
            found += [v.clone() if isinstance(v, Tensor) else v for v in state.values()]
    return found


def assert_as_eager(run: Callable[[Transform], Any], transform: Transform) -> None:
    expected = run(lambda f: f)
    actual = run(transform)
    rematfn.testing.check()
    assert_bitwise_equal(actual, expected)


def started(build: Build) -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(3)
    net = network()
    return net, build(list(net.parameters()))


def whole_step(net: nn.Module, optimiser: Optimizer) -> Callable[[Tensor, Tensor], Tensor]:
    def train_step(x: Tensor, y: Tensor) -> Tensor:
        optimiser.zero_grad()
        loss, _ = loss_of(net, x, y)
        loss.backward()
        optimiser.step()
        return loss

    return train_step


def train(build: Build, transform: Transform) -> Any:
    """Take whole steps inside; keep what each returned until the next has come."""
    net, optimiser = started(build)
    step = transform(whole_step(net, optimiser))
    seen = [step(x, y).detach().clone() for x, y in batches()]
    return seen, held(net, optimiser)


@pytest.mark.parametrize(("name", "mode"), spread(OPTIMISERS, EVICTING, 2))
def test_a_step_inside_that_returns_its_loss(name: str, mode: str) -> None:
    assert_as_eager(functools.partial(train, OPTIMISERS[name]), MODES[mode])


# --- where the optimiser steps --------------------------------------------------------------------


def outside(build: Build, transform: Transform) -> Any:
    """The forward inside; backward and step outside."""
    net, optimiser = started(build)
    forward, seen = transform(lambda x, y: loss_of(net, x, y)), []
    for x, y in batches():
        optimiser.zero_grad()
        loss, logits = forward(x, y)
        loss.backward()
        optimiser.step()
        seen += [loss.detach().clone(), logits.detach().clone()]
    return seen, held(net, optimiser)


def after(build: Build, transform: Transform) -> Any:
    """Forward and backward inside; the step outside."""
    net, optimiser = started(build)

    def gradients(x: Tensor, y: Tensor) -> Tensor:
        loss, _ = loss_of(net, x, y)
        loss.backward()
        return loss

    step, seen = transform(gradients), []
    for x, y in batches():
        optimiser.zero_grad(set_to_none=len(seen) % 2 == 0)
        seen.append(step(x, y))
        optimiser.step()
    return [s.detach().clone() for s in seen], held(net, optimiser)


def in_hooks(build: Build, inside: bool, transform: Transform) -> Any:
    """Each parameter has an optimiser, which steps as soon as its gradient is there."""
    torch.manual_seed(3)
    net = network()
    optimisers = {p: build([p]) for p in net.parameters()}

    def step_one(p: Tensor) -> None:
        optimisers[p].step()  # type: ignore[index]
        optimisers[p].zero_grad()  # type: ignore[index]

    for p in net.parameters():
        p.register_post_accumulate_grad_hook(step_one)

    def train_step(x: Tensor, y: Tensor) -> Tensor:
        loss, _ = loss_of(net, x, y)
        if inside:
            loss.backward()
        return loss

    step, seen = transform(train_step), []
    for x, y in batches():
        loss = step(x, y)
        if not inside:
            loss.backward()
        seen.append(loss.detach().clone())
    return seen, held(net, *optimisers.values())


def between(build: Build, transform: Transform) -> Any:
    """Two losses of two networks that share a part; a step after each backward, inside."""
    torch.manual_seed(3)
    net, other = network(), network()
    optimiser = build([*net.parameters(), *other.parameters()])

    def train_step(x: Tensor, y: Tensor) -> Any:
        optimiser.zero_grad()
        h = torch.tanh(x * 2)
        first, _ = loss_of(net, h, y)
        second, _ = loss_of(other, h, y)
        first.backward()
        with torch.no_grad():
            for p in net.parameters():
                p.mul_(0.999)
        second.backward()
        optimiser.step()
        return first, second

    step, seen = transform(train_step), []
    for x, y in batches():
        seen.append([t.detach().clone() for t in step(x, y)])
    return seen, held(net, optimiser), held(other)


PLACES: dict[str, Callable[[Build, Transform], Any]] = {
    "outside": outside,
    "after": after,
    "in hooks, inside": lambda build, transform: in_hooks(build, True, transform),
    "in hooks, outside": lambda build, transform: in_hooks(build, False, transform),
    "between two backwards": between,
}
PLACED = [*SOME, "AdamW, fused", "Adam, foreach", "Adafactor", "ASGD", "NAdam"]


@pytest.mark.parametrize("mode", EVICTING)
@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES.keys())
@pytest.mark.parametrize("name", some(PLACED, 2))
def test_a_step(name: str, place: Callable[[Build, Transform], Any], mode: str) -> None:
    transform = MODES[mode]
    if place is between:  # of twice the parameters
        transform = roomier(transform, "64KiB")
    assert_as_eager(functools.partial(place, OPTIMISERS[name]), transform)


# --- steps of other kinds -------------------------------------------------------------------------


def lbfgs(search: str | None, transform: Transform) -> Any:
    options = {"lr": 0.1, "max_iter": 4, "history_size": 3, "line_search_fn": search}
    net, optimiser = started(functools.partial(optim.LBFGS, **options))

    def train_step(x: Tensor, y: Tensor) -> Any:
        def closure() -> Tensor:
            optimiser.zero_grad()
            loss, _ = loss_of(net, x, y)
            loss.backward()
            return loss

        return optimiser.step(closure)

    step = transform(train_step)
    seen = [step(x, y).detach().clone() for x, y in batches()]
    return seen, held(net)


@pytest.mark.parametrize("search", [None, "strong_wolfe"])
def test_lbfgs_with_a_closure(search: str | None, transform: Transform) -> None:
    transform = roomier(transform, "120KiB")  # its history is flat
    assert_as_eager(functools.partial(lbfgs, search), transform)


# --- what else is stored away ---------------------------------------------------------------------


class Memory(nn.Module):
    """An LSTM cell with its state, a cache, averages of several kinds, and a replay buffer."""

    def __init__(self, detached: bool) -> None:
        super().__init__()
        self.cell, self.norm = nn.LSTMCell(8, 16), nn.BatchNorm1d(16)
        self.head = nn.Linear(16, 4)
        self.detached = detached
        self.state: tuple[Tensor, Tensor] | None = None
        self.cache: Tensor | None = None
        self.register_buffer("mean", torch.zeros(16))
        self.replayed = torch.zeros(4, 64, 4)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        state = self.state
        if state is not None and self.detached:
            state = (state[0].detach(), state[1].detach())
        h, c = self.cell(x, state)
        self.state = (h, c) if self.detached else (h.detach(), c.detach())
        with torch.no_grad():
            self.mean.mul_(0.9).add_(h.mean(0), alpha=0.1)
        y = self.head(self.norm(h - self.mean))
        if self.cache is not None:
            y = y + 0.1 * self.cache
        self.cache = y.detach().tanh()
        self.replayed[self.calls % 4].copy_(y.detach())
        self.calls += 1
        return y + self.replayed.mean(0)


@pytest.mark.parametrize("keeps", [False, True], ids=["graph freed", "graph kept"])
@pytest.mark.parametrize("inside", [False, True], ids=["outside", "inside"])
@pytest.mark.parametrize("detached", [False, True], ids=["when kept", "when used"])
@same_as_untransformed
def test_a_module_that_remembers(
    detached: bool, inside: bool, keeps: bool, transform: Transform
) -> Any:
    if keeps and not inside:
        pytest.skip("a graph that is kept for a second backward, and then overwritten: no program")

    transform = roomier(transform, "64KiB")

    torch.manual_seed(3)
    net = Memory(detached)
    optimiser = optim.Adam(net.parameters(), lr=0.01, amsgrad=True)

    def train_step(x: Tensor, y: Tensor) -> Tensor:
        loss, _ = loss_of(net, x, y)
        if inside:
            optimiser.zero_grad()
            loss.backward(retain_graph=keeps)
            optimiser.step()
        return loss

    step, seen = transform(train_step), []
    for x, y in batches(6):
        loss = step(x, y)
        if not inside:
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
        seen.append(loss.detach().clone())
        if not keeps:
            x.zero_()  # a loader that uses its memory again
    assert net.state is not None
    assert net.cache is not None
    kept = [net.state[0], net.state[1], net.cache, net.mean, net.replayed]
    return seen, held(net, optimiser), [t.detach().clone() for t in kept]


@same_as_untransformed
def test_what_a_graph_that_was_dropped_leaves_behind(transform: Transform) -> Any:
    """No backward says that the graph is gone; but no result leads back to it."""

    torch.manual_seed(3)
    net = Memory(detached=False)

    def warm_up(x: Tensor, y: Tensor) -> Tensor:
        return loss_of(net, x, y)[0].detach()

    step, seen = roomier(transform, "64KiB")(warm_up), []
    for x, y in batches():
        seen.append(step(x, y).clone())
        x.zero_()
        with torch.no_grad():
            for p in net.parameters():
                p.mul_(0.99)
    assert net.state is not None
    return seen, [t.clone() for t in net.state], net.mean.clone()
