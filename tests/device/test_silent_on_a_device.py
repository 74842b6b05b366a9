# SPDX-License-Identifier: Apache-2.0
"""A device whose allocator does not ask for room: an operator that finds no memory runs again."""

import torch
from fake_device import DEVICE
from helpers import assert_bitwise_equal
from test_remat_on_a_device import (  # noqa: F401
    late_kernels,
    test_a_level_without_a_budget_holds_what_the_device_can_hold,
    test_a_program_and_its_gradients_are_those_of_eager,
    test_an_operator_that_draws_draws_once_though_it_is_tried_again,
    test_an_operator_that_writes_is_not_run_twice_for_want_of_memory,
)
from torch import Tensor

import rematfn
from rematfn.testing import MemoryTimeline


def test_room_is_made_for_more_than_the_last_call_has_found() -> None:
    """How much is found depends on data: what comes beyond would not be counted."""

    def found_above(x: Tensor, least: float) -> Tensor:
        kept = [(x * k).sin() for k in range(4)]
        i = (x > least).nonzero()
        return sum(k.square().sum() for k in kept) + i.sum()

    with torch.device(DEVICE):
        x = torch.linspace(0, 1, 4096)
        budget = 11 * x.nbytes // 2
        g = rematfn.remat(found_above, budget)
        for least in (0.999, 0.999, -1.0):
            with MemoryTimeline(DEVICE) as timeline:
                found = g(x, least)
            assert_bitwise_equal(found, found_above(x, least))
            assert timeline.device_peak <= budget
            assert rematfn.stats(g).peak_bytes <= budget
