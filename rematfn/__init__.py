# SPDX-License-Identifier: Apache-2.0
"""Memory budgets for PyTorch, as function transforms."""

__version__ = "0.1.0"

from . import errors
from ._interop.compat import load_core as _load_core
from .errors import BudgetError, ReplayError

_C = _load_core()

from ._interop.pytrees import inner_tensors as _inner_tensors  # noqa: E402  (needs torch)

_C.set_errors(BudgetError, ReplayError, errors.OffloadError)
_C.set_inner_tensors(_inner_tensors)
_C.register_kernels()

from . import policies, testing  # noqa: E402  (need the extension)
from ._inspection.explain import explain  # noqa: E402
from ._inspection.stats import stats  # noqa: E402
from ._inspection.timeline import timeline  # noqa: E402
from ._interop.opaque import opaque  # noqa: E402
from ._interop.tensors import keep, materialize  # noqa: E402
from ._traces.profile import profile  # noqa: E402
from ._traces.trace import Trace, record, simulate, warmup  # noqa: E402
from ._transform.budget import Budget  # noqa: E402
from ._transform.checkpoint import checkpoint  # noqa: E402
from ._transform.offload import offload  # noqa: E402
from ._transform.remat import remat  # noqa: E402
from ._transform.tiers import Disk, Host, Packed  # noqa: E402
from ._transform.where import where  # noqa: E402

__all__ = [
    "Budget",
    "BudgetError",
    "Disk",
    "Host",
    "Packed",
    "ReplayError",
    "Trace",
    "checkpoint",
    "errors",
    "explain",
    "keep",
    "materialize",
    "offload",
    "opaque",
    "policies",
    "profile",
    "record",
    "remat",
    "simulate",
    "stats",
    "testing",
    "timeline",
    "warmup",
    "where",
]
