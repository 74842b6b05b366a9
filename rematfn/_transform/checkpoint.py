# SPDX-License-Identifier: Apache-2.0
"""`torch.utils.checkpoint.checkpoint`, by eviction and replay.

Torch runs the function a second time; what can differ between two runs is the user's to keep equal.
Here the operators of the one run are replayed: docs/design/exactness.md.
"""

import types
from collections.abc import Callable
from typing import Any, TypeVar

from torch.utils.checkpoint import noop_context_fn

from .._interop.compiler import not_compiled
from ..errors import expect
from ..policies import Manual
from .budget import Limit
from .deferred import refuse_deferred
from .options import Options
from .transformed import Transformed

R = TypeVar("R")


@not_compiled  # torch 2.11's compiler fails at the options
def checkpoint(
    function: Callable[..., R],
    *args: Any,
    use_reentrant: bool | None = None,
    context_fn: Callable[[], Any] = noop_context_fn,
    determinism_check: str = "default",
    debug: bool = False,
    early_stop: bool = True,
    preserve_rng_state: bool = True,
    respect_saved_tensors_hooks: bool | None = None,
    **kwargs: Any,
) -> R:
    """Return ``function(*args, **kwargs)``, and evict what was computed inside.

    As :func:`torch.utils.checkpoint.checkpoint`: arguments and results stay, and what is between
    them is computed again when the backward pass reads it. ``function`` itself does not run again:
    those of its operators are replayed whose results are needed. So dropout masks are the same
    whatever generator drew them, batch norms count a batch once, and side effects happen once. It
    works under ``torch.func.grad``, ``vjp``, ``jvp``, ``vmap`` and ``jacrev``, nested, and inside
    of :func:`remat`. Values that ``function`` marks with :func:`keep` stay.

    Args:
        function: A function of tensors, or a module.
        *args: Its arguments.
        use_reentrant: True, False or None, which make no difference, since there is no second run.
            What works with either of torch's two kinds works here.
        context_fn: Refused: there is no second run to be surrounded. To choose what is kept, mark
            it with :func:`keep`, or write ``remat(function, policy=Speed())``.
        determinism_check: "default" or "none", which make no difference: the same operators run.
        debug: True is refused: there are no two runs to compare. Use
            ``remat(function, verify=True)`` to compare replays with first runs, bit for bit.
        early_stop: Makes no difference: only operators whose results are needed are replayed.
        preserve_rng_state: Makes no difference: a replay always draws the numbers of the first run.
        respect_saved_tensors_hooks: Makes no difference: hooks see all that autograd saves, and
            nothing else keeps values.
        **kwargs: Arguments of ``function`` by name, other than these.

    Returns:
        What ``function`` returns.

    Raises:
        ValueError: An option is refused, or means nothing.

    Example:
        >>> import torch, rematfn
        >>> def loss(x):
        ...     return rematfn.checkpoint(torch.nn.functional.gelu, x.sin()).sum()
        >>> torch.func.grad(loss)(torch.zeros(2))
        tensor([0.5000, 0.5000])
    """

    def check(option: str, given: object, *taken: object) -> None:
        needed = " or ".join(map(repr, taken))
        expect(given in taken, f"checkpoint({option}=...)", needed, given, ValueError)

    # They make no difference; these are what torch takes for them.
    check("use_reentrant", use_reentrant, None, True, False)
    check("preserve_rng_state", preserve_rng_state, True, False)
    check("determinism_check", determinism_check, "default", "none")
    check("respect_saved_tensors_hooks", respect_saved_tensors_hooks, None, True, False)
    if context_fn is not noop_context_fn:
        raise ValueError(
            "checkpoint(context_fn=...): there is no second run that a context could surround. To "
            "choose what is kept, mark it with rematfn.keep(x), or write "
            "rematfn.remat(function, policy=rematfn.policies.Speed())(*args)."
        )
    if debug:
        raise ValueError(
            "checkpoint(debug=True): there are no two runs to compare. To compare replays with "
            "first runs, write rematfn.remat(function, verify=True)(*args)."
        )
    expect(callable(function), "checkpoint(function)", "a function", function)
    refuse_deferred(function, "checkpoint(function)")
    run = function
    if not isinstance(function, types.FunctionType | types.MethodType):
        # A method, so that what a module has as attributes does not become the wrapper's.
        run = types.MethodType(type(function).__call__, function)
    return Transformed(run, Options(budget=Limit(), policy=Manual()))(*args, **kwargs)
