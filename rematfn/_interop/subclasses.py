# SPDX-License-Identifier: Apache-2.0
"""What a tensor subclass holds. The core asks, since it knows no Python."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


def inner_tensors(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors that a subclass with ``__torch_dispatch__`` holds.

    A subclass that can be flattened says so itself; of any other, the attributes are looked at.
    """
    subclass: Any = tensor
    if is_traceable_wrapper_subclass(subclass):
        names, _ = subclass.__tensor_flatten__()
        held = [getattr(subclass, name) for name in names]
    else:
        held = list(vars(subclass).values())
    return [t for t in held if isinstance(t, torch.Tensor) and t is not tensor]
