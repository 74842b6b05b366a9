# SPDX-License-Identifier: Apache-2.0
"""The benchmark of what is foretold, at toy size: what it writes down."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_it_writes_what_was_foretold_beside_what_was_measured(tmp_path: Path) -> None:
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    options = ["--networks", "tiny", "--budgets", "0.5", "0.0001", "--repeats", "1"]
    subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "foretold.py"), *options, "--out", tmp_path],
        check=True,
        capture_output=True,
        env={**os.environ, "PYTHONPATH": path},
        timeout=300,
    )
    fits, does_not = json.loads((tmp_path / "foretold.json").read_text())["tiny"]["rows"]
    assert fits["exact"] is True
    assert fits["foretold"] >= 1
    assert fits["foretold / measured"] == fits["foretold"] / fits["measured"]
    assert does_not["foretold"] == does_not["measured"] == "does not fit"
    assert "does not fit" in (tmp_path / "foretold.md").read_text()
