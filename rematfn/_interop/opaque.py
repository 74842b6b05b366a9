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

Nobody is to forget it: the first call of a compiled function under a level compiles, and
`compiler.py` refuses that, but for the backend of ours: Note [Compiled pieces are operators].
"""

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch

from .. import _C
from ..errors import expect
from .pytrees import graph_behind, tensors_of

P = ParamSpec("P")
R = TypeVar("R")

_READER = "a function made opaque"


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
