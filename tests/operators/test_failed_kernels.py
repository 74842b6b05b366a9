# SPDX-License-Identifier: Apache-2.0
"""In-place kernels that raise in the middle: what they have written by then stays written."""

from typing import Any

import pytest
import torch
from helpers import EVERYTHING, Transform, assert_bitwise_equal, untransformed
from torch import Tensor

import rematfn


@torch.library.custom_op("rematfn_tests::write_half", mutates_args={"x"})
def write_half(x: Tensor) -> None:
    x[: len(x) // 2] = 5.0
    raise ValueError("on purpose")


def half_written(x: Tensor) -> Tensor:
    h = x.sin()
    before = h.cos()
    with pytest.raises(ValueError, match="on purpose"):
        write_half(h)
    return h * 2 + before


def constant_half_written(x: Tensor) -> Tensor:
    c = torch.tensor([1.0, 2.0, 3.0, 4.0])
    y = x * c
    with pytest.raises(ValueError, match="on purpose"):
        write_half(c)
    return y + c


def never_written(x: Tensor) -> Tensor:
    h = x.sin()
    with pytest.raises(RuntimeError, match="must match the size"):
        h.add_(torch.ones(3, 4, 5))
    return h * h.cos()


def written_again(x: Tensor) -> Tensor:
    h = x.sin()
    with pytest.raises(IndexError):
        h[torch.tensor([99])] = 1.0
    h.view(-1).mul_(2)
    for _ in range(4):
        h = h.sin() * 1.1
    return h


FUNCTIONS = [half_written, constant_half_written, never_written, written_again]


@pytest.mark.parametrize("transform", [rematfn.remat, EVERYTHING])
@pytest.mark.parametrize("f", FUNCTIONS)
def test_what_a_failed_kernel_has_written_stays(f: Any, transform: Transform) -> None:
    x = torch.tensor([0.1, 0.2, 0.3, 0.4])
    assert_bitwise_equal(transform(f)(x), untransformed(f)(x))
    rematfn.testing.check()


@pytest.mark.parametrize("f", FUNCTIONS)
def test_a_call_after_one_with_a_failed_kernel_has_a_plan(f: Any) -> None:
    x = torch.tensor([0.1, 0.2, 0.3, 0.4])
    g = rematfn.remat(f, 1.0)
    for _ in range(3):
        assert_bitwise_equal(g(x), f(x))
    assert rematfn.stats(g).call == "guided"
    trace = rematfn.record(f, x)
    assert rematfn.simulate(trace, trace.peak_bytes).peak_bytes == trace.peak_bytes


def test_a_write_that_is_refused_after_its_copy_was_made() -> None:
    """The constant has its bytes, and lineage a copy: the write is not repeated, and not lost."""
    refused = []

    def f(x: Tensor) -> Tensor:
        c = torch.tensor([1.0, 2.0, 3.0, 4.0])
        y = x * c
        for step in (torch.ones(3, 4, 5), torch.ones(4)):
            try:
                c.add_(step)
            except RuntimeError as error:
                refused.append(error)
        return y * c + c.sin()

    x = torch.tensor([0.1, 0.2, 0.3, 0.4])
    assert_bitwise_equal(EVERYTHING(f)(x), f(x))
    assert len(refused) == 2
    rematfn.testing.check()
