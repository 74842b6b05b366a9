# SPDX-License-Identifier: Apache-2.0
"""The transform `offload`: values go to a tier instead of being computed again."""

from __future__ import annotations

import functools
from typing import Any

from ..policies import Policy
from ..policies._custom import Scorer
from .budget import BudgetLike, parse_budget
from .options import Options, policy_of
from .remat import DEFAULT_POLICY, transform, transformed
from .tiers import TierLike, parse_tiers

# Note [Offload keeps to what its first call came to]
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
# Without a budget what is not in use goes, and a call holds little. Where it is known what a
# program reads, and when, that rule moves more than it has to: what is read again at once, and all
# that lies there while memory is below its peak. So a call that is guided has the bytes for a
# budget that the recorded one held at the most, and a plan that moves what does not fit in them.
# Nobody has asked for that budget: it gives way to what an operator needs, and no call is refused.
# Calls that no plan fits go on by the rule of the first.


@transform
def offload(
    f: Any = None,
    budget: BudgetLike = None,
    *,
    to: TierLike = None,
    policy: Policy | Scorer = DEFAULT_POLICY,
    where: bool = False,
) -> Any:
    """Return a function equal to ``f`` whose intermediates are moved to a tier when room is needed.

    While the returned function runs, and until the graph it leaves behind is freed, tensors that do
    not fit are moved to a disk, or from an accelerator to the host's memory, while operators run,
    and fetched when they are read again. Nothing is computed again that a tier can bring back;
    values and gradients are bitwise those of ``f``. From the second call of a signature on, a value
    starts to come back before it is asked for (Peng et al., *Capuchin*, ASPLOS 2020).

    ``offload`` is a transform: it nests with :func:`remat` and itself, with :mod:`torch.func` in
    either order, and with ``.backward()``. ``remat(f, budget, offload=True)`` chooses for each
    value between moving it and computing it again.

    Args:
        f: A function of tensors, a method, a ``staticmethod`` or ``classmethod``, or an
            ``nn.Module``. Arguments and results may be any pytree. Without ``f``, a decorator is
            returned.
        budget: The most bytes of tensors made inside that may be resident at once, counted and
            written as for :func:`remat`. None: no cap. The first call then moves every value of
            64 KiB or more that is not in use; later calls move what does not fit in the peak of
            the first call.
        to: The tier. None: the host's memory for values on an accelerator, a disk for those on a
            CPU. A :class:`Disk`, a folder, or ``"disk"`` for the folder for temporary files; a
            :class:`Host` or ``"host"``; a :class:`Packed` or ``"packed"``, which compresses values
            in memory. Or a list of these: each value goes to the one that it comes back from
            soonest, if that has room. Bytes there count against the tier's own budget alone, but
            packed ones in ``budget``. If a tier is full, values stay and others are evicted.
        policy: What is evicted first, as for :func:`remat`.
        where: Write down what each call does, and where in the program, as for :func:`remat`.

    Returns:
        A function with the signature of ``f``; for a module, one that shares its state, as from
        :func:`remat`. :func:`stats` says what its last call moved.

    Raises:
        TypeError: ``f`` is not callable, or an option is of the wrong type.
        ValueError: The budget means nothing, or ``to`` is no folder.
        OffloadError: (from a call) the folder cannot be used, or there is no accelerator for a
            :class:`Host`; (from a call or its backward) a value that cannot be computed again was
            lost with the disk or by a fork, or is read while a stream is captured.
        BudgetError: (from a call or its backward) one operator needs more than the budget at once,
            or the tier is too small for what would have to go.

    Example:
        >>> import torch, rematfn
        >>> def loss(x):
        ...     return x.sin().cos().exp().sum()
        >>> x = torch.linspace(0, 1, 1 << 16)
        >>> g = torch.func.grad(rematfn.offload(loss, budget="1MiB"))
        >>> torch.equal(g(x), torch.func.grad(loss)(x))
        True
    """
    options = Options(
        name="offload",
        budget=parse_budget(budget, "offload(f, budget={})"),
        policy=policy_of(policy, "offload(f, policy=...)"),
        tiers=parse_tiers(to, "offload(f, to=...)"),
        drops=False,
        where=where,
    )
    return functools.partial(transformed, options=options) if f is None else transformed(f, options)
