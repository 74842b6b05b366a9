# SPDX-License-Identifier: Apache-2.0
"""Traces: what a program does to memory, written down, and what a budget would make of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .. import _C
from .._C import format_bytes
from .._inspection.stats import Stats
from .._transform.budget import BudgetLike, parse_budget
from .._transform.deferred import refuse_deferred
from .._transform.level import LevelOptions, call
from .._transform.options import policy_of
from .._transform.remat import DEFAULT_POLICY
from .._transform.signature import signature_of
from .._transform.transformed import transformed_of
from ..errors import BudgetError, expect
from ..policies import Policy
from ..policies._custom import Scorer
from ..policies._planned import Planned
from . import file
from .shapes import is_on_shapes, trace_on_shapes


class Trace:
    """The sequence of operators of a program, by sizes, without tensors.

    It says what each operator reads, makes, overwrites and costs, and when the program drops a
    value. :func:`record` makes one, :meth:`load` reads one from a file; :func:`simulate` runs it.

    Attributes:
        operators: How many operators ran.
        peak_bytes: The most bytes of values made inside that were alive at once.
        constant_bytes: The bytes of what came from outside: arguments, parameters. The DTR
            simulator counts these in its peak; we do not.
        cost: What the operators cost together, in seconds.
        flops: The FLOPs of their matrix products, convolutions and attention.
    """

    def __init__(self, core: _C.Trace) -> None:
        core.check()
        self._core = core
        unconstrained: Any = _C.simulate(core, None, DEFAULT_POLICY.core(), None, "", 0)
        self.operators: int = unconstrained["operators"]
        self.peak_bytes: int = unconstrained["peak_bytes"]
        self.constant_bytes = sum(nbytes for nbytes, counted in core.values() if not counted)
        calls = [data for kind, data in core.events() if kind == "call"]
        self.cost = sum(call[1] for call in calls)
        self.flops = sum(call[2] for call in calls)

    @classmethod
    def load(cls, path: str | Path) -> Trace:
        """Read a trace in the format of the DTR simulator.

        That is one JSON object a line (Kirisame et al., *Dynamic Tensor Rematerialization*, ICLR
        2021, appendix C.6). An operator whose results all alias its arguments moves no bytes and is
        left out; its time counts in no cost.

        Args:
            path: The file; one that ends in ``.gz`` is decompressed.

        Raises:
            ValueError: A line is not what the format has at that place; the message names the line.
        """
        return cls(file.read(path))

    def save(self, path: str | Path) -> None:
        """Write the trace in the format of the DTR simulator, as :meth:`load` reads it.

        Other readers may ignore these additions to the format:

        - keys: ``FLOPS``, ``SCRATCH`` (bytes of a call), ``REPLAYABLE``, ``RAW`` (uninitialised),
          ``BACKWARD`` (called by autograd), ``WRITES`` (arguments from outside that are
          overwritten);
        - annotations: ``SEAL`` (a value becomes a result), ``STORED`` (a value that the function
          has stored away leaves, if it has room), ``FILLED`` (raw memory becomes a constant),
          ``ADDRESSED`` (a value whose address somebody has is not moved any more), ``READ`` (a
          value is there at this moment, though no operator reads it), ``MARK`` (:func:`keep` marks
          a value), ``UNRECORDED`` (bytes that are alive from there on and that no operator has
          made).
        """
        file.write(self._core, path)

    def __repr__(self) -> str:
        return f"<Trace of {self.operators} operators, peak {format_bytes(self.peak_bytes)}>"


def record(f: Callable[..., Any], *args: Any, **kwargs: Any) -> Trace:
    """Run ``f(*args, **kwargs)`` without a cap, and return the trace of its operators.

    A backward pass is in the trace if it runs inside ``f``: record a training step, or a gradient
    function such as ``torch.func.grad(loss)``.

    On fake tensors, or under a ``FakeTensorMode``, the trace is of shapes alone, and nothing is
    computed. The scratch of kernels is not in it then.

    Args:
        f: A function of tensors.
        *args: Its arguments. They are written to, and random numbers are drawn, as in any call.
        **kwargs: The same, by name.

    Example:
        >>> import torch, rematfn
        >>> def loss(x):
        ...     return x.sin().cos().exp().sum()
        >>> trace = rematfn.record(torch.func.grad(loss), torch.ones(1024))
        >>> trace.peak_bytes > 3 * 4096
        True
    """
    expect(callable(f), "record(f, *args)", "a function", f)
    refuse_deferred(f, "record(f)")
    if is_on_shapes((args, kwargs)):
        return Trace(trace_on_shapes(f, args, kwargs, backward=False))
    return Trace(recorded(f, args, kwargs, "record"))


def recorded(
    f: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    name: str,
    *,
    budget: int | None = None,
    unit: str = "",
    timed: bool = False,
    tiers: Sequence[_C.Tier] = (),
) -> _C.Trace:
    """Call ``f`` in a level of its own, and return what was written down, for function ``name``.

    How well its values can be packed is written down if one of the ``tiers`` does that.
    """
    if _C.stack_depth() > 0:
        raise RuntimeError(f"{name}(f): it cannot run inside of another level; call it outside.")
    options = LevelOptions(
        budget=budget,
        policy=DEFAULT_POLICY.core(),
        timed=timed,
        name=name,
        record=True,
        unit=unit,
        tiers=tiers,
    )
    levels: list[_C.Level] = []
    call(f, args, kwargs, options, levels.append)
    trace = levels[0].report().take_trace()
    if trace is None:
        raise RuntimeError(f"{name}(f): the call has more operators than are recorded.")
    return trace


def warmup(g: Callable[..., Any], *args: Any, **kwargs: Any) -> Trace:
    """Measure what ``g(*args, **kwargs)`` needs, so that even its first call has a plan.

    The function runs on fake tensors, which have shapes and no contents: nothing is computed, no
    memory is taken, no tensor is written to, no random number is drawn. If its results have
    gradients, their backward runs as well. For the call itself, and for those of other sizes, the
    peak is then known, except for the scratch of kernels: a fraction of it holds from the first
    call on. That call follows a plan as later ones do, if ``g`` has a budget and a policy
    that plans (:class:`rematfn.policies.Guided`, the default).

    Args:
        g: What :func:`remat` has returned: a function, a method, a module.
        *args: Arguments as for ``g``.
        **kwargs: The same, by name.

    Returns:
        The trace, as :func:`record` would on fake tensors.

    Raises:
        TypeError: ``g`` is not a transformed function.
        RuntimeError: The function asks for the contents of a tensor (``item()``, ``nonzero()``), or
            is a lazy module.

    Example:
        >>> import torch, rematfn
        >>> g = rematfn.remat(lambda x: x.sin().cos().exp().sum(), 0.9)
        >>> trace = rematfn.warmup(g, torch.ones(1024))
        >>> g(torch.ones(1024)), rematfn.stats(g).budget is not None
        (tensor(...), True)
    """
    transformed, given, named = transformed_of(g, "warmup")
    args, kwargs = (*given, *args), {**named, **kwargs}
    trace = Trace(trace_on_shapes(transformed._f, args, kwargs, backward=True))
    signature = signature_of(args, kwargs, getattr(transformed._f, "__self__", None))
    transformed._history.know(signature, trace.peak_bytes, trace._core)
    return trace


def simulate(
    trace: Trace, budget: BudgetLike = None, policy: Policy | Scorer = DEFAULT_POLICY
) -> Stats:
    """Return what a run of ``trace`` within ``budget`` would do, without running it.

    The engine is that of :func:`remat`, on sizes instead of tensors: it evicts and replays what a
    call of the recorded function would.

    Args:
        trace: A recorded program.
        budget: As for :func:`remat`; a fraction is one of ``trace.peak_bytes``.
        policy: As for :func:`remat`, with the same default, :class:`Guided`. With that, and others
            that plan, this is what a call does that follows what the search comes to in the end:
            one that comes after enough others. The first call is what ``policy.first`` makes of it.

    Raises:
        BudgetError: The trace does not fit.

    Example:
        >>> import torch, rematfn
        >>> def loss(x):
        ...     return x.sin().cos().exp().sum()
        >>> trace = rematfn.record(torch.func.grad(loss), torch.ones(8))
        >>> rematfn.simulate(trace, 0.9, rematfn.policies.reference.DTR()).replays >= 0
        True
    """
    is_trace = isinstance(trace, Trace)
    expect(is_trace, "simulate(trace)", "a Trace, as record() returns,", trace)
    policy = policy_of(policy, "simulate(trace, policy=...)")
    parsed = parse_budget(budget, "simulate(trace, budget={})")
    nbytes = parsed.of(trace.peak_bytes)
    program = None
    if isinstance(policy, Planned) and nbytes is not None:
        program = _C.Program(trace._core)
        policy.begin(program, nbytes)
        program.finish()
    of = 0 if parsed.fraction is None else trace.peak_bytes
    found = _C.simulate(trace._core, nbytes, policy.core(), program, parsed.unit, of)
    if isinstance(found, dict):
        found.pop("replayed_calls")
        kind = "online" if program is None else "guided"
        return Stats(**found, call=kind, why="it was simulated")
    enough, kept, thrashes = found
    if thrashes:
        why = "replays evict each other's inputs"
    elif kept == 0:
        why = "one operator needs more at once"
    else:
        why = f"{format_bytes(kept, parsed.unit)} cannot go"
    raise BudgetError(
        f"simulate(trace, budget={parsed}): the trace does not fit, {why}. "
        f"Raise the budget to {enough}."
    )
