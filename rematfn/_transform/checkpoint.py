# SPDX-License-Identifier: Apache-2.0
"""`torch.utils.checkpoint`'s functions, by eviction and replay.

Torch runs the function a second time; what can differ between two runs is the user's to keep equal.
Here the operators of the one run are replayed: docs/design/exactness.md.
"""

import os
import threading
import types
from collections import OrderedDict
from collections.abc import Callable, MutableMapping, Sequence
from typing import Any, TypeVar

from torch import nn
from torch.utils.checkpoint import noop_context_fn
from torch.utils.weak import WeakIdKeyDictionary

from ..errors import expect
from ..policies import Manual
from .budget import BudgetLike, parse_budget
from .deferred import refuse_deferred
from .history import History
from .options import Options
from .remat import DEFAULT_POLICY
from .rematted import Rematted

R = TypeVar("R")


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
    budget: BudgetLike = None,
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
        budget: The most bytes that values made inside may occupy, as for :func:`remat`. Then values
            are evicted as room is needed, and ``function`` may be the whole model. What calls have
            shown is remembered as long as ``function`` lives: so pass the same object each time,
            and no new ``lambda``. None: values inside are discarded when ``function`` returns. A
            fraction is refused, since it needs the peak of an earlier call.
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
    _check(
        "checkpoint",
        use_reentrant=use_reentrant,
        preserve_rng_state=preserve_rng_state,
        determinism_check=determinism_check,
        respect_saved_tensors_hooks=respect_saved_tensors_hooks,
    )
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
    return _checkpointed(function, budget, "checkpoint", function)(*args, **kwargs)


def checkpoint_sequential(
    functions: nn.Sequential | Sequence[Callable[..., Any]],
    segments: int,
    input: Any,
    use_reentrant: bool | None = None,
    *,
    preserve_rng_state: bool = True,
    budget: BudgetLike = None,
) -> Any:
    """Return what ``functions`` make of ``input`` one after the other, checkpointed in segments.

    As :func:`torch.utils.checkpoint.checkpoint_sequential`: all segments but the last go through
    :func:`checkpoint`. With a budget the whole sequence goes through one :func:`checkpoint`, costs
    decide what stays, and ``segments`` has no effect.

    Args:
        functions: An ``nn.Sequential``, or modules or functions in a list.
        segments: How many, at least 1 and at most as many as there are functions.
        input: What the first one is given.
        use_reentrant: As for :func:`checkpoint`.
        preserve_rng_state: As for :func:`checkpoint`.
        budget: As for :func:`checkpoint`.

    Returns:
        What the last one returns.

    Raises:
        TypeError: There is a second input, and the first function takes one.

    Example:
        >>> import torch, rematfn
        >>> layers = [torch.sin, torch.cos, torch.exp, torch.tanh]
        >>> x = torch.zeros(2, requires_grad=True)
        >>> rematfn.checkpoint_sequential(layers, 2, x).sum().backward()
        >>> x.grad
        tensor([-0., -0.])
    """
    if not isinstance(use_reentrant, bool | None):
        raise TypeError(
            "checkpoint_sequential(functions, segments, input): one input is needed, which goes "
            "from each function to the next, got another "
            f"{type(use_reentrant).__name__} in the place of use_reentrant. Make one value of "
            "them that the first function takes apart: checkpoint_sequential(functions, segments, "
            "(a, b))."
        )
    _check(
        "checkpoint_sequential",
        use_reentrant=use_reentrant,
        preserve_rng_state=preserve_rng_state,
    )
    # The children, not the module: like torch's, this runs none of the sequence's own hooks.
    whole = functions.children() if isinstance(functions, nn.Sequential) else functions
    steps: list[Callable[..., Any]] = list(whole)
    if type(segments) is not int or not 1 <= segments <= max(len(steps), 1):
        raise ValueError(
            f"checkpoint_sequential(segments=...): a number from 1 to {max(len(steps), 1)} is "
            f"needed, as many as there are functions, got {segments!r}."
        )
    if budget is not None:
        anchor = functions if isinstance(functions, nn.Sequential) else next(iter(steps), None)
        return _checkpointed(_chain(steps), budget, "checkpoint_sequential", anchor, *steps)(input)
    size = len(steps) // segments
    for start in range(0, size * (segments - 1), size):
        input = checkpoint(_chain(steps[start : start + size]), input)
    return _chain(steps[size * (segments - 1) :])(input)


def _checkpointed(
    function: Callable[..., R], budget: BudgetLike, name: str, anchor: object, *steps: object
) -> Rematted[..., R]:
    """Return ``function`` transformed, with what is remembered of ``anchor`` with ``steps``."""
    expect(callable(function), f"{name}(function)", "a function", function)
    refuse_deferred(function, f"{name}(function)")
    parsed = parse_budget(budget, name + "(budget={})")
    if parsed.fraction is not None:
        raise ValueError(
            f"{name}(budget={budget!r}): a fraction is one of what an earlier call of the same "
            f"function has used. Write g = rematfn.remat(function, {budget!r}) once, and call g."
        )
    run = function
    if not isinstance(function, types.FunctionType | types.MethodType):
        # A method, so that what a module is made of is part of what makes two calls alike.
        run = types.MethodType(type(function).__call__, function)
    if budget is None:
        return Rematted(run, Options(budget=parsed, policy=Manual()))
    known = _history_of(anchor, (parsed.bytes, *map(id, steps)))
    rematted = Rematted(run, Options(budget=parsed, policy=DEFAULT_POLICY), known)
    rematted.__dict__["__name__"] = getattr(function, "__name__", type(function).__name__)
    return rematted


# By the identity of a function, and by budget. A function is not kept alive for that.
_histories: MutableMapping[object, OrderedDict[tuple[object, ...], History]]
_histories = WeakIdKeyDictionary()
_MOST_BUDGETS = 8  # of one function
_lock = threading.Lock()
os.register_at_fork(
    before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release
)


def _history_of(function: object, key: tuple[object, ...]) -> History:
    """Return what is known of the calls of ``function``; a bound method is its object's."""
    if isinstance(function, types.MethodType):
        key = (function.__func__.__qualname__, *key)
        function = function.__self__
    with _lock:
        try:
            histories = _histories.setdefault(function, OrderedDict())
        except TypeError:  # of some objects it is not known how long they live
            return History()
        history = histories.setdefault(key, History())
        histories.move_to_end(key)
        while len(histories) > _MOST_BUDGETS:
            histories.popitem(last=False)
        return history


def _chain(steps: list[Callable[..., Any]]) -> Callable[..., Any]:
    return types.MethodType(_run_steps, tuple(steps))


def _run_steps(steps: tuple[Callable[..., Any], ...], x: Any) -> Any:
    for step in steps:
        x = step(x)
    return x


# Options that make no difference, and what torch takes for them.
_TAKEN: dict[str, tuple[object, ...]] = {
    "use_reentrant": (None, True, False),
    "preserve_rng_state": (True, False),
    "determinism_check": ("default", "none"),
    "respect_saved_tensors_hooks": (None, True, False),
}


def _check(name: str, **given: object) -> None:
    for option, value in given.items():
        taken = _TAKEN[option]
        needed = " or ".join(map(repr, taken))
        expect(value in taken, f"{name}({option}=...)", needed, value, ValueError)
