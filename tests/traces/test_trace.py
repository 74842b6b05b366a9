# SPDX-License-Identifier: Apache-2.0
"""Recorded traces, and the simulator: what it predicts is what the engine does."""

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import assert_bitwise_equal
from programs_traced import NETWORKS, build
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import rematfn
from rematfn import Trace
from rematfn._inspection.stats import Stats
from rematfn.policies import ON, Manual, Policy, Speed
from rematfn.policies.reference import DTR, LRU, MSPS, Local
from rematfn.testing import EvictEverything

POLICIES = [ON(), DTR(), Local(), LRU(), MSPS(), EvictEverything()]
POLICIES += [Speed(), Manual(), Manual(only=("half",)), Manual(drop=("half",))]
COUNTED = ("operators", "evictions", "replays", "replayed_cost", "replayed_flops")
COUNTED += ("peak_bytes", "min_budget")


def counts(stats: Stats) -> dict[str, Any]:
    return {field: getattr(stats, field) for field in COUNTED}


def stats_of(g: Any, args: tuple[Any, ...]) -> Stats:
    g(*args)
    stats: Stats = rematfn.stats(g)
    return stats


def outcome(run: Callable[[], Stats]) -> Any:
    try:
        return counts(run())
    except rematfn.BudgetError:
        return "does not fit"


def assert_simulated(f: Any, args: tuple[Any, ...], policy: Policy, *fractions: float) -> None:
    trace = rematfn.record(f, *args)
    for fraction in fractions:
        budget = int(fraction * trace.peak_bytes)
        g = rematfn.remat(f, budget, policy=policy)
        assert outcome(functools.partial(stats_of, g, args)) == outcome(
            functools.partial(rematfn.simulate, trace, budget, policy)
        ), fraction


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
@pytest.mark.parametrize("network", NETWORKS)
def test_the_simulator_does_what_the_engine_does(network: str, policy: Policy) -> None:
    assert_simulated(*build(network), policy, 0.7, 0.5, 0.35, 0.25)


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_what_was_evicted_before_its_address_was_asked_for_is_simulated_too(policy: Policy) -> None:
    def f(x: Tensor) -> Tensor:
        kept = [x.sin() + i for i in range(8)]
        asked = kept[0].exp()
        assert sum(y.sum() for y in kept) is not None
        assert asked.data_ptr() != 0
        return torch.stack([(y * asked).sum() for y in kept])

    assert_simulated(f, (torch.linspace(0, 1, 1000),), policy, 1.0, 0.7, 0.5, 0.45)


@pytest.mark.parametrize("network", NETWORKS)
def test_recording_runs_the_function_once_and_changes_nothing(network: str) -> None:
    f, args = build(network)
    expected = f(*args)
    f, args = build(network)
    found: list[Any] = []
    trace = rematfn.record(lambda *args: found.append(f(*args)), *args)
    assert_bitwise_equal(found[0], expected)
    f, args = build(network)
    g = rematfn.remat(f, 1 << 40, policy=ON())
    g(*args)
    stats = rematfn.stats(g)
    assert (trace.operators, trace.peak_bytes) == (stats.operators, stats.peak_bytes)
    assert repr(trace).startswith(f"<Trace of {trace.operators} operators")


@pytest.mark.parametrize("name", ["trace.jsonl", "trace.jsonl.gz"])
@pytest.mark.parametrize("network", NETWORKS)
def test_a_saved_trace_is_the_same_trace(network: str, name: str, tmp_path: Path) -> None:
    f, args = build(network)
    trace = rematfn.record(f, *args)
    trace.save(tmp_path / name)
    loaded = Trace.load(tmp_path / name)
    assert loaded.operators == trace.operators
    assert loaded.constant_bytes == trace.constant_bytes
    for fraction in (0.6, 0.4):
        ours, theirs = (
            outcome(functools.partial(rematfn.simulate, t, fraction, ON())) for t in (trace, loaded)
        )
        if ours != "does not fit":
            # The format has times in whole nanoseconds.
            assert ours.pop("replayed_cost") == pytest.approx(theirs.pop("replayed_cost"), rel=1e-3)
        assert ours == theirs


HAND_WRITTEN = [
    {"INSTRUCTION": "ANNOTATE", "ANNOTATION": "START"},
    {"INSTRUCTION": "CONSTANT", "NAME": "w"},
    {"INSTRUCTION": "MEMORY", "NAME": "w", "MEMORY": "100"},
    {"INSTRUCTION": "CALL", "NAME": "f", "ARGS": ["w"], "RESULT": ["a"], "TIME": "1000"},
    {"INSTRUCTION": "MEMORY", "NAME": "a", "MEMORY": "10"},
    {"INSTRUCTION": "ALIAS", "NAME": "a", "ALIAS": "-1"},
    {"INSTRUCTION": "CALL", "NAME": "t", "ARGS": ["a"], "RESULT": ["b"], "TIME": "7"},
    {"INSTRUCTION": "MEMORY", "NAME": "b", "MEMORY": "10"},
    {"INSTRUCTION": "ALIAS", "NAME": "b", "ALIAS": "0"},
    {"INSTRUCTION": "RELEASE", "NAME": "a"},
    {"INSTRUCTION": "COPY", "DST": "c", "SRC": "b"},
    {"INSTRUCTION": "RELEASE", "NAME": "b"},
    {"INSTRUCTION": "MUTATE", "NAME": "h_", "ARGS": ["c", "w"], "MUTATE": [0], "TIME": "500"},
    {"INSTRUCTION": "COPY_FROM", "DST": "c", "SRC": "w"},
]


def write(path: Path, lines: list[Any]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.mark.parametrize(
    ("line", "names"),
    [
        ({"INSTRUCTION": "RELEASE", "NAME": "nobody"}, "nobody"),
        ({"INSTRUCTION": "JUMP"}, "JUMP"),
        ({"INSTRUCTION": "CALL", "NAME": "f", "ARGS": [], "RESULT": ["z"]}, "ends too early"),
        ({"INSTRUCTION": "CALL", "NAME": "f", "ARGS": [], "RESULT": []}, "TIME"),
        ({}, "INSTRUCTION"),
    ],
)
def test_a_broken_file_is_refused_with_the_line(line: Any, names: str, tmp_path: Path) -> None:
    path = write(tmp_path / "trace.jsonl", [*HAND_WRITTEN, line])
    with pytest.raises(ValueError, match=f"line {len(HAND_WRITTEN) + 1}.*({names})"):
        Trace.load(path)


@pytest.mark.parametrize(
    ("broken", "why"),
    [
        (lambda packed: b"", "it has no line"),
        (lambda packed: packed[: len(packed) // 2], "it ends too early"),
        (lambda packed: packed[:40] + bytes(20) + packed[60:], "it cannot be unpacked"),
        (lambda packed: b"{}" + packed, "it cannot be unpacked"),
    ],
)
def test_a_broken_archive_is_refused(broken: Any, why: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl.gz"
    f, args = build("mlp")
    rematfn.record(f, *args).save(path)
    path.write_bytes(broken(path.read_bytes()))
    with pytest.raises(ValueError, match=f"trace.jsonl.gz, line .*{why}"):
        Trace.load(path)


@pytest.mark.parametrize("network", ["mlp", "convolutions", "unrolled"])
def test_flops_are_those_that_torch_counts(network: str) -> None:
    f, args = build(network)
    with FlopCounterMode(display=False) as counter:
        f(*args)
    assert rematfn.record(f, *args).flops == counter.get_total_flops() > 0


def test_flops_of_a_product_that_is_given_its_result() -> None:
    a, b, out = torch.ones(3, 5), torch.ones(5, 7), torch.empty(3, 7)
    assert rematfn.record(lambda: torch.mm(a, b, out=out).sum()).flops == 2 * 3 * 5 * 7
