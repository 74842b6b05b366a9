# SPDX-License-Identifier: Apache-2.0
"""Any program on the device, under any levels, with copies and kernels that are late, is its twin.

The twin is eager's, on the same device. What is compared is read from it.
"""

import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar

import pytest
import torch
from fake_device import DEVICE, delays
from helpers import EXHAUSTIVE
from torch import Tensor
from whole.test_stateful import Tier, Twins, search

import rematfn
from rematfn import _C

SEEDS = itertools.count(1)


class OnADevice(Twins):
    tiers: ClassVar[dict[str, Tier]] = {
        "large": rematfn.Host("1MiB"),
        "small": rematfn.Host(20_000),
    }

    def __init__(self) -> None:
        super().__init__()
        self.elsewhere.shutdown()
        self.elsewhere = ThreadPoolExecutor(
            1, initializer=torch.set_default_device, initargs=(DEVICE,)
        )
        self.late = delays(next(SEEDS), most=50)
        self.late.__enter__()

    def random_state(self) -> Tensor:
        return self.elsewhere.submit(torch.get_device_module(DEVICE).get_rng_state).result()

    def set_random_state(self, state: Tensor) -> None:
        torch.get_device_module(DEVICE).set_rng_state(state)

    def teardown(self) -> None:
        try:
            super().teardown()
        finally:
            self.late.__exit__(None, None, None)


@pytest.fixture(autouse=True)
def on_the_device(costs_at_random: None) -> Iterator[None]:
    torch.set_num_threads(1)
    with torch.device(DEVICE):
        yield
    assert _C.stack_depth() == 0


def test_any_program_under_any_levels_is_its_twin() -> None:
    moved = sum(tier.bytes_out for tier in OnADevice.tiers.values())
    count = 300 if EXHAUSTIVE else 40
    search(OnADevice, max_examples=count, stateful_step_count=30, derandomize=True)
    assert sum(tier.bytes_out for tier in OnADevice.tiers.values()) > moved
