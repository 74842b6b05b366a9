# SPDX-License-Identifier: Apache-2.0
"""The tensors among a function's arguments and results."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import optree
import torch
from torch.utils import _pytree

# The namespace's registrations are torch's own containers; None is a leaf, as in torch's pytrees.
_NAMESPACE = "torch"


def tensors_of(tree: Any) -> list[torch.Tensor]:
    """Return the tensors of any pytree, in order.

    Dataclasses and mappings that no registry knows are looked into as well, and the attributes that
    tensors have been given, each once: a result that is not sealed would stay the level's.
    """
    return list(_tensors_of(tree, {}))


def _tensors_of(tree: Any, seen: dict[int, Any]) -> Iterator[torch.Tensor]:
    for leaf in optree.tree_leaves(tree, namespace=_NAMESPACE):
        if isinstance(leaf, torch.Tensor):
            yield leaf
        if id(leaf) in seen:
            continue
        # torch tells optree of what users register with it only when a compiler is loaded.
        node = _pytree.SUPPORTED_NODES.get(type(leaf))
        inside: Iterable[Any]
        if isinstance(leaf, torch.Tensor):
            inside = list(vars(leaf).values())
        elif node is not None:
            inside = node.flatten_fn(leaf)[0]
        elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            inside = [getattr(leaf, field.name, None) for field in dataclasses.fields(leaf)]
        elif isinstance(leaf, Mapping):
            inside = leaf.values()
        else:
            continue
        seen[id(leaf)] = leaf  # alive, so that no other has its id
        for part in inside:
            yield from _tensors_of(part, seen)
