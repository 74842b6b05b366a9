# SPDX-License-Identifier: Apache-2.0
"""What a program asks for a tensor: that it be kept, or that its bytes be there."""

import torch

from .. import _C
from ..errors import expect


def keep(x: torch.Tensor, name: str | None = None) -> torch.Tensor:
    """Mark the value of ``x`` to be kept, and return ``x`` itself.

    Under every policy a marked value is evicted only if nothing else can be, except what running
    replays are about to read. The budget holds even then. A marked value that is known not to be
    read again may be evicted, too. :class:`Manual` can respect some names alone; other policies
    respect all marks. A value whose last tensor the program drops is kept by :class:`Manual` and
    :class:`Speed` alone.

    Nothing is copied or computed, and gradients do not change. The mark is on the present contents
    of the whole storage of ``x``; what an in-place operator writes there is another value. If
    functions under :func:`remat` are nested, the innermost one made the value, and its policy
    decides what the mark means. A mark has no effect outside of :func:`remat`, on an argument, or
    under :class:`rematfn.testing.EvictEverything`.

    Args:
        x: A tensor, under any transform of :mod:`torch.func`.
        name: For policies that choose by name. Many values may have the same name.

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
    expect(isinstance(x, torch.Tensor), "keep(x)", "a tensor", x)
    is_name = isinstance(name, str) and name != ""
    expect(name is None or is_name, "keep(x, name)", "a string or None", name)
    _C.mark(x, name or "")
    return x


def materialize(x: torch.Tensor) -> torch.Tensor:
    """Make the bytes of ``x`` resident, and return it.

    An operator that reads an evicted tensor brings its bytes back. Code that reads them without an
    operator (a DLPack capsule, C++ that takes the address) does not: call this first.

    Args:
        x: Any tensor. One that no level made, or that is resident, is returned as it is.

    Returns:
        ``x``, the same object.

    Raises:
        BudgetError: The replays do not fit in the budget.
    """
    expect(isinstance(x, torch.Tensor), "materialize(x)", "a tensor", x)
    _C.materialize([x], "materialize(x)")
    return x
