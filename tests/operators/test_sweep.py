# SPDX-License-Identifier: Apache-2.0
"""The sweep itself: it can fail, is strict, and outlives an operator that kills its process."""

from collections.abc import Callable
from typing import Any

import optree
import pytest
import torch
from sweep import expectations, verdicts
from sweep.expectations import disagreements
from sweep.kinds import KINDS
from sweep.page import page
from sweep.run import Row, Worker
from sweep.samples import operators, samples
from sweep.verdicts import FAILED, REFUSED, judge


def verdict(operator: str, kind: str = "forward") -> tuple[str, str]:
    info = operators()[operator]
    requires_grad = KINDS[kind].requires_grad
    return judge(info, KINDS[kind], next(samples(info, torch.float32, requires_grad)))


def use(monkeypatch: pytest.MonkeyPatch, change: Callable[[torch.Tensor], Any]) -> None:
    """Have what the sweep compares with eager be this change of the results."""

    def transform(f: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args: optree.tree_map(change, f(*args))

    monkeypatch.setattr(verdicts, "EVERY", lambda run: run(transform))


@pytest.mark.parametrize("kind", ["forward", "in-place", "out=", "backward", "vmap(remat)"])
def test_one_bit_fails(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, lambda x: x.mul(1 + 2**-22))
    found, why = verdict("sin", kind)
    assert found == FAILED
    assert "differ" in why


def test_what_torch_refuses_has_to_be_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert verdict("nonzero", "vmap(remat)")[0] == REFUSED
    monkeypatch.setattr(verdicts, "EVERY", lambda run: None)
    assert verdict("nonzero", "vmap(remat)")[0] == FAILED


def test_an_operator_that_kills_its_process_fails_alone() -> None:
    worker = Worker(["forward"], ["float32"])
    (lost,) = worker.sweep("no such operator")
    assert lost.failed == 1
    assert "died" in lost.failure
    (found,) = worker.sweep("sin")
    assert found.passed > 0
    assert found.failed == 0
    worker.stop()


def test_exceptions_are_strict(monkeypatch: pytest.MonkeyPatch) -> None:
    listed = ("sin", "forward", "float32")
    monkeypatch.setattr(expectations, "EXCEPTIONS", {listed: "a reason"})
    failing, passing = Row(*listed, failed=1, failure="why"), Row(*listed, passed=1)
    other = Row("cos", "forward", "float32", failed=1, failure="why")
    assert disagreements([failing], complete=True) == []
    assert disagreements([passing], complete=False)
    assert disagreements([], complete=True)
    assert disagreements([], complete=False) == []
    assert disagreements([failing, other], complete=True) == ["cos, forward, float32: why"]


def test_the_page_has_the_counts() -> None:
    rows = [Row("sin", "forward", "float32", passed=7, refused=2)]
    rows += [Row("cos", "forward", "float64", failed=1, passed=1, failure="why")]
    text = page(rows, seconds=60, jobs=1)
    assert "| forward | 7 (2) | 1 |" in text
    assert "- `cos`, forward, float64: why (1 of 2)" in text
