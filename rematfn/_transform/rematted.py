# SPDX-License-Identifier: Apache-2.0
"""A function under a budget: what `remat` makes of one."""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Generic, NoReturn, ParamSpec, TypeVar

import torch

from .. import _C
from .._interop.opaque import not_compiled, refuse_symbolic_trace, watch_compiler
from ..policies._planned import Planned
from .advice import advise, advise_of_deferred, refuse
from .budget import Limit
from .history import Forecast, History, Ran
from .level import LevelOptions, call
from .options import Options
from .signature import Signature, signature_of
from .thrash import tell_of_thrashing
from .where import is_asked_where, module_paths, note_called

P = ParamSpec("P")
R = TypeVar("R")


class Rematted(Generic[P, R]):
    """A function under a budget, as :func:`remat` returns it.

    Attributes:
        budget: The budget as it was parsed.
        policy: What is evicted when room is needed.
        last_call: What the last call did, and its backward goes on to do (:func:`rematfn.stats`).
    """

    # Not in `__dict__`, which what wraps the function copies.
    __slots__ = (
        *("__dict__", "__weakref__", "budget", "policy", "last_call"),
        *("_f", "_options", "_history"),
    )

    @not_compiled  # until 2.13 the compiler made objects whose slots are empty
    def __init__(self, f: Callable[P, R], options: Options, history: History | None = None) -> None:
        functools.update_wrapper(self, f)
        self.budget = options.budget
        self.policy = options.policy
        self.last_call: Ran | None = None
        self._f = f
        self._options = options
        self._history = History() if history is None else history

    @not_compiled
    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> R:
        if self is _without_level.get():
            return self._f(*args, **kwargs)
        watch_compiler()
        return self._run(args, kwargs)

    def __prepare_scriptable__(self) -> NoReturn:
        """Refuse :func:`torch.jit.script`, which asks for this."""
        raise TypeError(
            f"torch.jit.script of {self._describe()}: TorchScript would run the function without "
            "its level. Transform what is scripted instead: remat(torch.jit.script(f), budget)."
        )

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> R:
        if self.last_call is not None:
            self._judge(self.last_call, of_the_last=True)
            advise(self._describe(), self.last_call, self._history)
        options, signature, forecast = self._resolve(args, kwargs)
        failed: list[Callable[[], None]] = []
        begun: list[Ran] = []

        def started(level: _C.Level) -> None:
            ran = Ran(level.report(), forecast, self.budget.fraction)
            self.last_call = ran
            begun.append(ran)
            ran.signature = signature
            ran.to_judge = _C.stack_depth() == 1 and options.budget is not None
            ran.to_judge &= self._options.limit < math.inf
            ran.to_advise = ran.to_judge
            if options.where and _C.stack_depth() == 1:
                note_called(self)
            if signature is not None:
                failed.append(self._history.begin(signature, ran))

        try:
            with module_paths(options.where, getattr(self._f, "__self__", None)):
                result: R
                result, stored_bytes = call(self._f, args, kwargs, options, started)
        except BaseException:
            for fail in failed:
                fail()
            for ran in begun:
                ran.to_judge = ran.to_advise = False
            raise
        for ran in begun:
            ran.stored_bytes = stored_bytes
            self._judge(ran, of_the_last=False)
            advise(self._describe(), ran, self._history)
            if not self._history.result_seen:
                self._history.result_seen = True
                self._look_at(result, (*args, *kwargs.values()), ran)
        return result

    def _look_at(self, result: Any, given: tuple[Any, ...], ran: Ran) -> None:
        """Say so if a call has returned what computes later."""
        if self.budget == Limit() and not self._options.tiers:
            return
        transform, of_module = self._options.name, bool(self._options.of)
        f = "module" if of_module else name_of(self._f).replace("<lambda>", "f")
        instead = f"{transform}(lambda c, x: {f}(c).log_prob(x), budget)"
        if of_module:
            instead += f', or methods by name, {transform}(module, budget, methods=["log_prob"])'
        owner = getattr(self._f, "__self__", self._f)
        advise_of_deferred(self._describe(), instead, result, (*given, owner), ran)

    def _judge(self, ran: Ran, of_the_last: bool) -> None:
        """Say so if a call that is over, its backward included, has replayed too much."""
        if not ran.to_judge or not ran.report.is_over():
            return
        ran.to_judge = False
        if ran.report.stopped:  # and that was said
            return
        follows = ran.forecast.kind == "guided" and not ran.report.guide_lost
        if follows and not self._options.tiers:  # it was judged by its plan
            return
        figures = ran.read()
        replayed = figures["replayed_cost"]
        if self._options.limit < replayed < math.inf:
            program = self._history.record_of(
                ran.signature, ran, guided=isinstance(self.policy, Planned)
            )
            call = self._describe() + (": the last call" if of_the_last else ": the call")
            tell_of_thrashing(
                call,
                self._options,
                self._history,
                replayed,
                figures["budget"],
                program,
                done=of_the_last,
            )

    def _judge_plan(self, program: _C.Program, budget: int) -> None:
        """Report replays beyond `most_replays`; where that is an error, once the search is over."""

        def replayed() -> float:
            return program.overhead() / (program.cost or math.inf)

        limit = self._options.limit
        if limit < replayed() < math.inf and self._options.most_replays is not None:
            program.finish()
        if limit < replayed() < math.inf and program.is_settled():
            call = f"{self._describe()}: the call, by its plan,"
            tell_of_thrashing(call, self._options, self._history, replayed(), budget, program)

    def know(self, args: tuple[Any, ...], kwargs: dict[str, Any], peak_bytes: int) -> None:
        """Note the unconstrained peak of calls with these arguments."""
        self._history.know(self._signature(args, kwargs), peak_bytes)

    def _signature(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Signature:
        return signature_of(args, kwargs, getattr(self._f, "__self__", None))

    def _resolve(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[LevelOptions, Signature | None, Forecast]:
        """Return how to call, the signature if what it does is to be known, and what is known."""
        shared = self.budget.shared
        options = LevelOptions(
            budget=self.budget.bytes,
            shared=shared._shared if shared is not None else None,
            policy=self.policy.core(),
            discards=self.policy.discards and self.budget == Limit(),
            # What moving takes is compared with it.
            timed=self._options.cost == "time" or bool(self._options.tiers),
            verify=self._options.verify,
            name=self._describe(),
            max_operations=self._options.max_operations,
            tiers=self._options.tiers.open(),
            drops=self._options.drops,
            leaves_early=not self._options.drops and self.budget == Limit(),
            unit=self.budget.unit,
            where=self._options.where or is_asked_where(),
        )
        fraction = self.budget.fraction
        # Only the outermost level is recorded and guided: its record holds what runs inside. Where
        # nothing is planned, the record of a first call serves the figure of a BudgetError.
        outermost = _C.stack_depth() == 0
        # What a call may have of a shared budget is known only when it asks: it is not planned for.
        planned = (options.budget is not None or options.leaves_early) and shared is None
        if fraction is None and not (planned and outermost):
            why = (
                "there is no budget"
                if options.budget is None and not planned
                else "its budget is shared"
                if shared is not None
                else "it runs inside another level"
            )
            return options, None, Forecast("online", why)
        if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None:
            return options, None, Forecast("online", "it runs on shapes alone")
        guided = outermost and isinstance(self.policy, Planned)
        signature = self._signature(args, kwargs)  # See Note [What makes two calls alike]
        forecast = self._history.forecast(signature, guided=guided, outermost=outermost)
        options = dataclasses.replace(options, record=forecast.record, known=forecast.known)
        if outermost and self._options.most_replays is not None:
            options = dataclasses.replace(options, most_replays=self._options.most_replays)
        if fraction is not None and forecast.peak_bytes is not None:
            peak = max(forecast.peak_bytes, forecast.largest_bytes)
            options = dataclasses.replace(
                options,
                budget=max(1, int(fraction * peak)),
                fraction=fraction,
                is_estimate=forecast.is_estimate and forecast.gives_way,
                is_estimate_unguided=forecast.gives_way,
                peak=0 if forecast.is_estimate else peak,
            )
        recorded = forecast.program
        if recorded is not None:
            assert isinstance(self.policy, Planned)
            # See Note [Offload keeps to what its first call came to]
            budget = recorded.peak_bytes if options.leaves_early else options.budget
            assert budget is not None
            link = self._options.tiers.link(options.drops, (args, kwargs))
            program = recorded.program()
            if program is not None:
                like = None if recorded.planned else self._history.like(signature)
                self.policy.begin(program, budget, like=like, link=link)
                program.follow()
            options = dataclasses.replace(options, program=program)
            planned_for = recorded.planned
            if planned_for is not None and not self._options.tiers:
                self._judge_plan(planned_for, budget)
            if planned_for is None:
                if (
                    program is not None
                    and program.writes_outside
                    and (not forecast.is_estimate or self._history.is_alike(signature))
                ):
                    refuse(self._describe(), program, self.policy, self.budget, budget, link)
                why = "no plan fits its budget"
                forecast = dataclasses.replace(forecast, kind="online", why=why)
            else:
                forecast = dataclasses.replace(forecast, settled=planned_for.is_settled())
                if options.leaves_early:
                    options = dataclasses.replace(
                        options, budget=budget, is_estimate=True, leaves_early=False
                    )
        return options, signature, forecast

    def _describe(self) -> str:
        name = self._options.of or name_of(self._f)
        tiers = self._options.tiers.as_option(self._options.name)
        return f"{self._options.name}({name}, budget={self.budget}{tiers})"

    def __get__(self, instance: object, owner: type | None = None) -> Callable[..., R]:
        """Bind where `f` would: functions do, and neither bound methods nor most objects."""
        bind = getattr(type(self._f), "__get__", None)
        if instance is None or bind is None or bind(self._f, instance, owner) is self._f:
            return self
        return types.MethodType(self, instance)

    def __getattr__(self, name: str) -> Any:
        """Return what `f` has, such as `__code__`, but not what it is bound to."""
        if name in Rematted.__slots__ or name in ("__self__", "__func__"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        if name == "__code__":
            refuse_symbolic_trace(self._describe())
        return getattr(self._f, name)

    def __reduce__(self) -> str | tuple[Any, ...]:
        """Pickle the name, as functions do, or else `f` and the options; no history of calls."""
        if self._is_importable():
            return str(self.__qualname__)
        return Rematted, (self._f, self._options)

    def __deepcopy__(self, memo: dict[int, Any]) -> Rematted[P, R]:
        if self._is_importable():
            return self
        return Rematted(copy.deepcopy(self._f, memo), self._options)

    def _is_importable(self) -> bool:
        """Return whether the name that `f` was defined under now is this, as a decorator's is."""
        found: Any = sys.modules.get(getattr(self, "__module__", None) or "")
        for name in getattr(self, "__qualname__", "").split("."):
            found = getattr(found, name, None)
        return found is self

    def __repr__(self) -> str:
        return f"<{self._describe()} at {id(self):#x}>"


def name_of(f: Any) -> str:
    """Return what messages call ``f``: of a module's ``forward``, the module's class."""
    while isinstance(f, functools.partial):
        f = f.func
    name = getattr(f, "__name__", type(f).__name__)
    owner = getattr(f, "__self__", None)
    is_forward = name == "forward" and isinstance(owner, torch.nn.Module)
    return str(type(owner).__name__ if is_forward else name)


_without_level: ContextVar[Rematted[..., Any] | None] = ContextVar("without_level", default=None)


@contextmanager
def without_level(g: Any) -> Iterator[None]:
    """Have the rematted function that ``g`` is or wraps, if any, run plainly within the block."""
    try:
        inside: Rematted[..., Any] | None = rematted_of(g, "")[0]
    except TypeError:
        inside = None
    token = _without_level.set(inside)
    try:
        yield
    finally:
        _without_level.reset(token)


def rematted_of(g: Any, call: str) -> tuple[Rematted[..., Any], tuple[Any, ...], dict[str, Any]]:
    """Return the outermost rematted function that ``g`` is or wraps, and arguments it is given.

    Raises:
        TypeError: There is none that can be found; ``call`` is the function that was given ``g``.
    """
    inside, seen = g, set[int]()
    given: tuple[Any, ...] = ()
    named: dict[str, Any] = {}
    while not isinstance(inside, Rematted):
        seen.add(id(inside))
        names = ["__rematted__", "__func__", "__wrapped__"]
        if isinstance(inside, functools.partial | functools.partialmethod):
            names = ["func"]
            given = (*inside.args, *given)
            named = {**inside.keywords, **named}
        elif isinstance(inside, types.MethodType):
            given = (inside.__self__, *given)
        inside = next((x for n in names if (x := getattr(inside, n, None)) is not None), None)
        if inside is None or id(inside) in seen:
            raise TypeError(
                f"{call}(g): what remat() or offload() returned is needed, got {g!r}, which "
                f"wraps no such function that can be found. Keep what they return, and pass that: "
                f"g = remat(f, ...), rematfn.{call}(g). Of a module inside of another one, pass "
                f"the one inside."
            )
    return inside, given, named
