# SPDX-License-Identifier: Apache-2.0
"""Which operators a level sees whole: all that some backend has a kernel for."""

import torch


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


def test_no_operator_becomes_ambiguous_to_other_backends() -> None:
    """A kernel on our key, beside a decomposition, is one that AutogradOther could also mean."""
    ambiguous = []
    for operator in torch._C._dispatch_get_all_op_names():
        if torch._C._dispatch_has_kernel(operator) and "rematfn" in kernel_on(
            operator, "CustomRNGKeyId"
        ):
            ambiguous += [operator] * ("ambiguous" in kernel_on(operator, "AutogradOther"))
    assert ambiguous == []
