# SPDX-License-Identifier: Apache-2.0
"""The tensors among arguments and results, and in a subclass; and what autograd made them of."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import optree
import torch
from torch.utils import _pytree
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

# The namespace's registrations are torch's own containers; None is a leaf, as in torch's pytrees.
_NAMESPACE = "torch"


def tensors_of(tree: Any) -> list[torch.Tensor]:
    """Return the tensors of any pytree, in order.

    Dataclasses and mappings that no registry knows are looked into as well, and the attributes that
    tensors have been given, each once: a result that is not sealed would stay the level's.
    """
    return list(_tensors_of(tree, {}))


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """Return the tensors in torch's own containers, and nothing that they hold themselves."""
    return [leaf for leaf in _pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


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


def inner_tensors(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors that a subclass with ``__torch_dispatch__`` holds: the core asks.

    A subclass that can be flattened says so itself; of any other, the attributes are looked at.
    """
    subclass: Any = tensor
    if is_traceable_wrapper_subclass(subclass):
        names, _ = subclass.__tensor_flatten__()
        held = [getattr(subclass, name) for name in names]
    else:
        held = list(vars(subclass).values())
    return [t for t in held if isinstance(t, torch.Tensor) and t is not tensor]


def graph_behind(
    tensors: Iterable[torch.Tensor], belongs: Callable[[Any], bool] = lambda node: True
) -> list[Any]:
    """Return the nodes of autograd's graph that ``tensors`` came from, as far as they belong."""
    found: dict[Any, None] = {}
    todo: list[Any] = [t.grad_fn for t in tensors]
    while todo:
        node = todo.pop()
        if node is not None and node not in found and belongs(node):
            found[node] = None
            todo.extend(before for before, _ in node.next_functions)
    return list(found)
