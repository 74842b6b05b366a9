# SPDX-License-Identifier: Apache-2.0
"""Signatures: which calls of a function are alike, so that one's peak tells the other's."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, TypeAlias

import optree
import torch

Signature: TypeAlias = tuple[Hashable, ...]


def signature_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Signature:
    """Return what two calls must have in common for their memory to be alike.

    Shapes, dtypes, devices and ``requires_grad`` of all tensors, the other arguments by value where
    they can be hashed, grad mode, and the torch.func transforms around the call.
    """
    tree: Any = (args, kwargs)
    leaves: list[Any]
    leaves, treespec = optree.tree_flatten(tree, none_is_leaf=True, namespace="torch")
    interpreters = torch._C._functorch.get_interpreter_stack() or []
    return (
        treespec,
        torch.is_grad_enabled(),
        tuple(str(interpreter.key()) for interpreter in interpreters),
        *(_of_leaf(leaf) for leaf in leaves),
    )


def _of_leaf(leaf: Any) -> Hashable:
    if isinstance(leaf, torch.Tensor):
        return (tuple(leaf.shape), leaf.dtype, leaf.device, leaf.requires_grad)
    try:
        hash(leaf)
    except TypeError:
        return id(leaf)
    return leaf  # type: ignore[no-any-return]
