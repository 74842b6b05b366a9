# SPDX-License-Identifier: Apache-2.0
"""`explain`: what it says of programs whose behaviour is known."""

import re
from typing import Any

import pytest
import torch
from test_journal import Net, chain, line_of
from torch import Tensor

import rematfn
from rematfn import _C
from rematfn._inspection.explain import Explanation

KIB = 1024


def explained(f: Any, budget: Any, *args: Any, **options: Any) -> Explanation:
    g = rematfn.remat(f, budget, where=True, **options)
    g(*args)
    return rematfn.explain(g)


def test_modules_and_lines_hold_all_that_was_made() -> None:
    net, x = Net(), torch.randn(8, 16)
    g = rematfn.remat(net, "12KiB", where=True)
    g(x).sum().backward()
    why = rematfn.explain(g)
    assert {m.name for m in why.modules} >= {f"Net.blocks.{i}.up" for i in range(4)}
    for parts in (why.modules, why.lines, why.operators):
        assert sum(part.replays for part in parts) == why.stats.replays
        assert sum(part.evictions for part in parts) == why.stats.evictions
        assert sum(part.replayed_cost for part in parts) == pytest.approx(why.stats.replayed_cost)
        assert why.stats.replays > 0
        made = [part.made_bytes for part in parts]
        assert made == sorted(made, reverse=True)
        assert sum(made) == sum(line.made_bytes for line in why.lines)


def test_the_operator_that_sets_the_floor() -> None:
    def f(x: Tensor) -> Tensor:
        wide = x.repeat(8)  # the widest
        return wide.sum() + x.sin().sum()

    why = explained(f, "64KiB", torch.ones(KIB))
    needs = sorted(why.operators, key=lambda operator: -operator.needed_bytes)
    assert needs[0].needed_bytes == why.stats.min_budget > 8 * 4 * KIB
    assert needs[0].place.line == line_of("# the widest", __file__)
    assert needs[0].input_bytes == 0
    assert needs[1].place.line == line_of("return wide.sum() + x.sin().sum()", __file__)
    assert needs[1].input_bytes == 8 * 4 * KIB


def test_what_cannot_go_and_why() -> None:
    def f(x: Tensor, counter: Tensor) -> Tensor:
        y, z = x * counter, x + counter
        assert all(map(_C.testing.evict, (y, z)))
        counter.add_(1)  # what it was is copied first: the two are larger
        return y.sin().exp() + z

    why = explained(f, "1MiB", torch.ones(KIB), torch.ones(KIB))
    reasons = {s.reason: s.nbytes for s in why.stayed}
    assert reasons["cannot be dropped: a copy of what the program overwrites"] == 4 * KIB

    def g(x: Tensor) -> Tensor:
        kept = rematfn.keep(x.sin())
        return kept.cos().exp() + kept

    why = explained(g, "1MiB", torch.ones(KIB))
    assert any("could go" in s.reason or "read by" in s.reason for s in why.stayed)


def test_evictions_say_why() -> None:
    why = explained(torch.func.grad(chain), 5 * 4 * KIB, torch.linspace(0, 1, KIB))
    (sines,) = [o for o in why.operators if o.operator == "sin"]
    assert sines.place.line == line_of("x = x.sin()")
    assert sines.evicted_bytes == sines.evictions * 4 * KIB > 0
    assert sines.unread == 0  # of a first call nothing is known
    assert sines.score is not None
    assert sines.score > 0


def test_what_is_in_use_at_the_peak_adds_up_to_it() -> None:
    def f(x: Tensor) -> Tensor:
        return x.sin().softmax(0).sort().values.sum()

    for budget in ("1MiB", None):
        why = explained(f, budget, torch.linspace(0, 1, KIB))
        assert sum(s.nbytes for s in why.stayed) == why.stats.peak_bytes
    step = torch.func.grad(lambda w, x: torch.conv2d(x, w, padding=1).relu().square().sum())
    why = explained(step, "8MiB", torch.randn(32, 16, 3, 3), torch.randn(2, 16, 32, 32))
    assert sum(s.nbytes for s in why.stayed) == why.stats.peak_bytes


def test_the_text() -> None:
    net, x = Net(), torch.randn(8, 16)
    g = rematfn.remat(net, "12KiB", where=True)
    g(x).sum().backward()
    text = str(rematfn.explain(g, rows=3))
    assert "Net.blocks.*.up" in text
    assert "Evicted" in text
    assert "remat(Net, budget=12 KiB)" in text
    assert re.search(r"tanh at test_journal\.py:\d+ \(Net\.blocks\.\d\)", text)
    assert max(map(len, text.splitlines())) < 160
    longest = rematfn.explain(g)
    assert len(longest.modules) > 3
