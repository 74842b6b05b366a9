# SPDX-License-Identifier: Apache-2.0
"""What the wrappers of torch.distributed do to parameters and gradients, as levels have to know it.

Note [Units of parameters]
~~~~~~~~~~~~~~~~~~~~~~~~~~
`fully_shard` makes a module a unit. Its parameters are gathered before its forward and before its
backward, and their storages emptied after each. Lineage knows no units: to make a value of one unit
again may take values of the units before it, and so their parameters, which are not there. So what
leaves a unit is kept: the results of its forward, and in the backward the gradients of its
arguments and parameters. What is replayed then lies in one unit, and nobody asks for it but that
unit's backward, for which the parameters are there again, with the same bits. Of a unit whose
arguments need no gradients FSDP learns late that its backward is over, when the root's parameters
may have gone: so before the last of these go, all gradients are kept.

What leaves must be kept before the parameters go, and so by the methods of FSDP's own that come
first and last. A hook on the arguments as FSDP hands them on is before the node of FSDP's that ends
the unit's backward.

FSDP gathers and empties outside of every level. What it gathers is its own: it does not count. And
what it empties is hashed (Note [Resizes are operators]), where inside of the function it would be
copied, which would keep what sharding is to save.

Note [Buckets are outside]
~~~~~~~~~~~~~~~~~~~~~~~~~~
In the second step DistributedDataParallel makes its buckets anew, in the order in which gradients
came. It does so in its forward, where they would be the level's: evicted, and then asked for their
address. They outlive the function, as those of the first step do; so they are made before, outside.
Not where ranks may have joined (`model.join()`): these follow each collective of the others.
"""

import functools
import sys
import weakref
from typing import Any

import torch
from torch import nn

from .. import _C
from .pytrees import tensors_of
from .storages import around, tell

# Modules of units of several, whose results are kept by a hook of ours.
_kept: weakref.WeakSet[nn.Module] = weakref.WeakSet()

# Units of parameters that have run.
_units: weakref.WeakSet[Any] = weakref.WeakSet()

_FSDP = "torch.distributed.fsdp._fully_shard."


def watch() -> None:
    """Have what torch.distributed wraps tell the levels, if there may be any of it."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        _watch_buckets()
        if f"{_FSDP}_fsdp_param_group" in sys.modules:
            _watch_units()


def share_state(module: nn.Module, twin: nn.Module) -> None:
    """Have torch.distributed find what it knows of ``module`` by its twin, too."""
    found = sys.modules.get("torch.distributed._composable_state")
    state = None if found is None else found._module_state_mapping.get(module)
    if state is not None:
        found._module_state_mapping[twin] = state  # type: ignore[union-attr]


@functools.cache
def _watch_buckets() -> None:
    tell(nn.parallel.DistributedDataParallel, "_pre_forward", _make_buckets)


@functools.cache
def _watch_units() -> None:
    unit = sys.modules[f"{_FSDP}_fsdp_param_group"].FSDPParamGroup
    for name in ("unshard", "wait_for_unshard", "reshard"):
        around(unit, name, _outside)
    tell(unit, "pre_forward", then=_watch_arguments)
    tell(unit, "post_forward", lambda unit, *given: _keep_result(*given))
    tell(unit, "post_backward", _keep_gradients)
    state = sys.modules[f"{_FSDP}_fsdp_state"].FSDPState
    tell(state, "_root_post_backward_final_callback", _keep_all_gradients)


def _outside(method: Any, /, *args: Any, **kwargs: Any) -> Any:
    with _C.Outside():
        return method(*args, **kwargs)


def _keep_gradients(unit: Any, *_: Any) -> None:
    parameters = [p._unsharded_param for p in unit.fsdp_params if hasattr(p, "_unsharded_param")]
    _keep(*(p.grad for p in parameters if p.grad is not None))


def _keep_all_gradients(_: Any) -> None:
    for unit in list(_units):
        _keep_gradients(unit)


def _watch_arguments(unit: Any, arguments: Any) -> None:
    _units.add(unit)
    # Of modules before the last, after which the unit is told that its forward is over.
    for module in unit.modules if len(unit.modules) > 1 else ():
        if module not in _kept:
            module.register_forward_hook(_keep_result)
            _kept.add(module)
    for argument in tensors_of(arguments):
        if argument.requires_grad and argument.grad_fn is not None:
            argument.register_hook(_keep)  # type: ignore[no-untyped-call]


def _keep_result(module: nn.Module, arguments: Any, result: Any) -> None:
    _keep(*tensors_of(result))


# See Note [Buckets are outside]
def _make_buckets(module: Any, *_: Any, **__: Any) -> None:
    # Without a reducer where all gradients are reduced later.
    rebuilds = not getattr(module, "_delay_all_reduce_all_params", False)
    if rebuilds and torch.is_grad_enabled() and not module._join_config.enable:
        with _C.Outside():
            module._has_rebuilt_buckets |= module.reducer._rebuild_buckets()


def _keep(*tensors: torch.Tensor) -> None:
    _C.keep_bytes(list(tensors), "a unit of parameters", False)
