# SPDX-License-Identifier: Apache-2.0
"""Which operators a level sees whole: all that some backend has a kernel for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import Transform, same_as_eager
from torch import Tensor
from torch.nn import functional as F


def kernel_on(operator: str, key: str) -> str:
    """Return what the dispatcher's table says of an operator's kernel on a key."""
    table = torch._C._dispatch_dump_table(operator)
    return next((line for line in table.splitlines() if line.startswith(key + ":")), "")


def test_only_what_has_no_backend_kernel_decomposes_above_a_level() -> None:
    seen = 0
    for operator in torch._C._dispatch_get_all_op_names():
        if not torch._C._dispatch_has_kernel(operator):
            continue
        ours = kernel_on(operator, "CustomRNGKeyId")
        whole = kernel_on(operator, "CPU").endswith(("[kernel]", "[default backend kernel]"))
        assert "rematfn" in ours or not whole, f"{operator}: {ours}"
        seen += whole
    assert seen > 1000


# They have a decomposition, which gives other bits, and nevertheless kernels.
BOTH: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "silu in place": lambda x: F.silu(x * 2, inplace=True),
    "mish": F.mish,
    "mish in place": lambda x: F.mish(x * 2, inplace=True),
    "channel shuffle": lambda x: F.channel_shuffle(x.view(2, 6, 2, 2), 3).view(4, 12),
}


@pytest.mark.parametrize("function", BOTH.values(), ids=BOTH.keys())
@same_as_eager
def test_an_operator_with_a_kernel_and_a_decomposition_runs_the_kernel(
    transform: Transform, function: Callable[[Tensor], Tensor]
) -> Any:
    torch.manual_seed(3)
    x = torch.randn(4, 12, requires_grad=True)
    y = transform(lambda x: function(x.sin()) * 3)(x)
    y.square().sum().backward()
    return y, x.grad


def test_no_operator_becomes_ambiguous_to_other_backends() -> None:
    """A kernel on our key, beside a decomposition, is one that AutogradOther could also mean."""
    ambiguous = []
    for operator in torch._C._dispatch_get_all_op_names():
        if torch._C._dispatch_has_kernel(operator) and "rematfn" in kernel_on(
            operator, "CustomRNGKeyId"
        ):
            ambiguous += [operator] * ("ambiguous" in kernel_on(operator, "AutogradOther"))
    assert ambiguous == []
