# SPDX-License-Identifier: Apache-2.0
"""Memory budgets for PyTorch, as function transforms."""

from . import _compat
from ._errors import BudgetError as BudgetError
from ._errors import RematError as RematError
from ._errors import ReplayError as ReplayError

_C = _compat.load_extension()

from . import _subclasses  # noqa: E402  (needs torch)

_C.set_errors(BudgetError, ReplayError)
_C.set_inner_tensors(_subclasses.inner_tensors)
_C.register_kernels()

from ._budget import Budget as Budget  # noqa: E402  (needs the extension)
from ._checkpoint import checkpoint as checkpoint  # noqa: E402
from ._checkpoint import checkpoint_sequential as checkpoint_sequential  # noqa: E402
from ._inspect import Stats as Stats  # noqa: E402
from ._inspect import check as check  # noqa: E402
from ._inspect import materialize as materialize  # noqa: E402
from ._inspect import stats as stats  # noqa: E402
from ._marks import keep as keep  # noqa: E402
from ._opaque import opaque as opaque  # noqa: E402
from ._policy import DTR as DTR  # noqa: E402
from ._policy import LRU as LRU  # noqa: E402
from ._policy import MSPS as MSPS  # noqa: E402
from ._policy import ON as ON  # noqa: E402
from ._policy import Candidate as Candidate  # noqa: E402
from ._policy import Custom as Custom  # noqa: E402
from ._policy import Eq as Eq  # noqa: E402
from ._policy import EvictEverything as EvictEverything  # noqa: E402
from ._policy import Guided as Guided  # noqa: E402
from ._policy import Largest as Largest  # noqa: E402
from ._policy import Local as Local  # noqa: E402
from ._policy import Manual as Manual  # noqa: E402
from ._policy import Memory as Memory  # noqa: E402
from ._policy import Policy as Policy  # noqa: E402
from ._policy import Speed as Speed  # noqa: E402
from ._policy import Sqrt as Sqrt  # noqa: E402
from ._trace import Trace as Trace  # noqa: E402
from ._trace import record as record  # noqa: E402
from ._trace import simulate as simulate  # noqa: E402
from ._trace import warmup as warmup  # noqa: E402
from ._transform import remat as remat  # noqa: E402

__all__ = [
    "DTR",
    "LRU",
    "MSPS",
    "ON",
    "Budget",
    "BudgetError",
    "Candidate",
    "Custom",
    "Eq",
    "EvictEverything",
    "Guided",
    "Largest",
    "Local",
    "Manual",
    "Memory",
    "Policy",
    "RematError",
    "ReplayError",
    "Speed",
    "Sqrt",
    "Stats",
    "Trace",
    "check",
    "checkpoint",
    "checkpoint_sequential",
    "keep",
    "materialize",
    "opaque",
    "record",
    "remat",
    "simulate",
    "stats",
    "warmup",
]
