# SPDX-License-Identifier: Apache-2.0
"""Single steps of random programs: what a pair of tensors can be put through."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def head(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return two tensors of one length, whatever the shapes of `a` and `b`."""
    n = min(a.numel(), b.numel())
    return a.reshape(-1)[:n], b.reshape(-1)[:n]


def rows(a: Tensor) -> Tensor:
    return a if a.dim() == 2 else a.reshape(2, -1) if a.numel() % 2 == 0 else a.reshape(1, -1)


NEW: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sin": lambda a, b: a.sin(),
    "add": lambda a, b: torch.add(*head(a, b)),
    "mul": lambda a, b: torch.mul(*head(a, b)),
    "matmul": lambda a, b: rows(a).t() @ rows(a),
    "clone": lambda a, b: a.clone(),
    "cat": lambda a, b: torch.cat(head(a, b)),
    "sort": lambda a, b: a.sort(-1)[0],
    "rand": lambda a, b: a + torch.rand(a.shape),
    "dropout": lambda a, b: torch.nn.functional.dropout(b, 0.3),
    "sum": lambda a, b: rows(a).sum(0),
    "where": lambda a, b: torch.where(a > 0, a, a.exp()),
}
VIEWS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "transpose": lambda a, b: rows(a).t(),
    "narrow": lambda a, b: a[:1],
    "flat": lambda a, b: a.reshape(-1),
    "last half": lambda a, b: a.reshape(-1)[a.numel() // 2 :],
    "detach": lambda a, b: a.detach(),
    "strided": lambda a, b: a.reshape(-1)[::2],
}
WRITES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "mul_": lambda a, b: a.mul_(0.5),
    "add_": lambda a, b: a.add_(b.reshape(-1)[0].clone()),
    "copy_": lambda a, b: a[:1].copy_(b.reshape(-1)[0].clone()),
    "zero_": lambda a, b: a[:1].zero_(),
    "uniform_": lambda a, b: a.uniform_(),
    "out": lambda a, b: torch.cos(a.clone(), out=a),
    "head": lambda a, b: head(a, b)[0].sub_(head(a, b)[1].clone()),
}
# Readers that no operator is told of.
READS: dict[str, Callable[[Tensor], Any]] = {
    "address": lambda a: a.data_ptr(),
    "numbers": lambda a: a.tolist(),
}


Step = tuple[str, int, int]


def obey(pool: list[Tensor], step: Step) -> None:
    """Do one step on a pool of tensors; its numbers choose among them."""
    name, i, j = step
    a, b = pool[i % len(pool)], pool[j % len(pool)]
    if name == "drop":
        if len(pool) > 2:
            del pool[i % len(pool)]
    elif name == "swap":
        pool.append(pool.pop(i % len(pool)))
    elif name in WRITES:
        WRITES[name](a, b)
    elif name in READS:
        READS[name](a)
    else:
        made = (NEW | VIEWS)[name](a, b)
        # Numbers stay small, so that a wrong one is not lost among infinities.
        pool.append(made if name in VIEWS else made.clamp(-2, 2) if j % 2 else made)
