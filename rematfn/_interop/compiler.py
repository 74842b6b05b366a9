# SPDX-License-Identifier: Apache-2.0
"""Torch's compiler: what it is not to compile, and what levels have to know of it.

Note [The compiler is hidden from levels]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
The first call of a compiled function under a level compiles: dynamo's guards know the dispatch keys
that a thread includes, and ours is among them. Compiled code takes addresses, so this is refused,
but for the backend of ours: Note [Compiled pieces are operators]. The compiler runs operators of
its own. On record these would be the program's, and the next call, which compiles nothing, another
program. So the thread's levels are hidden while it does. The key stays, since the guards are made
from it. The first compilation of a process may load the compiler, in the middle of a call.

Note [Control flow is compiled by torch itself]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
In eager mode `torch.cond`, `while_loop`, `map`, `scan` and `flex_attention` have dynamo make graphs
of the functions they are given, and run these operator by operator: nothing is generated that takes
addresses, and each operator comes to the levels. So these compilations are let through. They are
known by who calls the compiler.
"""

import functools
import importlib.util
import sys
import traceback
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import Any, TypeVar

from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

from .. import _C
from .storages import tell

F = TypeVar("F", bound=Callable[..., Any])

_CALLBACKS = "torch._dynamo.callback"
_AS_PYTHON = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)


def not_compiled(f: F) -> F:
    """Have torch's compiler leave ``f``, and all that it calls, to Python.

    The attributes tell it so where it comes across a call in what it compiles; where ``f`` is what
    it was to begin with, only the code is asked.
    """
    f._torchdynamo_disable = True  # type: ignore[attr-defined]
    f._torchdynamo_disable_msg = "remat runs its function eagerly"  # type: ignore[attr-defined]
    set_code_exec_strategy(f.__code__, _AS_PYTHON)
    return f


def refuse_symbolic_trace(call: str) -> None:
    """Raise a TypeError if torch.fx asks, which traces functions of Python and nothing else."""
    asking = sys._getframe(2).f_code
    if asking.co_filename.endswith("/torch/fx/_symbolic_trace.py"):
        raise TypeError(
            f"torch.fx.symbolic_trace of {call}: its graph would be run without a level. Transform "
            "what is traced instead: remat(torch.fx.symbolic_trace(f), budget)."
        )


@functools.cache
def watch() -> None:
    """Have levels know of compilations, from when torch's compiler is loaded. Once per process."""
    loaded = sys.modules.get(_CALLBACKS)
    if loaded is None:
        sys.meta_path.insert(0, _WhenLoaded())
    else:
        _watch(loaded)


class _WhenLoaded(MetaPathFinder):
    """Watches the compiler from when it is loaded, be that in the middle of a call."""

    def find_spec(self, name: str, *_: Any) -> ModuleSpec | None:
        if name != _CALLBACKS:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None:
            tell(spec.loader, "exec_module", then=lambda module, _: _watch(module))
        return spec


def _watch(callbacks: Any) -> None:
    # What is registered there is forgotten at torch._dynamo.reset().
    tell(callbacks.callback_handler, "run_start_callbacks", _before_compilation)
    tell(callbacks.callback_handler, "run_end_callbacks", then=lambda *_: _C.show_levels())


def _before_compilation(*_: object) -> None:
    if not _C.is_intercepting() or _is_for_control_flow():
        return
    backend = _backend_of_compilation()
    if backend == "rematfn":
        _C.hide_levels()  # See Note [The compiler is hidden from levels]
        return
    raise RuntimeError(
        f'torch.compile(f, backend="{backend}") inside of remat: this code reads addresses, and no '
        'level sees that. Write torch.compile(f, backend="rematfn"), which makes operators of it, '
        "inside of the budget. Or write rematfn.opaque(torch.compile(f)) for a part that may run "
        "outside of it."
    )


def _backend_of_compilation() -> str:
    """Return the name of the backend for which dynamo compiles on this thread."""
    for frame, _ in traceback.walk_stack(sys._getframe()):
        if frame.f_code.co_filename.endswith("/torch/_dynamo/convert_frame.py"):
            backend = frame.f_locals.get("compiler_fn")
            if backend is not None:
                while inner := _wrapped_by(backend):
                    backend = inner
                return str(getattr(backend, "compiler_name", None) or backend.__name__)
    return "unknown"


def _wrapped_by(backend: Any) -> Any:
    """Return the backend that this one hands graphs to, or None: DDP's cuts them up before."""
    of_ddp = getattr(getattr(backend, "__self__", None), "backend_compile_fn", None)
    return getattr(backend, "_torchdynamo_orig_backend", of_ddp)


# See Note [Control flow is compiled by torch itself]
def _is_for_control_flow() -> bool:
    entered = False
    for frame, _ in traceback.walk_stack(sys._getframe()):
        if frame.f_code.co_filename.endswith("/torch/_dynamo/eval_frame.py"):
            entered = True
        elif entered:
            folder, _, name = frame.f_code.co_filename.rpartition("/")
            return folder.endswith("/torch/_higher_order_ops") or (
                name == "flex_attention.py" and frame.f_code.co_name == "flex_attention"
            )
    return False
