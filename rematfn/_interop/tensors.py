# SPDX-License-Identifier: Apache-2.0
"""What a program asks for a tensor: that it be kept, or that its bytes be there."""

import torch

from .. import _C
from ..errors import expect


def keep(x: torch.Tensor, name: str | None = None) -> torch.Tensor:
    """Mark the value of ``x`` to be kept, and return ``x`` itself.

    Under every policy a marked value goes only when nothing else can: the budget comes first, and
    so does what running replays are about to read. A value that is known not to be read again may
    go as well. Names narrow it down: :class:`Manual` says which marks it heeds; the others heed
    all. What the program itself lets go of is kept by :class:`Manual` and :class:`Speed` alone.

    Nothing is copied or computed, and no gradient knows of it. The mark is on the contents that
    ``x`` has now, all of its storage if it is a view; what an in-place operator makes of them is
    another value. Of nested functions under :func:`remat` the innermost, which made the value, says
    what its mark means. Outside of :func:`remat`, or on an argument, it does nothing; nor does it
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

    Operators find an evicted tensor's bytes by themselves. What goes past the dispatcher
    (a DLPack capsule, C++ code that takes the address) does not, and needs this first.

    Args:
        x: Any tensor. One that no level made, or that is resident, is returned as it is.

    Returns:
        ``x``, the same object.

    Raises:
        BudgetError: The replays do not fit in the budget.
    """
    _C.materialize([x], "materialize(x)")
    return x
