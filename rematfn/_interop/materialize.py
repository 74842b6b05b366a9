# SPDX-License-Identifier: Apache-2.0
"""Bytes for what reads them past the dispatcher."""

from __future__ import annotations

import torch

from .. import _C


def materialize(x: torch.Tensor) -> torch.Tensor:
    """Make the bytes of ``x`` resident, and return it.

    Operators find an evicted tensor's bytes by themselves. What goes past the dispatcher
    (a DLPack capsule, C++ code that takes the address) does not, and needs this first.

    Args:
        x: Any tensor. One that no level made, or that is resident, is returned as it is.

    Returns:
        ``x``, the same object.

    Raises:
        BudgetError: The replays do not fit in the budget.
    """
    _C.materialize([x], "materialize(x)")
    return x
