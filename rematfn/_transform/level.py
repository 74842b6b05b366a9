# SPDX-License-Identifier: Apache-2.0
"""Running a function under a level, and sealing what comes out."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from .. import _C
from .._interop import compiler, distributed, storages
from .._interop.pytrees import tensors_of
from ..errors import RematError
from .deferred import refuse_deferred_result

MAX_OPERATIONS: Final = 262_144


@dataclasses.dataclass(kw_only=True)
class LevelOptions:
    """What a level is to be, decided. `_C.ActiveLevel` reads all but `discards`, by name."""

    budget: int | None
    shared: _C.SharedBudget | None = None  # whose bytes those are, if not the level's alone
    policy: _C.Policy
    timed: bool = False
    verify: bool = False
    name: str
    max_operations: int = MAX_OPERATIONS  # of an outermost level: before its record is trimmed
    record: bool = False
    program: _C.Program | None = None
    as_recorded: bool = True  # the call is expected to run that very program
    # The budget is so much of a peak, which may be only an estimate, always or without the guide.
    fraction: float = 0.0
    is_estimate: bool = False
    is_estimate_unguided: bool = False
    tiers: Sequence[_C.Tier] = ()  # where versions may be moved to
    drops: bool = True  # they may be dropped, and replayed
    leaves_early: bool = False  # what is not in use is moved, whether or not there is room
    # How the budget was written: its unit, or of how many bytes it is a fraction; for messages.
    unit: str = ""
    peak: int = 0
    known: _C.Trace | None = None  # a record of an earlier call, for the figure of a BudgetError
    most_replays: float = math.inf  # in multiples of the program's cost; beyond, it is stopped
    where: bool = False  # what happens is written down, with its place in the program
    discards: bool = False  # what is not kept goes when the function returns

    def level(self) -> _C.ActiveLevel:
        storages.watch()
        compiler.watch()
        distributed.watch()
        return _C.ActiveLevel(self)


def call(
    f: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    options: LevelOptions,
    started: Callable[[_C.Level], None],
) -> tuple[Any, int]:
    """Run ``f`` under a new level; ``started`` is given the level before ``f`` begins.

    Returns:
        What ``f`` returns, and the bytes that it has stored away beside results and gradients.
    """
    active = options.level()
    try:
        with active as level:  # See Note [Levels are entered and left in C]
            started(level)
            result = f(*args, **kwargs)
            refuse_deferred_result(result, options.name)
    except RuntimeError as error:
        if not isinstance(error, RematError):  # or one that TorchScript has made of ours
            try:
                _C.raise_quoted(str(error))
            except RematError as own:
                raise own from error
        raise
    leaving = tensors_of((result, args, kwargs))  # `x.set_(y)` makes an argument the level's
    stored_bytes = _C.hand_out(level, leaving, any(map(_computes_again, leaving)))
    if options.discards:
        level.discard()
    return result, stored_bytes


def _computes_again(tensor: Tensor) -> bool:
    """Return whether a leaf that the level has made has hooks.

    They go on with the call, in its backward, and what the function has stored away may be there
    for them alone: it stays the level's until then.
    See Note [What is stored away outlives what it was made of].
    """
    with torch._C.DisableTorchFunction():
        if not (tensor.requires_grad and tensor.is_leaf and _C.has_key(tensor)):
            return False
        return bool(tensor._backward_hooks or tensor._post_accumulate_grad_hooks)
