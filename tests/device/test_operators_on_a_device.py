# SPDX-License-Identifier: Apache-2.0
"""A sample of torch's operators on the device: all moves to the host, and comes back.

Of those that the device does not have nothing is said.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fake_device import DEVICE, delays
from helpers import EXHAUSTIVE, Transform, assert_bitwise_equal, untransformed
from sweep.kinds import KINDS, Kind
from sweep.samples import DTYPES, Sample, dtypes_of, operators, samples
from sweep.verdicts import filled_memory
from torch import Tensor

import rematfn
from rematfn.testing import EvictEverything

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own, about its operators

HOST = rematfn.Host("64MiB")
MOVED: list[str] = []
EVERY = 5 if EXHAUSTIVE else 25  # of so many operators one


def moving(f: Any) -> Any:
    return rematfn.offload(f, to=HOST, policy=EvictEverything())


def on_the_device(sample: Sample) -> Sample:
    leaves = [
        leaf.detach().to(DEVICE).requires_grad_(leaf.requires_grad)
        if isinstance(leaf, Tensor)
        else leaf
        for leaf in sample.leaves
    ]
    return Sample(sample.call, leaves, sample.structure)


NAMES = [name for name, info in operators().items() if dtypes_of(info)][::EVERY]


def run(info: Any, dtype: torch.dtype, kind: Kind, transform: Transform) -> Any:
    torch.manual_seed(20)
    sample = next(samples(info, dtype, kind.requires_grad))
    with torch.device(DEVICE):
        found = kind.program(info, on_the_device(sample), transform)
    torch.accelerator.synchronize()
    return found


@pytest.mark.parametrize("name", NAMES)
def test_an_operator_is_bitwise_eager_s_when_all_moves(name: str) -> None:
    info, dtype = operators()[name], DTYPES[dtypes_of(operators()[name])[0]]
    for kind in (KINDS["forward"], KINDS["backward"]):
        if not kind.applies(info, dtype):
            continue
        with filled_memory(info):
            try:
                expected = run(info, dtype, kind, untransformed)
            except Exception as error:
                pytest.skip(f"not on this device: {type(error).__name__}")
            with delays(seed=1, most=50):
                found = run(info, dtype, kind, moving)
        assert_bitwise_equal(found, expected)
    MOVED.append(name)


def test_most_operators_have_moved() -> None:
    assert len(MOVED) > len(NAMES) / 2
    assert HOST.bytes_out > 0
