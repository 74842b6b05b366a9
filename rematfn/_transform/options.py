# SPDX-License-Identifier: Apache-2.0
"""What a transform was asked for, checked."""

import dataclasses
import math
from typing import Any, Final, Literal

from ..errors import expect
from ..policies import Custom, Policy
from ..policies._custom import Scorer
from .budget import Limit
from .level import MAX_OPERATIONS
from .tiers import Tiers

Cost = Literal["model", "time"]
DEFAULT_MOST: Final = 4.0
ENDLESS: Final = 100.0  # at which a running call is stopped, if nobody has said when


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """What `remat` or `offload` was asked for, beside the function."""

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

    def __post_init__(self) -> None:
        def check(fits: bool, option: str, needed: str, kind: type[Exception]) -> None:
            expect(fits, f"{self.name}(f, {option}=...)", needed, getattr(self, option), kind)

        most: Any = self.max_operations
        replays: Any = self.most_replays
        is_number = isinstance(replays, int | float | None) and not isinstance(replays, bool)
        multiples = "a number above 0, in multiples of the program's cost, such as 4.0,"
        check(self.cost in ("model", "time"), "cost", '"model" or "time"', ValueError)
        check(isinstance(self.verify, bool), "verify", "True or False", TypeError)
        check(isinstance(self.where, bool), "where", "True or False", TypeError)
        check(type(most) is int, "max_operations", "an int", TypeError)
        check(1 <= most < 1 << 63, "max_operations", "at least 1", ValueError)
        check(is_number, "most_replays", multiples, TypeError)
        check(replays is None or replays > 0, "most_replays", multiples, ValueError)

    @property
    def limit(self) -> float:
        """See Note [What the replays of a call are compared with]."""
        if self.most_replays is not None:
            return self.most_replays
        return math.inf if self.policy.replays_freely else DEFAULT_MOST

    @property
    def stopped_at(self) -> float:
        """See Note [What the replays of a call are compared with]."""
        return max(self.limit, ENDLESS) if self.most_replays is None else self.most_replays


def policy_of(policy: Policy | Scorer, call: str) -> Policy:
    if isinstance(policy, Policy):
        return policy
    is_score = callable(policy) and not isinstance(policy, type)
    expect(is_score, call, "a policy such as rematfn.policies.ON()", policy)
    return Custom(policy)
