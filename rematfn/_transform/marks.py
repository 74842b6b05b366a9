# SPDX-License-Identifier: Apache-2.0
"""Values that the program names, for policies that go by names."""

from __future__ import annotations

import torch

from .. import _C


def keep(x: torch.Tensor, name: str | None = None) -> torch.Tensor:
    """Mark the value of ``x`` to be kept by :class:`Manual`, and return ``x`` itself.

    Nothing is copied or computed, and no gradient knows of it. The mark is on the contents that
    ``x`` has now, all of its storage if it is a view; what an in-place operator makes of them is
    another value. Of nested functions under :func:`remat` the innermost whose policy is
    :class:`Manual` heeds it; policies that only score ignore it. Outside of :func:`remat`, or on an
    argument, it does nothing.

    Args:
        x: A tensor, under any transform of :mod:`torch.func`.
        name: For policies over names. Many values may have the same name.

    Returns:
        ``x``, the same object.

    Example:
        >>> import torch, rematfn
        >>> def block(x):
        ...     h = rematfn.keep(x @ x, "product")
        ...     return h.sin().exp().sum()
        >>> g = rematfn.remat(block, policy=rematfn.policies.Manual(only=("product",)))
        >>> torch.func.grad(g)(torch.zeros(2, 2))
        tensor([[0., 0.],
                [0., 0.]])
    """
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"keep(x): a tensor is needed, got {type(x).__name__}.")
    if not (name is None or (isinstance(name, str) and name)):
        raise TypeError(f"keep(x, name): a string or None is needed, got {name!r}.")
    _C.mark(x, name or "")
    return x
