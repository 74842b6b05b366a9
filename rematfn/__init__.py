# SPDX-License-Identifier: Apache-2.0
"""Memory budgets for PyTorch, as function transforms."""

__version__ = "0.1.0"

from . import errors as errors
from ._interop.compat import load_extension as _load_extension
from .errors import BudgetError as BudgetError
from .errors import ReplayError as ReplayError

_C = _load_extension()

from ._interop.subclasses import inner_tensors as _inner_tensors  # noqa: E402  (needs torch)

_C.set_errors(BudgetError, ReplayError, errors.OffloadError)
_C.set_inner_tensors(_inner_tensors)
_C.register_kernels()

from . import policies as policies  # noqa: E402  (needs the extension)
from . import testing as testing  # noqa: E402
from ._inspection.explain import explain as explain  # noqa: E402
from ._inspection.stats import stats as stats  # noqa: E402
from ._inspection.timeline import timeline as timeline  # noqa: E402
from ._interop.materialize import materialize as materialize  # noqa: E402
from ._interop.opaque import opaque as opaque  # noqa: E402
from ._traces.profile import profile as profile  # noqa: E402
from ._traces.trace import Trace as Trace  # noqa: E402
from ._traces.trace import record as record  # noqa: E402
from ._traces.trace import simulate as simulate  # noqa: E402
from ._traces.trace import warmup as warmup  # noqa: E402
from ._transform.budget import Budget as Budget  # noqa: E402
from ._transform.checkpoint import checkpoint as checkpoint  # noqa: E402
from ._transform.checkpoint import checkpoint_sequential as checkpoint_sequential  # noqa: E402
from ._transform.marks import keep as keep  # noqa: E402
from ._transform.offload import offload as offload  # noqa: E402
from ._transform.remat import remat as remat  # noqa: E402
from ._transform.tiers import Disk as Disk  # noqa: E402
from ._transform.tiers import Host as Host  # noqa: E402
from ._transform.where import where as where  # noqa: E402

__all__ = [
    "Budget",
    "BudgetError",
    "Disk",
    "Host",
    "ReplayError",
    "Trace",
    "checkpoint",
    "checkpoint_sequential",
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
