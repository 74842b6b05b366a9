# SPDX-License-Identifier: Apache-2.0
"""The benchmark of what is foretold, at toy size: what it writes down."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def test_it_writes_what_was_foretold_beside_what_was_measured(tmp_path: Path) -> None:
    fits, does_not = _rows_of("foretold", ["--repeats", "1"], tmp_path)
    assert fits["exact"] is True
    assert fits["foretold"] >= 1
    assert fits["foretold / measured"] == fits["foretold"] / fits["measured"]
    assert does_not["foretold"] == does_not["measured"] == "does not fit"
    assert "does not fit" in (tmp_path / "foretold.md").read_text()


def test_it_writes_what_plans_that_move_foretold(tmp_path: Path) -> None:
    rows = _rows_of("elapsed", ["--quick", "--calls", "8"], tmp_path)
    assert [row["way"] for row in rows] == ["offload", "hybrid"] * 2
    for row in rows[:2]:
        assert row["foretold, s"] > row["waiting foretold, s"] > 0
        assert row["foretold / measured"] > 0
    assert [row["foretold, s"] for row in rows[2:]] == ["does not fit"] * 2
    assert "| foretold / measured | 2 |" in (tmp_path / "elapsed.md").read_text()


def _rows_of(benchmark: str, options: list[str], folder: Path) -> list[dict[str, Any]]:
    """Run it on the tiny network, in a budget that fits and one that does not."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    script = str(ROOT / "benchmarks" / f"{benchmark}.py")
    arguments = ["--networks", "tiny", "--budgets", "0.5", "0.0001", "--out", str(folder)]
    subprocess.run(
        [sys.executable, script, *arguments, *options],
        check=True,
        capture_output=True,
        env={**os.environ, "PYTHONPATH": path},
        timeout=300,
    )
    results = json.loads((folder / f"{benchmark}.json").read_text())
    rows: list[dict[str, Any]] = results["tiny"]["rows"]
    return rows
