# SPDX-License-Identifier: Apache-2.0
"""`offload` without a budget: what is not in use goes; guided calls keep to what that came to."""

import functools
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import assert_bitwise_equal, drawn
from torch import Tensor, nn

import rematfn
from rematfn._transform.recorded import RecordedProgram
from rematfn.testing import MemoryTimeline

X = torch.randn(512, 128)  # 256 KiB: large enough to be moved


def layers(x: Tensor, weights: list[Tensor], seconds: float = 0) -> Tensor:
    for w in weights:
        x = torch.tanh(x @ w / 12)
        time.sleep(seconds)
    return x.square().mean()


def gradients(f: Callable[[], Tensor], of: list[Tensor]) -> list[Tensor]:
    return list(torch.autograd.grad(f(), of))


def peaks_of(f: Callable[[], list[Tensor]], calls: int) -> list[int]:
    """What they hold at the most, but for results: these are to leave in any case."""
    found = []
    for _ in range(calls):
        with MemoryTimeline() as timeline:
            results = f()
        found.append(timeline.peak_excluding_survivors)
        del results
    return found


def backward(g: Callable[..., Tensor], weights: list[Tensor]) -> list[Tensor]:
    return gradients(lambda: g(X, weights), weights)


def functional(g: Callable[..., Tensor], weights: list[Tensor]) -> list[Tensor]:
    """Its graph holds all to its end."""
    return torch.func.grad(g, argnums=1)(X, [w.detach() for w in weights])


@pytest.mark.parametrize("gradients_by", [backward, functional])
def test_guided_calls_keep_to_what_the_first_came_to(gradients_by: Any) -> None:
    weights = [torch.randn(128, 128, requires_grad=True) for _ in range(16)]
    expected = gradients_by(layers, weights)
    # With time for the disk: how much waits for it is not what is tested.
    g = rematfn.offload(functools.partial(layers, seconds=0.01))
    kinds, held, moves = [], [], []

    def call() -> list[Tensor]:
        actual = gradients_by(g, weights)
        assert_bitwise_equal(actual, expected)
        stats = rematfn.stats(g)
        assert stats.evictions > 0  # what is never read again need not be moved
        assert stats.replays == 0
        kinds.append(stats.call)
        held.append(stats.peak_bytes)
        moves.append(stats.moves)
        return actual

    (eager,) = peaks_of(lambda: gradients_by(layers, weights), 1)
    peaks = peaks_of(call, 6)
    assert kinds == ["first"] + ["guided"] * 5
    assert moves[0] > 0
    assert max(held) == held[0]
    assert (
        max(peaks) <= held[0] + 2 * X.element_size()
    )  # the loss and its gradient are the caller's
    assert held[0] < 0.8 * eager


def test_without_a_cap_no_call_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even one that writes to a buffer, and for whose record there is no plan."""
    net = nn.Sequential(*[m for _ in range(4) for m in (nn.Linear(64, 64), nn.BatchNorm1d(64))])
    x = torch.randn(512, 64)
    g = rematfn.offload(net)
    g(x).sum().backward()
    monkeypatch.setattr(RecordedProgram, "planned", property(lambda _: None))
    g(x).sum().backward()
    assert rematfn.stats(g).call == "online"


def test_nothing_moves_where_all_is_small() -> None:
    k = torch.randn(8, 32, 16, requires_grad=True)

    def scan() -> Tensor:
        a, out = torch.zeros(len(k), k.shape[2]), []
        for t in range(k.shape[1]):
            a = torch.exp(-a) * k[:, t] + torch.exp(k[:, t] * 0.1)
            out.append(a / (a.square() + 1))
        return torch.stack(out).square().mean()

    expected = gradients(scan, [k])
    g = rematfn.offload(scan)
    for _ in range(4):
        assert_bitwise_equal(gradients(g, [k]), expected)
        assert rematfn.stats(g).moves == 0


def test_what_is_dropped_is_no_walk_through_all_that_was_made_from_it() -> None:
    """Nor where what was made from it stays replayable, since it is larger."""
    x = torch.randn(256)

    def seconds_for_each(n: int) -> float:
        def f(x: Tensor) -> tuple[Tensor, float]:
            made = [drawn(x[:1]) for _ in range(n)]  # nothing can make it again
            h = x * 1.0
            for each in made:
                h = h * 0.5 + each
            del each
            began = time.thread_time()
            while made:
                made.pop(0)
            return h, (time.thread_time() - began) / n

        return rematfn.offload(f)(x)[1]

    seconds_for_each(100)
    assert seconds_for_each(2400) < 2.5 * seconds_for_each(600)


def test_what_a_guided_call_does_not_need_to_move_stays() -> None:
    """A value that lies there while little else does is read again at once, and not at the peak."""
    w = torch.randn(128, 128, requires_grad=True)

    def f() -> Tensor:
        early = X @ w
        for _ in range(4):  # small, and long enough for it to be moved
            w.sum().sin()
        large = torch.cat([torch.tanh(early)] * 16)
        return large.mean()

    g = rematfn.offload(f)
    expected = gradients(f, [w])
    moves = []
    for _ in range(4):
        assert_bitwise_equal(gradients(g, [w]), expected)
        moves.append(rematfn.stats(g).moves)
    assert moves[0] > max(moves[1:])
