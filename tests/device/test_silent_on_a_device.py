# SPDX-License-Identifier: Apache-2.0
"""A device whose allocator does not ask for room: an operator that finds no memory runs again."""

from test_remat_on_a_device import (  # noqa: F401
    late_kernels,
    test_a_level_without_a_budget_holds_what_the_device_can_hold,
    test_a_program_and_its_gradients_are_those_of_eager,
    test_an_operator_that_draws_draws_once_though_it_is_tried_again,
    test_an_operator_that_writes_is_not_run_twice_for_want_of_memory,
)
