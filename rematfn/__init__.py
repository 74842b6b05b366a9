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

from . import policies as policies  # noqa: E402  (needs the extension)
from . import testing as testing  # noqa: E402
from ._budget import Budget as Budget  # noqa: E402
from ._checkpoint import checkpoint as checkpoint  # noqa: E402
from ._checkpoint import checkpoint_sequential as checkpoint_sequential  # noqa: E402
from ._inspect import Stats as Stats  # noqa: E402
from ._inspect import materialize as materialize  # noqa: E402
from ._inspect import stats as stats  # noqa: E402
from ._marks import keep as keep  # noqa: E402
from ._opaque import opaque as opaque  # noqa: E402
from ._trace import Trace as Trace  # noqa: E402
from ._trace import record as record  # noqa: E402
from ._trace import simulate as simulate  # noqa: E402
from ._trace import warmup as warmup  # noqa: E402
from ._transform import remat as remat  # noqa: E402

__all__ = [
    "Budget",
    "BudgetError",
    "RematError",
    "ReplayError",
    "Stats",
    "Trace",
    "checkpoint",
    "checkpoint_sequential",
    "keep",
    "materialize",
    "opaque",
    "policies",
    "record",
    "remat",
    "simulate",
    "stats",
    "testing",
    "warmup",
]
