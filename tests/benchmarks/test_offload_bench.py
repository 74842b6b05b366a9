# SPDX-License-Identifier: Apache-2.0
"""The benchmark of moving at toy size: what it writes down, and the cells that it names."""

from __future__ import annotations

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


def test_a_quick_run_measures_each_way_and_the_throttled_disk(tmp_path: Path) -> None:
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "offload.py"), "--quick", "--out", tmp_path],
        check=True,
        capture_output=True,
        env={**os.environ, "PYTHONPATH": path},
        timeout=900,
    )
    results = json.loads((tmp_path / "offload.json").read_text())
    peers = [row for row in results["tiny"]["rows"] if "MiB" not in row]
    rows = [row for row in results["tiny"]["rows"] if "MiB" in row]
    assert [row["way"] for row in peers] == [
        "checkpoint, each block",
        "save_on_cpu",
        "torchtune, OffloadActivations",
    ]
    assert all("refused" in row or row["exact"] is True for row in peers)
    assert [row["way"] for row in rows] == ["remat", "offload", "hybrid"]
    throttled = results["link"]["rows"]
    for row in rows + throttled:
        assert row["exact"] is True
        assert row["time / eager"] > 0
        assert 0 < row["peak / budget"] <= 1
    remat, offload, _ = rows
    assert remat["replays"] > 0
    assert "MiB out" not in remat
    assert offload["replays"] == 0
    assert offload["MiB out"] > 0
    assert offload["bytes / bandwidth, s"] > 0
    assert [row["MB/s"] for row in throttled] == [0, 1e2, 1e5]
    assert all(row["foretold, s"] > 0 for row in throttled[1:])
    assert (tmp_path / "offload-link.png").stat().st_size > 5000


def test_a_hybrid_is_compared_with_the_better_of_its_parts_round_by_round() -> None:
    from moving import beside_better

    # The machine takes twice as long in the second round.
    seconds = {
        "eager": [1.0, 2.0, 1.0],
        "remat": [1.3, 2.6, 1.3],
        "offload": [1.1, 2.2, 9.9],
        "hybrid": [1.21, 2.42, 1.1],
    }
    assert beside_better(seconds) == {"time / better": pytest.approx(1.1)}
    del seconds["offload"]
    assert beside_better(seconds) == {"time / better": pytest.approx(1.21 / 1.3)}
    del seconds["remat"]
    assert beside_better(seconds) == {}


def test_a_hybrid_slower_than_its_parts_is_named() -> None:
    from offload import slower

    def rows(ratio: float) -> list[dict[str, Any]]:
        hybrid = {"budget": 0.3, "MiB": 1.0, "way": "hybrid", "time / better": ratio}
        return [{"budget": 0.3, "MiB": 1.0, "way": "remat", "time / eager": 1.0}, hybrid]

    assert slower({"net": {"rows": rows(1.04)}}) == []
    assert slower({"net": {"rows": rows(1.2)}}) == ["- net at 0.3: 1.200"]
    assert slower({"net": {"rows": rows(1.2)[:1]}}) == []
