# SPDX-License-Identifier: Apache-2.0
"""What a transform was asked for, checked."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Final, Literal

from ..policies import Custom, Policy
from ..policies._custom import Scorer
from .budget import Limit
from .level import MAX_OPERATIONS
from .tiers import Tiers

Cost = Literal["model", "time"]
DEFAULT_MOST: Final = 4.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """What `remat` or `offload` was asked for, beside the function.

    Raises:
        TypeError: An option is of the wrong type.
        ValueError: An option means nothing.
    """

    name: str = "remat"  # the transform
    of: str = ""  # what is transformed, if that is more than the function: a module's class
    budget: Limit
    policy: Policy
    cost: Cost = "model"
    verify: bool = False
    max_operations: int = MAX_OPERATIONS
    tiers: Tiers = dataclasses.field(default_factory=Tiers)  # where values may be moved to
    drops: bool = True  # they may be dropped, and replayed
    most_replays: float | None = None  # in multiples of the program's cost; None: not said
    where: bool = False  # what a call does is written down, with its place in the program
    methods: tuple[str, ...] = ("forward",)  # of a module

    def __post_init__(self) -> None:
        name = self.name
        if self.cost not in ("model", "time"):
            raise ValueError(
                f'{name}(f, cost=...): "model" or "time" is needed, got {self.cost!r}.'
            )
        for option in ("verify", "where"):
            given = getattr(self, option)
            if not isinstance(given, bool):
                raise TypeError(f"{name}(f, {option}=...): True or False is needed, got {given!r}.")
        most: Any = self.max_operations
        if isinstance(most, bool) or not isinstance(most, int):
            raise TypeError(f"{name}(f, max_operations=...): an int is needed, got {most!r}.")
        if not 1 <= most < 1 << 63:
            raise ValueError(f"{name}(f, max_operations=...): it must be at least 1, got {most!r}.")
        replays: Any = self.most_replays
        if isinstance(replays, bool) or not isinstance(replays, int | float | None):
            raise TypeError(
                f"{name}(f, most_replays=...): a number is needed, in multiples of the program's "
                f"cost, such as 4.0, got {replays!r}."
            )
        if replays is not None and not replays > 0:
            raise ValueError(f"{name}(f, most_replays=...): it must be above 0, got {replays!r}.")

    @property
    def limit(self) -> float:
        """See Note [What the replays of a call are compared with]."""
        if self.most_replays is not None:
            return self.most_replays
        return math.inf if self.policy.replays_freely else DEFAULT_MOST


def policy_of(policy: Policy | Scorer, call: str) -> Policy:
    """Return the policy that was given to ``call``."""
    if not isinstance(policy, Policy) and callable(policy) and not isinstance(policy, type):
        return Custom(policy)
    if not isinstance(policy, Policy):
        raise TypeError(
            f"{call}: a policy such as rematfn.policies.ON() is needed, got {policy!r}."
        )
    return policy


def methods_of(methods: Any, transform: str) -> tuple[str, ...]:
    """Return the names that were given to ``transform(module, methods=...)``, each once."""
    if isinstance(methods, list | tuple) and methods and all(isinstance(m, str) for m in methods):
        return tuple(dict.fromkeys(methods))
    raise TypeError(
        f"{transform}(module, methods=...): a list of names of methods is needed, such as "
        f'["forward", "log_prob"], got {methods!r}.'
    )
