# SPDX-License-Identifier: Apache-2.0
"""The tensors among a function's arguments and results."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import optree
import torch

# The namespace's registrations are torch's own containers; None is a leaf, as in torch's pytrees.
_NAMESPACE = "torch"


def tensors_of(tree: Any) -> list[torch.Tensor]:
    """Return the tensors of any pytree, in order.

    Dataclasses and mappings that no registry knows are looked into as well: a result that is not
    sealed would stay the level's.
    """
    found: list[torch.Tensor] = []
    for leaf in optree.tree_leaves(tree, namespace=_NAMESPACE):
        if isinstance(leaf, torch.Tensor):
            found.append(leaf)
        elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            for field in dataclasses.fields(leaf):
                found += tensors_of(getattr(leaf, field.name, None))
        elif isinstance(leaf, Mapping):
            for value in leaf.values():
                found += tensors_of(value)
    return found
