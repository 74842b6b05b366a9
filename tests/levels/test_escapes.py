# SPDX-License-Identifier: Apache-2.0
"""What leaves a level through side effects: caches, hidden states, optimisers' moments.

It is used, written, differentiated or captured later, when the level is gone or another one runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import EVERYTHING, Mode, Transform, assert_same_as_eager
from torch import Tensor, nn

import rematfn
from rematfn import _C

# --- one tensor that was stored away ------------------------------------------------------------

Later = Callable[[Tensor, Tensor, Tensor, Transform], Any]


def together(kept: Tensor, out: Tensor, x: Tensor, transform: Transform) -> None:
    ((kept * 3).cos().sum() + out.sum()).backward()


def one_after_the_other(kept: Tensor, out: Tensor, x: Tensor, transform: Transform) -> None:
    out.sum().backward(retain_graph=True)
    (kept * 3).cos().sum().backward()


def written_after_the_backward(kept: Tensor, out: Tensor, x: Tensor, transform: Transform) -> Any:
    out.sum().backward()
    return kept.detach().mul_(2) * 1


def given_to_another(kept: Tensor, out: Tensor, x: Tensor, transform: Transform) -> None:
    transform(lambda y: (y.sin() * y).exp())(kept).sum().backward()


def captured_by_another(kept: Tensor, out: Tensor, x: Tensor, transform: Transform) -> None:
    transform(lambda x: (x * kept).exp().cos())(x).sum().backward()


def written_by_another(kept: Tensor, out: Tensor, x: Tensor, transform: Transform) -> Any:
    return transform(lambda y: y.detach().mul_(2).sin())(kept), kept.detach() * 1


def hooked(kept: Tensor, out: Tensor, x: Tensor, transform: Transform) -> None:
    kept.register_hook(lambda gradient: gradient * 2)
    out.sum().backward()


def detached_in_place(kept: Tensor, out: Tensor, x: Tensor, transform: Transform) -> Any:
    kept.detach_()
    out.sum().backward()
    return kept * 1


def written_by_an_out_variant(kept: Tensor, out: Tensor, x: Tensor, transform: Transform) -> Any:
    torch.add(x.detach(), 1, out=kept.detach())
    return kept.detach() * 1


LATER: dict[str, Later] = {
    "used": lambda kept, out, x, transform: (kept * 2, out),
    "viewed": lambda kept, out, x, transform: (kept.t()[1:] * 2, out.sum().backward())[0],
    "printed": lambda kept, out, x, transform: (str(kept), out.sum().backward())[0],
    "an array": lambda kept, out, x, transform: kept.detach().numpy().tolist(),
    "differentiated": lambda kept, out, x, transform: kept.sum().backward(),
    "differentiated twice": lambda kept, out, x, transform: torch.autograd.grad(
        torch.autograd.grad(out.sum(), kept, create_graph=True)[0].sum(), x
    ),
    **{f.__name__: f for f in (together, one_after_the_other, written_after_the_backward)},
    **{f.__name__: f for f in (given_to_another, captured_by_another, written_by_another)},
    **{f.__name__: f for f in (hooked, detached_in_place, written_by_an_out_variant)},
}


@pytest.mark.parametrize("later", LATER.values(), ids=LATER.keys())
def test_a_tensor_that_was_stored_away_is(later: Later, mode: Mode) -> None:
    def run(transform: Transform) -> Any:
        torch.manual_seed(3)
        x, box = torch.randn(4, 6, requires_grad=True), []

        def f(x: Tensor) -> Tensor:
            y = x.sin()
            box.append(y)
            z = (y.exp() * x).cos()
            return (z @ z.t()).tanh()

        out = transform(f)(x)
        return later(box[0], out, x, transform), out.detach(), x.grad

    assert_same_as_eager(run, mode)


def test_a_copy_and_a_view_that_were_stored_away_are_written(mode: Mode) -> None:
    """Before the backward: the copy is nobody else's, and what the view shows was not saved."""

    def run(transform: Transform) -> Any:
        torch.manual_seed(3)
        x, box = torch.randn(4, 6, requires_grad=True), []

        def f(x: Tensor) -> Tensor:
            y = x * 3
            box.extend([y.detach().clone(), y.detach()[1:]])
            return (y + 1).sin().cos()

        out = transform(f)(x)
        for kept in box:
            kept.mul_(2)
        out.sum().backward()
        return out.detach(), x.grad, [kept * 1 for kept in box]

    assert_same_as_eager(run, mode)


# --- state from call to call ---------------------------------------------------------------------


class Carries(nn.Module):
    """A recurrent network whose hidden state is not an output."""

    def __init__(self, detached: bool) -> None:
        super().__init__()
        self.cell, self.detached = nn.GRUCell(4, 4), detached
        self.h: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        h = torch.zeros(2, 4) if self.h is None else self.h
        self.h = self.cell(x, h.detach() if self.detached else h)
        return self.h.sin()


def test_a_hidden_state_is_carried_through_the_calls(mode: Mode) -> None:
    def run(transform: Transform) -> Any:
        torch.manual_seed(3)
        net = Carries(detached=False)
        g = transform(net.forward)
        outs = [g(torch.randn(2, 4)) for _ in range(4)]
        torch.stack(outs).sum().backward()
        assert net.h is not None
        return outs, net.h * 1, [p.grad for p in net.parameters()]

    assert_same_as_eager(run, mode)


def test_a_hidden_state_outlives_the_parameters_it_was_computed_from(mode: Mode) -> None:
    """Truncated backpropagation through time: the optimiser steps outside, between two calls."""

    def run(transform: Transform) -> Any:
        torch.manual_seed(3)
        net = Carries(detached=True)
        g, sgd = transform(net.forward), torch.optim.SGD(net.parameters(), lr=0.5)
        losses = []
        for _ in range(4):
            sgd.zero_grad()
            loss = g(torch.randn(2, 4)).square().sum()
            loss.backward()
            sgd.step()
            losses.append(loss.detach())
        assert net.h is not None
        return losses, net.h.detach() * 1, list(net.parameters())

    assert_same_as_eager(run, mode)


@pytest.mark.parametrize("preallocated", [False, True])
def test_a_cache_grows_from_call_to_call(preallocated: bool, mode: Mode) -> None:
    def run(transform: Transform) -> Any:
        torch.manual_seed(3)
        cache: dict[str, Tensor] = {}
        w = torch.randn(3, 3)

        def f(x: Tensor, step: int) -> Tensor:
            key = (x @ w).cos()
            if preallocated:
                cache.setdefault("k", torch.zeros(12, 3))[3 * step : 3 * step + 3] = key
            else:
                cache["k"] = torch.cat([cache["k"], key]) if cache else key
            return (cache["k"][: 3 * step + 3].softmax(-1) @ x).sin()

        g, outs = transform(f), []
        for step in range(4):
            outs.append(g(torch.randn(3, 3), step))
            w.mul_(0.9)  # what is in the cache was computed from the old contents
        return outs, cache["k"] * 1

    assert_same_as_eager(run, mode)


def test_a_history_is_kept_for_an_auxiliary_loss(mode: Mode) -> None:
    def run(transform: Transform) -> Any:
        torch.manual_seed(3)
        x, history = torch.randn(4, 4, requires_grad=True), []

        def f(x: Tensor) -> Tensor:
            for _ in range(4):
                x = (x @ x).tanh()
                history.append(x)
            return x.sum()

        loss = transform(f)(x)
        auxiliary = torch.stack([h.square().mean() for h in history]).sum()
        (loss + auxiliary).backward()
        return x.grad, loss.detach(), [h.detach() * 1 for h in history]

    assert_same_as_eager(run, mode)


class Losing(nn.Module):
    """Returns nothing: its loss is an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
        self.loss: Tensor | None = None

    def forward(self, x: Tensor) -> None:
        y = self.net(x.sin()).exp()
        self.loss = (y * y.cos()).square().sum()


@pytest.mark.parametrize("calls", [1, 2], ids=["once", "two-and-added"])
def test_a_loss_that_is_kept_and_not_returned(calls: int, mode: Mode) -> None:
    def run(transform: Transform) -> Any:
        torch.manual_seed(3)
        module, x = Losing(), torch.randn(5, 4, requires_grad=True)
        g, losses = transform(module), []
        for k in range(calls):
            assert g(x * (k + 1)) is None
            losses.append(module.loss)
        if calls == 1:
            losses[0].backward()
        else:
            sum(losses).backward()
        return [x.grad, [p.grad for p in module.parameters()], [t.detach() for t in losses]]

    assert_same_as_eager(run, mode)


# --- whole training steps ------------------------------------------------------------------------

OPTIMISERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": lambda ps, **how: torch.optim.SGD(ps, lr=0.1, momentum=0.9, nesterov=True, **how),
    "Adam": lambda ps, **how: torch.optim.Adam(ps, lr=0.1, amsgrad=True, **how),
    "AdamW": lambda ps, **how: torch.optim.AdamW(ps, lr=0.1, **how),
    "Adagrad": lambda ps, **how: torch.optim.Adagrad(ps, lr=0.1, **how),
}
HOW: dict[str, dict[str, bool]] = {
    "for-loop": {"foreach": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}


@pytest.mark.parametrize("set_to_none", [True, False], ids=["none", "zero"])
@pytest.mark.parametrize("how", HOW.values(), ids=HOW.keys())
@pytest.mark.parametrize("make", OPTIMISERS.values(), ids=OPTIMISERS.keys())
def test_an_optimiser_inside_ends_with_the_same_parameters_and_state(
    make: Callable[..., torch.optim.Optimizer], how: dict[str, bool], set_to_none: bool, mode: Mode
) -> None:
    def run(transform: Transform) -> Any:
        torch.manual_seed(3)
        net = nn.Sequential(nn.Linear(4, 8), nn.SiLU(), nn.Linear(8, 3))
        optimiser = make(net.parameters(), **how)

        def train_step(x: Tensor) -> Tensor:
            optimiser.zero_grad(set_to_none=set_to_none)
            loss = net(x).tanh().square().sum()
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimiser.step()
            return loss.detach()

        g = transform(train_step)
        losses = [g(torch.randn(5, 4)) for _ in range(3)]
        moments = [v * 1 for s in optimiser.state.values() for v in s.values() if v is not None]
        return losses, list(net.parameters()), [p.grad for p in net.parameters()], moments

    assert_same_as_eager(run, mode)


def test_an_optimiser_that_calls_a_closure(mode: Mode) -> None:
    def run(transform: Transform) -> Any:
        torch.manual_seed(3)
        net, x = nn.Linear(4, 3), torch.randn(5, 4)
        lbfgs = torch.optim.LBFGS(net.parameters(), max_iter=4)

        def closure() -> Tensor:
            lbfgs.zero_grad()
            loss = net(x).square().sum()
            loss.backward()
            return loss

        g = transform(lambda: lbfgs.step(closure).detach())
        return [g(), g()], list(net.parameters())

    assert_same_as_eager(run, mode)


def test_an_average_of_the_parameters_is_kept_beside_them(mode: Mode) -> None:
    def run(transform: Transform) -> Any:
        torch.manual_seed(3)
        swa = torch.optim.swa_utils
        net = nn.Linear(4, 3)
        average = swa.AveragedModel(net, multi_avg_fn=swa.get_ema_multi_avg_fn(0.9))
        sgd = torch.optim.SGD(net.parameters(), 0.1)

        def train_step(x: Tensor) -> Tensor:
            sgd.zero_grad()
            loss = net(x).square().sum()
            loss.backward()
            sgd.step()
            average.update_parameters(net)
            return loss.detach()

        g = transform(train_step)
        losses = [g(torch.randn(5, 4)) for _ in range(3)]
        return losses, list(net.parameters()), list(average.parameters()), list(average.buffers())

    assert_same_as_eager(run, mode)


def test_gradients_are_accumulated_read_and_written_inside(mode: Mode) -> None:
    def run(transform: Transform) -> Any:
        torch.manual_seed(3)
        layer = nn.Linear(4, 4)

        def f(x: Tensor) -> Any:
            for k in range(3):
                (layer(x) * k).sin().sum().backward()
            assert layer.weight.grad is not None
            seen = layer.weight.grad.clone()
            layer.weight.grad.mul_(0.5)[0] = 1
            return seen, layer.weight.grad.sum()

        g = transform(f)
        return [g(torch.randn(2, 4)) for _ in range(2)], [p.grad for p in layer.parameters()]

    assert_same_as_eager(run, mode)


@pytest.mark.parametrize("graph", [False, True], ids=["no-graph", "a-graph"])
def test_a_gradient_of_a_weight_that_is_read_through_a_view_is_sealed(graph: bool) -> None:
    """`linear` reads the transpose; the leaf itself is an argument of no recorded operator."""
    layer = nn.Linear(4, 4, bias=False)

    def f(x: Tensor) -> Tensor:
        y = layer(x.sin())
        y.cos().sum().backward(retain_graph=True)
        return y if graph else y.detach()

    out = EVERYTHING(f)(torch.ones(2, 4))
    assert layer.weight.grad is not None
    assert not _C.has_key(layer.weight.grad)
    assert layer.weight.grad.data_ptr() != 0
    assert out.requires_grad == graph


def test_nothing_of_a_training_step_is_left_in_the_tables() -> None:
    net = nn.Linear(4, 3)
    adam = torch.optim.Adam(net.parameters())

    def train_step(x: Tensor) -> Tensor:
        adam.zero_grad()
        loss = net(x).square().sum()
        loss.backward()
        adam.step()
        return loss.detach()

    g = EVERYTHING(train_step)
    for _ in range(3):
        g(torch.ones(5, 4))
    assert _C.testing.live_operations() == 0
    assert rematfn.stats(g).resident_bytes == 0
