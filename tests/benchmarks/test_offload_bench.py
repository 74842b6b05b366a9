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
        timeout=300,
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


def test_a_hybrid_slower_than_its_parts_is_named() -> None:
    from offload import slower

    def rows(remat: float, offload: float, hybrid: float) -> list[dict[str, Any]]:
        times = {"remat": remat, "offload": offload, "hybrid": hybrid}
        return [
            {"budget": 0.3, "MiB": 1.0, "way": way, "time / eager": time}
            for way, time in times.items()
        ]

    assert slower({"net": {"rows": rows(1.3, 1.1, 1.15)}}) == []
    (found,) = slower({"net": {"rows": rows(1.3, 1.1, 1.2)}})
    assert found == "- net at 0.3: 1.200 beside 1.100"
    assert slower({"net": {"rows": rows(1.3, 1.1, 1.2)[:2]}}) == []
