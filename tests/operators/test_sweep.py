# SPDX-License-Identifier: Apache-2.0
"""A slice of the sweep over torch's operator database: every operator, on its first sample.

Values and gradients of each, and one in four of the further kinds. `make sweep` is all of it: every
sample, in every dtype and kind. And the sweep itself: it can fail, and outlives an operator that
kills its process.
"""

import sys
from collections.abc import Callable
from typing import Any

import optree
import pytest
import torch
from helpers import EXHAUSTIVE
from sweep import verdicts
from sweep.kinds import KINDS
from sweep.page import page
from sweep.run import Row, Worker
from sweep.samples import DTYPES, dtypes_of, operators, samples
from sweep.verdicts import FAILED, REFUSED, filled_memory, judge

# --- a slice of it --------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore")  # torch's own, about its operators
@pytest.mark.parametrize("name", [name for name, info in operators().items() if dtypes_of(info)])
def test_an_operator_is_bitwise_eagers_under_every_transform(name: str) -> None:
    info, dtype = operators()[name], dtypes_of(operators()[name])[0]
    first = list(operators()).index(name)
    chosen = [*KINDS.values()] if EXHAUSTIVE else [*KINDS.values()][first % 4 :: 4]
    chosen += [kind for kind in (KINDS["forward"], KINDS["backward"]) if kind not in chosen]
    failures = []
    with filled_memory(info):
        for requires_grad in (False, True):
            kinds = [
                kind
                for kind in chosen
                if kind.requires_grad == requires_grad and kind.applies(info, DTYPES[dtype])
            ]
            if not kinds:
                continue
            sample = next(samples(info, DTYPES[dtype], requires_grad))
            for kind in kinds:
                verdict, why = judge(info, kind, sample)
                if verdict == FAILED:
                    failures.append(f"{kind.name}: {why}")
    assert not failures, "\n".join(failures)


# --- the sweep itself ----------------------------------------------------------------------------


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
    command, worker._command = worker._command, [sys.executable, "-c", "input()"]
    (lost,) = worker.sweep("kills its process")
    worker._command = command
    assert lost.failed == 1
    assert "died" in lost.failure
    (found,) = worker.sweep("sin")
    assert found.passed > 0
    assert found.failed == 0
    worker.stop()


def test_the_page_has_the_counts() -> None:
    rows = [Row("sin", "forward", "float32", passed=7, refused=2)]
    rows += [Row("cos", "forward", "float64", failed=1, passed=1, failure="why")]
    text = page(rows, seconds=60, jobs=1)
    assert "| forward | 7 (2) | 1 |" in text
    assert "- `cos`, forward, float64: why (1 of 2)" in text
