# SPDX-License-Identifier: Apache-2.0
"""A function under a budget: what `remat` makes of one."""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
import sys
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, Generic, NoReturn, ParamSpec, TypeVar

import torch

from .. import _C
from .._interop.compiler import not_compiled, refuse_symbolic_trace
from ..policies._planned import Planned
from .advice import judge_plan, look_at_result, look_back, name_of, refuse
from .budget import Limit
from .history import Call, History
from .level import LevelOptions, call
from .options import Options
from .recorded import RecordedProgram
from .signature import Signature, signature_of
from .where import asked, module_paths

P = ParamSpec("P")
R = TypeVar("R")


class Transformed(Generic[P, R]):
    """A function under a budget, as :func:`remat` returns it.

    Attributes:
        budget: The budget as it was parsed.
        policy: What is evicted when room is needed.
        last_call: What the last call did, and its backward goes on to do (:func:`rematfn.stats`).
    """

    # Not in `__dict__`, which what wraps the function copies.
    __slots__ = (
        *("__dict__", "__weakref__", "budget", "policy", "last_call"),
        *("_f", "_options", "_history", "_described", "_level"),
    )

    @not_compiled  # until 2.13 the compiler made objects whose slots are empty
    def __init__(self, f: Callable[P, R], options: Options, history: History | None = None) -> None:
        functools.update_wrapper(self, f)
        self.budget = options.budget
        self.policy = options.policy
        self.last_call: Call | None = None
        self._f = f
        self._options = options
        self._history = History() if history is None else history
        tiers = options.tiers.as_option(options.name)
        self._described = f"{options.name}({options.of or name_of(f)}, budget={self.budget}{tiers})"
        self._level: LevelOptions | None = None  # of every call

    @not_compiled
    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> R:
        if self is _without_level.get():
            return self._f(*args, **kwargs)
        if self.last_call is not None:
            look_back(self, self.last_call, of_the_last=True)
        threads = self._history.threads
        recurs = threading.get_ident() in threads
        options, ran = self._resolve(args, kwargs, recurs)
        ran.limit = self.budget
        fail: Callable[[], None] | None = None

        def started(level: _C.Level) -> None:
            nonlocal fail
            ran.report = level.report()
            self.last_call = ran
            if _C.stack_depth() == 1:
                ran.to_judge = options.budget is not None and self._options.limit < math.inf
            if ran.signature is not None:
                fail = self._history.begin(ran.signature, ran)

        threads.add(ran.thread)
        try:
            root = getattr(self._f, "__self__", None)
            with module_paths(root) if options.where else nullcontext():
                result: R
                result, ran.stored_bytes = call(self._f, args, kwargs, options, started)
        except BaseException:
            if fail is not None:
                fail()
            ran.to_judge = False
            raise
        finally:
            if not recurs:
                threads.discard(ran.thread)
        look_back(self, ran, of_the_last=False)
        if not self._history.result_seen:
            self._history.result_seen = True
            look_at_result(self, self._f, result, (*args, *kwargs.values()), ran)
        return result

    def __prepare_scriptable__(self) -> NoReturn:
        raise TypeError(
            f"torch.jit.script of {self._described}: TorchScript would run the function without "
            "its level. Transform what is scripted instead: remat(torch.jit.script(f), budget)."
        )

    def _resolve(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], recurs: bool = False
    ) -> tuple[LevelOptions, Call]:
        """Return how to call, and what is known of the call."""
        options = self._level_options()
        fraction, shared = self.budget.fraction, self.budget.shared
        # Only the outermost level is recorded and guided: its record holds what runs inside. Where
        # nothing is planned, the record of a first call serves the figure of a BudgetError.
        outermost = _C.stack_depth() == 0
        # What a call may have of a shared budget is known only when it asks: it is not planned for.
        planned = (options.budget is not None or options.leaves_early) and shared is None
        if fraction is None and not (planned and outermost):
            why = (
                "its budget is shared"
                if shared is not None
                else "it runs inside another level"
                if planned
                else "there is no budget"
            )
            return options, Call("online", why)
        if recurs and not outermost and fraction is not None:
            # What the call around it has held so far is no peak, and its cap is the same.
            return options, Call("online", "the call of the function around it has the budget")
        if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None:
            return options, Call("online", "it runs on shapes alone")
        guided = outermost and isinstance(self.policy, Planned)
        # See Note [What makes two calls alike]
        signature = signature_of(args, kwargs, getattr(self._f, "__self__", None))
        ran = self._history.forecast(signature, guided=guided, outermost=outermost)
        options = copy.copy(options)
        options.record, options.known = ran.record, ran.known
        if outermost:
            options.most_replays = self._options.stopped_at
        if fraction is not None and ran.expected_bytes is not None:
            peak = ran.of_bytes = max(ran.expected_bytes, ran.largest_bytes)
            options.budget = self.budget.of(peak)
            options.fraction = fraction
            options.is_estimate = ran.is_estimate and ran.gives_way
            options.is_estimate_unguided = ran.gives_way
            options.peak = 0 if ran.is_estimate else peak
        if ran.program is not None:
            self._follow(ran.program, options, signature, ran, (args, kwargs))
        return options, ran

    def _level_options(self) -> LevelOptions:
        """Return what all calls have in common."""
        if self._level is None:
            shared, without_budget = self.budget.shared, self.budget == Limit()
            self._level = LevelOptions(
                budget=self.budget.bytes,
                shared=shared._shared if shared is not None else None,
                policy=self.policy.core(),
                discards=self.policy.discards and without_budget,
                # What moving takes is compared with it.
                timed=self._options.cost == "time" or bool(self._options.tiers),
                verify=self._options.verify,
                name=self._described,
                max_operations=self._options.max_operations,
                tiers=self._options.tiers.open(),
                drops=self._options.drops,
                leaves_early=not self._options.drops and without_budget,
                unit=self.budget.unit,
                where=self._options.where,
            )
        if asked.blocks and not self._level.where:
            return dataclasses.replace(self._level, where=True)
        return self._level

    def _follow(
        self,
        recorded: RecordedProgram,
        options: LevelOptions,
        signature: Signature,
        ran: Call,
        given: object,
    ) -> None:
        """Have a call follow a plan, if there is one for its budget."""
        assert isinstance(self.policy, Planned)
        # See Note [Offload keeps to what its first call came to]
        budget = recorded.held_bytes if options.leaves_early else options.budget
        assert budget is not None
        link = self._options.tiers.link(options.drops, given)
        program = recorded.program
        if not ran.as_recorded:
            self._follow_nearest(recorded, options, budget, link, ran)
            return
        options.program = program
        if program is not None:
            like = None
            if recorded.planned is None:
                like = recorded.start_for(budget)
                if like is None and budget < recorded.peak_bytes:
                    like = self._history.like(signature)
            self.policy.begin(program, budget, like=like, link=link)
            program.follow()
        planned = recorded.planned
        if planned is not None:
            if not self._options.tiers:
                judge_plan(self, ran, planned, budget)
            ran.settled = planned.is_settled()
            if options.leaves_early:
                options.budget, options.is_estimate, options.leaves_early = budget, True, False
            return
        is_known = not ran.is_estimate or self._history.is_alike(signature)
        if not options.leaves_early and is_known and program and program.writes_outside:
            refuse(self, ran, program, budget, link)
        ran.kind, ran.why = "online", "no plan fits its budget"

    # See Note [A record guides calls that are not like it]
    def _follow_nearest(
        self,
        recorded: RecordedProgram,
        options: LevelOptions,
        budget: int,
        link: _C.Link | None,
        ran: Call,
    ) -> None:
        assert isinstance(self.policy, Planned)
        # What `offload` keeps to, without a budget, is the record's; its times are, too.
        if not options.leaves_early:
            peak = ran.expected_bytes or recorded.peak_bytes
            program = recorded.for_another(self.policy, budget, peak, link)
            if program is not None:
                program.follow(alike=False)
            if program is not None and program.overhead() < math.inf:
                options.program, options.as_recorded = program, False
                ran.kind, ran.why = "guided", f"by the record of another call: {ran.why}"
                return
        ran.record = options.record = True

    def __get__(self, instance: object, owner: type | None = None) -> Callable[..., R]:
        """Bind where `f` would: functions do, and neither bound methods nor most objects."""
        bind = getattr(type(self._f), "__get__", None)
        if instance is None or bind is None or bind(self._f, instance, owner) is self._f:
            return self
        return types.MethodType(self, instance)

    def __getattr__(self, name: str) -> Any:
        """Return what `f` has, such as `__code__`, but not what it is bound to."""
        if name in Transformed.__slots__ or name in ("__self__", "__func__"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        if name == "__code__":
            refuse_symbolic_trace(self._described)
        return getattr(self._f, name)

    def __reduce__(self) -> str | tuple[Any, ...]:
        """Pickle the name, as functions do, or else `f` and the options; no history of calls."""
        if self._is_importable():
            return str(self.__qualname__)
        return Transformed, (self._f, self._options)

    def __deepcopy__(self, memo: dict[int, Any]) -> Transformed[P, R]:
        if self._is_importable():
            return self
        return Transformed(copy.deepcopy(self._f, memo), self._options)

    def _is_importable(self) -> bool:
        """Return whether the name that `f` was defined under now is this, as a decorator's is."""
        found: Any = sys.modules.get(getattr(self, "__module__", None) or "")
        for name in getattr(self, "__qualname__", "").split("."):
            found = getattr(found, name, None)
        return found is self

    def __repr__(self) -> str:
        return f"<{self._described} at {id(self):#x}>"


_without_level: ContextVar[Transformed[..., Any] | None] = ContextVar("without_level", default=None)


@contextmanager
def without_level(g: Any) -> Iterator[None]:
    """Have the transformed function that ``g`` is or wraps run plainly within the block."""
    try:
        inside: Transformed[..., Any] | None = transformed_of(g, "")[0]
    except TypeError:
        inside = None
    token = _without_level.set(inside)
    try:
        yield
    finally:
        _without_level.reset(token)


def transformed_of(
    g: Any, call: str
) -> tuple[Transformed[..., Any], tuple[Any, ...], dict[str, Any]]:
    """Return the outermost transformed function that ``g`` is or wraps, and arguments it is given.

    Raises:
        TypeError: There is none that can be found; ``call`` is the function that was given ``g``.
    """
    inside, seen = g, set[int]()
    given: tuple[Any, ...] = ()
    named: dict[str, Any] = {}
    while not isinstance(inside, Transformed):
        seen.add(id(inside))
        names = ["__transformed__", "__func__", "__wrapped__"]
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
