# SPDX-License-Identifier: Apache-2.0
"""The counter that judges budgets must itself be exact."""

import pytest
import torch

from rematfn.testing import MemoryTimeline
from rematfn.testing._timeline import AllocatorEvent

MATRIX = 4_000_000  # bytes of 1000 x 1000 floats


def counted(*events):
    timeline = MemoryTimeline()
    timeline._count([AllocatorEvent(*event) for event in events], start=0)
    return timeline


def test_survivors_are_excluded_from_their_allocation_on():
    x = torch.ones(1000, 1000)
    with MemoryTimeline() as timeline:
        y = x.sin()
        z = y.cos().exp()
    assert timeline.bytes == [MATRIX, 2 * MATRIX, 3 * MATRIX, 2 * MATRIX]
    assert timeline.bytes_excluding_survivors == [0, MATRIX, MATRIX, 0]
    assert timeline.peak_excluding_survivors == MATRIX
    assert timeline.survivors == y.nbytes + z.nbytes


def test_tensor_from_before_entry_may_be_freed_inside():
    held = [torch.ones(1000, 1000)]
    with MemoryTimeline() as timeline:
        held.clear()
        y = torch.ones(1000, 1000)
    assert timeline.peak == timeline.final == y.nbytes


def test_scratch_inside_a_kernel_is_counted():
    x = torch.ones(1000, 1000)
    with MemoryTimeline() as timeline:
        middle = x.median()  # reorders a copy of its argument, which no operator ever returns
    assert middle.nbytes == timeline.final == 4
    assert timeline.peak >= MATRIX


def test_figures_are_there_when_the_block_raises():
    x = torch.ones(1000, 1000)

    def run(timeline):
        with timeline:
            x.sin()
            raise KeyError

    timeline = MemoryTimeline()
    with pytest.raises(KeyError):
        run(timeline)
    assert timeline.peak == MATRIX
    with MemoryTimeline() as again:  # which torch would refuse if a profiler still ran
        x.sin()
    assert again.peak == MATRIX


def test_address_handed_out_twice_ends_its_first_block():
    timeline = counted((1, 0xA, 70), (2, 0xA, 50), (3, 0xB, 10))
    assert timeline.bytes == [70, 50, 60]
    assert timeline.survivors == 60
    assert timeline.bytes_excluding_survivors == [70, 0, 0]


# What it compares with, torch's own count, only a CUDA device has: without one nothing is left.
@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs torch's own count: CUDA only")
def test_counts_of_a_cuda_device_agree_with_torchs_own():
    x = torch.ones(1024, 1024, device="cuda")
    with MemoryTimeline("cuda") as timeline:
        torch.ones(1024)  # on the CPU: not counted
        x.sin().cos()
    assert timeline.peak == timeline.device_peak == 2 * x.nbytes
    assert timeline.final == 0


@pytest.mark.parametrize("other", [MemoryTimeline, lambda: torch.profiler.profile(acc_events=True)])
def test_one_profiler_at_a_time(other):
    with other() as outer:
        with pytest.raises(RuntimeError, match="a profiler runs already"), MemoryTimeline():
            pass
        kept = torch.ones(1000).exp()
    if isinstance(outer, MemoryTimeline):
        assert outer.survivors == kept.nbytes
