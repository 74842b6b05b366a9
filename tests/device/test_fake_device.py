# SPDX-License-Identifier: Apache-2.0
"""The fake device itself: it is asynchronous, and its memory tells of misuse."""

import textwrap
from pathlib import Path

import pytest
import torch
from fake_device import DEVICE, delays
from processes import forked

pytestmark = pytest.mark.skipif(DEVICE != "fake", reason="about the fake device itself")


# --- streams and events ---------------------------------------------------------------------------


def test_delays_let_an_unordered_reader_come_first() -> None:
    side = torch.Stream(DEVICE)
    early = rounds = 0
    with delays(seed=4):
        while not 0 < early < rounds:
            rounds += 1
            assert rounds <= 4000, early
            x = torch.zeros(4, device=DEVICE)
            torch.accelerator.synchronize()
            x.add_(1)
            with side:
                seen = x.clone()
            torch.accelerator.synchronize()
            early += seen.tolist() != [1.0] * 4


# --- memory ---------------------------------------------------------------------------------------


def test_fresh_memory_is_full_of_nans() -> None:
    assert torch.empty(9, device=DEVICE).isnan().all()
    x = torch.ones(9, device=DEVICE)
    del x
    assert torch.empty(9, device=DEVICE).isnan().all()
    assert torch.empty(9, pin_memory=True).isnan().all()


def dies(program: str, folder: Path) -> str:
    """Run a program on the device that a signal ends; return what it wrote."""
    text = f"import sys\nsys.path.insert(0, {str(Path(__file__).parents[1])!r})\n"
    text += "import torch, fake_device\nfake_device.load()\n" + textwrap.dedent(program)
    found = forked(folder, {"it": (text, "")})["it"]
    assert found.code == -11, (found.code, found.err)
    return found.err


def test_a_late_reader_of_freed_memory_is_found(tmp_path: Path) -> None:
    told = dies(
        """
        side = torch.Stream("fake")
        x = torch.ones(9, device="fake")
        torch.accelerator.synchronize()
        with fake_device.stopped(side):
            with side:
                x.sin()
            del x  # without record_stream
            torch.accelerator.current_stream().synchronize()
        torch.accelerator.synchronize()
        """,
        tmp_path,
    )
    assert "`aten::sin` on stream 1 touched memory that is free" in told


def test_a_copy_to_pinned_memory_that_died_is_found(tmp_path: Path) -> None:
    told = dies(
        """
        import ctypes
        x, pinned = torch.ones(9, device="fake"), torch.empty(9, pin_memory=True)
        address = pinned.data_ptr()
        pinned.copy_(x, non_blocking=True)
        torch.accelerator.synchronize()
        del pinned
        torch.accelerator.synchronize()
        ctypes.c_float.from_address(address).value
        """,
        tmp_path,
    )
    assert "`the host` on stream -1 touched memory that is free" in told
