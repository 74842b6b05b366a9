# SPDX-License-Identifier: Apache-2.0
"""What the wrappers of torch.distributed do to parameters and gradients, as levels have to know it.

Note [Units of parameters]
~~~~~~~~~~~~~~~~~~~~~~~~~~
`fully_shard` makes a module a unit. Its parameters are gathered before its forward and before its
backward, and their storages emptied after each. Lineage knows no units: to make a value of one unit
again may take values of the units before it, and so their parameters, which are not there. So what
leaves a unit is kept: the results of its forward, and in the backward the gradients of its
arguments and parameters. What is replayed then lies in one unit, and nobody asks for it but that
unit's backward, for which the parameters are there again, with the same bits.

What leaves must be kept before the parameters go, and so before FSDP's own hooks. A global hook on
forwards runs before a module's, and is given the arguments as FSDP's hook before the forward made
them; a hook on these is before the node of FSDP's that ends the unit's backward.

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

from __future__ import annotations

import functools
import sys
from typing import Any

import torch
from torch import nn

from .. import _C
from .pytrees import tensors_of

_UNITS = "torch.distributed.fsdp._fully_shard._fsdp_param_group"


_handles: list[Any] = []  # of the hooks, while there is a process group: compilers look at hooks


def watch() -> None:
    """Watch the modules that torch.distributed has wrapped, if there may be any."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        while _handles:
            _handles.pop().remove()
        return
    if not _handles:
        hooks = nn.modules.module
        _handles.append(hooks.register_module_forward_pre_hook(_before_forward))
        _handles.append(hooks.register_module_forward_hook(_after_forward, with_kwargs=True))
    if _UNITS in sys.modules:
        _watch_units()


@functools.cache
def _watch_units() -> None:
    unit = sys.modules[_UNITS].FSDPParamGroup
    for name in ("unshard", "wait_for_unshard", "reshard"):
        setattr(unit, name, _outside(getattr(unit, name)))
    unit.post_backward = _with_gradients_kept(unit.post_backward)


def _outside(method: Any) -> Any:
    @functools.wraps(method)
    def called(*args: Any, **kwargs: Any) -> Any:
        with _C.Outside():
            return method(*args, **kwargs)

    return called


def _with_gradients_kept(post_backward: Any) -> Any:
    @functools.wraps(post_backward)
    def called(unit: Any, *args: Any) -> Any:
        parameters = [
            p._unsharded_param for p in unit.fsdp_params if hasattr(p, "_unsharded_param")
        ]
        _keep(*(p.grad for p in parameters if p.grad is not None))
        return post_backward(unit, *args)

    return called


def _before_forward(module: nn.Module, args: Any) -> None:
    # See Note [Buckets are outside]
    if isinstance(module, nn.parallel.DistributedDataParallel) and torch.is_grad_enabled():
        if module._join_config.enable:
            return
        with _C.Outside():
            module._has_rebuilt_buckets |= module.reducer._rebuild_buckets()


def _after_forward(module: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
    if not _is_unit(module):
        return
    # See Note [Units of parameters]
    _keep(*tensors_of(result))
    for argument in tensors_of((args, kwargs)):
        if argument.requires_grad and argument.grad_fn is not None:
            argument.register_hook(_keep)  # type: ignore[no-untyped-call]


def _keep(*tensors: torch.Tensor) -> None:
    _C.keep_bytes(list(tensors), "a unit of parameters")


def _is_unit(module: nn.Module) -> bool:
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)
