# SPDX-License-Identifier: Apache-2.0
"""The disk tier apart from tensors: what is moved to a file comes back, whatever fails."""

import subprocess
from pathlib import Path

import pytest
from models import CORE, compile_model, run_all, run_model

HERE = Path(__file__).parent
ACCOUNT = [CORE / "memory" / name for name in ("tier_account.cpp", "stretches.cpp")]
TIER = [
    *(CORE / "memory" / name for name in ("scratch_file.cpp", "transfers.cpp")),
    *(CORE / "tensors" / name for name in ("disk.cpp", "shared_bytes.cpp")),
    *(CORE / "base" / name for name in ("errors.cpp", "interpreter.cpp")),
]
DISKS = ("ext2/ext3", "xfs", "btrfs", "overlayfs", "f2fs", "zfs")


def folder_on_a_disk(*candidates: Path) -> Path:
    """Return the first that is on one: a temporary folder often lies in memory."""
    for path in candidates:
        kind = subprocess.run(
            ["stat", "--file-system", "--format=%T", str(path)], capture_output=True, text=True
        )
        if kind.stdout.strip() in DISKS:
            return path
    pytest.skip("needs a folder on a disk")


def test_the_account_is_a_naive_one() -> None:
    run_model(compile_model("account", [HERE / "account_model.cpp", *ACCOUNT]))


# One test, so that not every process compiles.
def test_what_is_moved_to_a_disk_comes_back(tmp_path: Path) -> None:
    sources = [*sorted(HERE.glob("disk_*.cpp")), *TIER, *ACCOUNT]
    program = compile_model("disk", sources, with_c10=True)
    run_all(program, str(folder_on_a_disk(tmp_path, HERE)))
