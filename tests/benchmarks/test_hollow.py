# SPDX-License-Identifier: Apache-2.0
"""Budgets hold as CUDA's own allocator counts: a runtime without hardware stands in for CUDA's."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "benchmarks/hollow.py"
HEADERS = Path(torch.__file__).parents[1] / "nvidia/cu13/include"


@pytest.mark.skipif(not HEADERS.exists(), reason="needs a build of torch for CUDA 13")
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_budgets_hold_on_cuda_without_a_gpu() -> None:
    command = [sys.executable, str(SCRIPT), "--small"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr
