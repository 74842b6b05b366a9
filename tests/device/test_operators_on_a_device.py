# SPDX-License-Identifier: Apache-2.0
"""A sample of torch's operators on the device: all moves to the host, and comes back.

Of those that the device does not have nothing is said. And which of them race there.
"""

from collections.abc import Callable
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
from rematfn import _C
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


# --- what races ----------------------------------------------------------------------------------


def is_kept(compute: Callable[[], Tensor]) -> bool:
    """Return whether what is computed cannot be evicted."""
    found: list[bool] = []

    def f() -> Tensor:
        y = compute()
        found.append(not _C.testing.evict(y))
        return y * 2

    with torch.device(DEVICE):
        rematfn.remat(f, "1GiB")()
    return found[0]


def image() -> Tensor:
    return torch.linspace(0, 1, 2 * 16).view(1, 2, 4, 4)


def filters() -> Tensor:
    return torch.linspace(0, 1, 2 * 2 * 3 * 3).view(2, 2, 3, 3)


def rows() -> Tensor:
    return torch.arange(8) % 3


def convolved(transposed: bool) -> Tensor:
    return torch.ops.aten.convolution(
        image(), filters(), None, [1, 1], [0, 0], [1, 1], transposed, [0, 0], 1
    )


RACING: dict[str, Callable[[], Tensor]] = {
    "sums by index": lambda: torch.zeros(3).index_add(0, rows(), torch.ones(8)),
    "sums by index, in place": lambda: torch.zeros(3).scatter_add_(0, rows(), torch.ones(8)),
    "a running sum": lambda: torch.linspace(0, 1, 8).cumsum(0),
    "a backward of a family": lambda: torch.ops.aten.upsample_bilinear2d_backward(
        image(), [4, 4], [1, 2, 2, 2], False
    ),
    "a transposed convolution": lambda: convolved(True),
}


@pytest.mark.parametrize("compute", RACING.values(), ids=RACING.keys())
def test_what_races_on_a_device_is_kept_but_in_the_deterministic_mode(
    compute: Callable[[], Tensor],
) -> None:
    assert is_kept(compute)
    try:
        torch.use_deterministic_algorithms(True, warn_only=True)
        assert is_kept(compute)
        torch.use_deterministic_algorithms(True)
        assert not is_kept(compute)
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_convolution_is_kept_where_another_kernel_may_be_found_for_its_replay() -> None:
    assert not is_kept(lambda: convolved(False))
    assert not is_kept(lambda: image().relu())
    with torch.backends.cudnn.flags(benchmark=True):
        assert is_kept(lambda: convolved(False))
        assert not is_kept(lambda: image().relu())
    with torch.backends.cudnn.flags(benchmark=True, deterministic=True):
        assert not is_kept(lambda: convolved(False))
        assert not is_kept(lambda: convolved(True))
