# SPDX-License-Identifier: Apache-2.0
"""Functions whose insides no level sees: compiled ones, above all.

Note [Compiled code reads addresses]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
What torch.compile generates takes the addresses of its arguments and buffers. Some of its steps are
operators all the same. Under a level these would be recorded as readers and writers of buffers that
the steps between them overwrite unseen, and a replay would be silently wrong. And the
compiler itself runs operators, on tensors that are not the program's.

So compiled code runs outside: its arguments are made resident together, and until it returns no
operator comes to a level, so none is evicted. The same goes for its part of the backward pass,
which reads what it saved: a hook on its node sees to that, and the engine ends it with the node.

Nobody is to forget it: the first call of a compiled function under a level compiles (dynamo's
guards know the dispatch keys, and ours is among them), and a compilation under a level is refused,
but for the backend of ours: Note [Compiled pieces are operators].

Note [Control flow is compiled by torch itself]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
In eager mode `torch.cond`, `while_loop`, `map`, `scan` and `flex_attention` have dynamo make graphs
of the functions they are given, and run these operator by operator: nothing is generated that takes
addresses, and each operator comes to the levels. So these compilations are let through. They are
known by who calls the compiler.
"""

import functools
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

from .. import _C
from ..errors import expect
from .pytrees import graph_behind, tensors_of

P = ParamSpec("P")
R = TypeVar("R")
F = TypeVar("F", bound=Callable[..., Any])

_READER = "a function made opaque"
_AS_PYTHON = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)


def opaque(f: Callable[P, R]) -> Callable[P, R]:
    """Return a function equal to ``f`` whose operators no level sees.

    It is for code that takes the addresses of its arguments: inside :func:`remat`, functions that
    were compiled otherwise than with ``torch.compile(f, backend="rematfn")`` have to be wrapped,
    ``rematfn.opaque(torch.compile(f))``. Values and gradients are those of ``f``. When it is
    called, and again in the backward pass, its tensor arguments are made resident together. What it
    makes is not evicted, not replayed, and does not count towards any budget.

    Args:
        f: A function of tensors, as arguments in any pytree. Tensors that it captures must not have
            been made under a level.

    Returns:
        A function with the signature of ``f``.

    Raises:
        BudgetError: (from a call or its backward) the arguments do not fit in the budget together.
        RuntimeError: (from a call) ``f`` has written into an argument that was made inside.

    Example:
        >>> import torch, rematfn
        >>> root = rematfn.opaque(lambda x: torch.from_numpy(x.detach().numpy() ** 0.5))
        >>> rematfn.remat(lambda x: root(x.exp()).sum(), budget="1KiB")(torch.zeros(4))
        tensor(4.)
    """
    expect(callable(f), "opaque(f)", "a function", f)

    @functools.wraps(f)
    def outside(*args: P.args, **kwargs: P.kwargs) -> R:
        arguments = tensors_of((args, kwargs))
        if _C.stack_depth() == 0 and not any(map(_C.has_key, arguments)):
            return f(*args, **kwargs)
        first = torch._C._autograd._get_sequence_nr()
        _C.materialize(arguments, _READER)
        counted = [t for t in arguments if _C.has_key(t) and not t.is_inference()]
        before = [t._version for t in counted]
        theirs = {t.grad_fn for t in arguments}
        with _C.Outside():
            result = f(*args, **kwargs)
        if before != [t._version for t in counted]:
            raise RuntimeError(
                "opaque(f): the function has written into an argument that was made inside of "
                "remat, and no level sees that. Return a new tensor, or give it a clone."
            )
        results = tensors_of(result)
        _C.share_handles(results, arguments)
        # What wrote into an argument is behind that.
        # What it captured has other nodes, whose numbers are less.
        for node in graph_behind(
            [*results, *arguments],
            lambda node: node not in theirs and first <= node._sequence_nr() < 1 << 63,
        ):
            if isinstance(node, torch.autograd.function.BackwardCFunction):
                node.register_prehook(_before_backward)
        return result

    return outside


# See Note [Compiled code reads addresses]
def _before_backward(gradients: tuple[torch.Tensor | None, ...]) -> None:
    node: Any = torch._C._current_autograd_node()
    tensors = [*gradients, *node.saved_tensors]
    _C.materialize([t for t in tensors if t is not None], _READER)
    _C.stay_outside()


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


def watch_compiler() -> None:
    """Have levels know of compilations, from when torch's compiler is loaded."""
    compiler = sys.modules.get("torch._dynamo.callback")
    if compiler is None:
        return
    handler = compiler.callback_handler
    if _before_compilation not in handler.start_callbacks:  # torch._dynamo.reset() forgets it
        handler.register_start_callback(_before_compilation)
        handler.register_end_callback(show_levels)


def _before_compilation(_: object) -> None:
    if not _C.is_intercepting() or _is_for_control_flow():
        return
    backend = _backend_of_compilation()
    if backend == "rematfn":
        _hidden.levels = _C.LevelsHidden()
        _hidden.levels.__enter__()
        return
    raise RuntimeError(
        f'torch.compile(f, backend="{backend}") inside of remat: this code reads addresses, and no '
        'level sees that. Write torch.compile(f, backend="rematfn"), which makes operators of it, '
        "inside of the budget. Or write rematfn.opaque(torch.compile(f)) for a part that may run "
        "outside of it."
    )


_hidden = threading.local()


# See Note [The compiler is hidden from levels]
def show_levels(_: object = None) -> None:
    """Have this thread's levels no longer hidden, if they are."""
    levels = getattr(_hidden, "levels", None)
    if levels is not None:
        _hidden.levels = None
        levels.__exit__(None, None, None)


def _backend_of_compilation() -> str:
    """Return the name of the backend for which dynamo compiles on this thread."""
    for frame, _ in traceback.walk_stack(sys._getframe()):
        if frame.f_code.co_filename.endswith("/torch/_dynamo/convert_frame.py"):
            backend = frame.f_locals.get("compiler_fn")
            if backend is not None:
                while hasattr(backend, "_torchdynamo_orig_backend"):
                    backend = backend._torchdynamo_orig_backend
                return str(getattr(backend, "compiler_name", None) or backend.__name__)
    return "unknown"


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
