# SPDX-License-Identifier: Apache-2.0
"""Operators, dtypes and samples, from torch's database, and fresh copies of a sample's tensors."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import optree
import torch
from torch import Tensor

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torch.testing._internal import common_methods_invocations as database
    from torch.testing._internal import common_utils
    from torch.testing._internal.opinfo import core

# torch looks in the frames around for a test of its own, twice for each list of samples: most of
# the sweep's time.
common_utils.extract_test_fn = core.extract_test_fn = lambda: None

DTYPES = {
    "float32": torch.float32,
    "float64": torch.float64,
    "complex64": torch.complex64,
    "int64": torch.int64,
    "bool": torch.bool,
    "float8_e4m3fn": torch.float8_e4m3fn,  # for operators that have none of the others
}

FOREACH = (
    database.foreach_unary_op_db,
    database.foreach_binary_op_db,
    database.foreach_pointwise_op_db,
    database.foreach_reduce_op_db,
    database.foreach_other_op_db,
)

# Operators that give what happens to be in uninitialised memory, or read it, and why. They are
# compared with torch filling such memory, as it does when deterministic algorithms are asked for.
UNINITIALISED = {
    "empty": "its contents are undefined",
    "empty_like": "its contents are undefined",
    "empty_permuted": "its contents are undefined",
    "empty_strided": "its contents are undefined",
    "new_empty": "its contents are undefined",
    "new_empty_strided": "its contents are undefined",
    "resize_": "the contents it adds are undefined",
    "resize_as_": "the contents it adds are undefined",
    "linalg.lstsq": "LAPACK's gelsy is given an uninitialised vector of pivots, and reads it",
    "linalg.lstsq.grad_oriented": "LAPACK's gelsy is given an uninitialised vector of pivots",
}


def name_of(info: Any) -> str:
    """Return the operator's name, and that of the database's entry where it has several."""
    return f"{info.name}.{info.variant_test_name}" if info.variant_test_name else info.name


@functools.cache
def operators() -> dict[str, Any]:
    """Return the database, by name."""
    entries = [*database.op_db, *(info for entries in FOREACH for info in entries)]
    named = {name_of(info): info for info in entries}
    assert len(named) == len(entries), "a name stands for two entries"
    return named


def dtypes_of(info: Any) -> list[str]:
    """Return the names of the dtypes to sweep; none, for an operator that a CPU does not have."""
    supported = info.supported_dtypes("cpu")
    *common, float8 = (name for name, dtype in DTYPES.items())
    found = [name for name in common if DTYPES[name] in supported]
    return found or [float8] * (DTYPES[float8] in supported)


@dataclasses.dataclass
class Sample:
    """The arguments of one call, and what to call."""

    call: Callable[..., Any]
    leaves: list[Any]
    structure: Any

    @classmethod
    def of(cls, call: Callable[..., Any], sample: Any) -> Sample:
        arguments = (sample.input, sample.args, sample.kwargs)
        return cls(call, *optree.tree_flatten(arguments, none_is_leaf=True))

    def tensors(self) -> list[Tensor]:
        """Return copies of the tensors, which nobody else has."""
        copies: dict[int, torch.UntypedStorage] = {}
        return [copied(leaf, copies) for leaf in self.leaves if isinstance(leaf, Tensor)]

    def apply(self, tensors: Any, call: Callable[..., Any] | None = None, **more: Any) -> Any:
        """Return the result of the call on these tensors in place of the sample's own."""
        given = iter(tensors)
        leaves = [next(given) if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]
        first, rest, named = optree.tree_unflatten(self.structure, leaves)
        return (call or self.call)(first, *rest, **named, **more)


def copied(tensor: Tensor, copies: dict[int, torch.UntypedStorage]) -> Tensor:
    """Return a copy with the same strides; tensors that share a storage share the copy of it."""
    if tensor.layout != torch.strided or tensor.is_conj() or tensor.is_neg() or tensor.is_meta:
        return tensor.detach().clone().requires_grad_(tensor.requires_grad)
    storage = tensor.untyped_storage()
    if storage.data_ptr() not in copies:
        copies[storage.data_ptr()] = storage.clone()
    bytes_ = copies[storage.data_ptr()]
    copy = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(
        bytes_, tensor.storage_offset(), tensor.size(), tensor.stride()
    )
    return copy.requires_grad_(tensor.requires_grad)


def samples(info: Any, dtype: torch.dtype, requires_grad: bool) -> Iterator[Sample]:
    """Yield the database's samples of the operator, the same at each call."""
    torch.manual_seed(20)
    options: dict[str, Any] = {}
    if isinstance(info, database.ForeachFuncInfo):
        options = {"noncontiguous": False, "allow_higher_dtype_scalars": True}
    call = info.op
    for sample in info.sample_inputs("cpu", dtype, requires_grad=requires_grad, **options):
        yield Sample.of(call, sample)
