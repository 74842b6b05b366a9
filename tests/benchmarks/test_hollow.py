# SPDX-License-Identifier: Apache-2.0
"""Budgets hold as CUDA's own allocator counts: a runtime without hardware stands in for CUDA's."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
HEADERS = Path(torch.__file__).parents[1] / "nvidia/cu13/include"
sys.path.append(str(ROOT / "benchmarks"))

pytestmark = [
    pytest.mark.skipif(not HEADERS.exists(), reason="needs a build of torch for CUDA 13"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU"),
]


def assert_runs(command: list[str], **extra: str) -> None:
    done = subprocess.run(
        [sys.executable, *command],
        capture_output=True, text=True, check=False, timeout=600, env=os.environ | extra,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_budgets_hold_on_cuda_without_a_gpu() -> None:
    assert_runs([str(ROOT / "benchmarks/hollow.py"), "--small"])


def test_the_page_on_cuda_graphs_runs(tmp_path: Path) -> None:
    import hollow

    page = (ROOT / "docs/cuda-graphs.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```$", page, re.M | re.S)
    assert blocks
    program = "".join(blocks) + "assert rematfn.stats(loss_of).replays > 0\n"
    assert_runs(["-c", program], LD_PRELOAD=str(hollow.build(tmp_path)))
