# SPDX-License-Identifier: Apache-2.0
"""The benchmark suite at toy size: what it writes down, and that it would see a broken promise."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "benchmarks"))

pytest.importorskip("matplotlib")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out: Path = tmp_path_factory.mktemp("results")
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "bench.py"), "--quick", "--out", str(out)],
        check=True,
        capture_output=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    return out


def test_the_suite_measures_a_network(folder: Path) -> None:
    record = json.loads((folder / "bench.json").read_text())["networks"]["tiny"]
    assert {"about", "machine", "command", "eager", "budgets", "peers", "simulated"} <= set(record)
    assert {"cpu", "torch", "load_average"} <= set(record["machine"])
    assert record["simulated"] is True, "the simulator predicts what the engine does"
    cells = [(row["budget"], row["policy"]) for row in record["budgets"]]
    assert cells == [(b, p) for b in (0.7, 0.4) for p in ("online", "guided")]
    for row in record["budgets"]:
        assert row["exact"] is True
        assert 0 < row["peak"] <= row["bytes"] < record["eager"]["peak"]
        assert row["replays"] > 0
        assert row["replayed cost"] > 0
        assert row["time ratio"] > 0


def cell(budget: float, cost: float, **more: Any) -> dict[str, Any]:
    nbytes = int(1000 * budget)
    row = {"budget": budget, "bytes": nbytes, "policy": "online", "peak": nbytes, "exact": True}
    return {**row, "replayed cost": cost, **more}


def record(*budgets: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"net": {"budgets": list(budgets), "simulated": True, **more}}


def test_a_broken_promise_is_seen() -> None:
    from report import broken_promises

    assert broken_promises(record(cell(0.5, 0.1), cell(0.4, 0.2))) == []
    (broken,) = broken_promises(record(cell(0.5, 0.1, peak=501)))
    assert "501 in 500" in broken
    (broken,) = broken_promises(record(cell(0.5, 0.1, exact=False)))
    assert "bitwise" in broken
    (broken,) = broken_promises(record({"budget": 0.1, "policy": "online", "needs": 9, "bytes": 1}))
    assert "advice" in broken
    peer = {"peer": "other", "peak": 300, "ours": {"guided": {"peak": 301, "exact": True}}}
    (broken,) = broken_promises(record(cell(0.5, 0.1), peers=[peer]))
    assert "guided beside other" in broken
    (broken,) = broken_promises(record(cell(0.5, 0.1), simulated="3 replays, not 4"))
    assert "3 replays" in broken


def test_a_summary_has_the_peers_that_save_memory() -> None:
    from summary import peers

    def peer(name: str, peak: int, **more: Any) -> dict[str, Any]:
        ours = {"guided": {"replayed cost": 0.1, "time ratio": 1.1}}
        row = {"peer": name, "peak": peak, "of eager's": peak / 1000, "exact": True, "ours": ours}
        return {**row, "time ratio": 1.2, **more}

    found = [peer("saves", 300), peer("saves nothing", 1000), {"peer": "x", "refused": "why"}]
    (row,) = peers(record(peers=found, eager={"peak": 1000}))
    assert (row["tool"], row["peak"]) == ("saves", 0.3)
    assert (row["time, tool"], row["time, rematfn"]) == (1.2, 1.1)
