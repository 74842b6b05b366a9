# SPDX-License-Identifier: Apache-2.0
"""Scores and the choice of a victim: numbers only, built without torch but for `c10/util`."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

INCLUDES = Path(torch.__file__).parent / "include"
CORE = Path(__file__).parents[2] / "csrc"


def test_scores_and_choices_are_those_worked_out_by_hand(tmp_path: Path) -> None:
    compiler = os.environ.get("CXX", "c++")
    if not shutil.which(compiler):
        pytest.skip("needs a C++ compiler")
    program = tmp_path / "scores_model"
    sources = [Path(__file__).with_name("scores_model.cpp"), CORE / "policy" / "eviction.cpp"]
    includes = [f"-I{CORE}", f"-isystem{INCLUDES}"]
    subprocess.run(
        [compiler, "-std=c++20", "-O1", *includes, *map(str, sources), "-o", str(program)],
        check=True,
    )
    env = {k: v for k, v in os.environ.items() if k != "LD_PRELOAD"}
    found = subprocess.run([str(program)], capture_output=True, text=True, timeout=120, env=env)
    assert found.returncode == 0, found.stdout + found.stderr
