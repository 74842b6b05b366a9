# SPDX-License-Identifier: Apache-2.0
"""What else saves memory in PyTorch: the peers that a budget is compared with.

A peer is a transform of the function, a runner of its blocks, or both; a program takes either.
"""

from __future__ import annotations

import functools
import math
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from networks import Runner, State, Transform, in_order, untransformed
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

_aten = torch.ops.aten
PRODUCTS = [
    _aten.mm.default,
    _aten.addmm.default,
    _aten.bmm.default,
    _aten.baddbmm.default,
    _aten.convolution.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
]
# Fractions of the activations that torch.compile would keep.
COMPILED_BUDGETS = (0.5, 0.2, 0.0)


@dataclass(frozen=True)
class Peer:
    """One way to save memory, at one setting.

    Attributes:
        compiler: The backend; none if the program is run as it is.
    """

    name: str
    transform: Transform = untransformed
    run: Runner = in_order
    compiler: str = ""


def _checkpoint_each(context: Callable[[], Any] | None = None) -> Runner:
    more = {} if context is None else {"context_fn": context}

    def run(blocks: Sequence[Callable[..., State]], state: State) -> State:
        for block in blocks:
            state = checkpoint(block, *state, use_reentrant=False, **more)
        return state

    return run


def _checkpoint_segments(blocks: Sequence[Callable[..., State]], state: State) -> State:
    size = math.ceil(math.sqrt(len(blocks)))
    segments = [blocks[i : i + size] for i in range(0, len(blocks), size)]
    chained = [lambda *state, s=segment: in_order(s, state) for segment in segments]
    return _checkpoint_each()(chained, state)


def _returnn_scope(blocks: Sequence[Callable[..., State]], state: State) -> State:
    from returnn.torch.util.gradient_checkpoint import gradient_checkpoint_scope

    for block in blocks:
        with gradient_checkpoint_scope():
            state = block(*state)
    return state


def _compiled(backend: str, budget: float) -> Transform:
    def transform(f: Callable[..., Any]) -> Callable[..., Any]:
        fast = torch.compile(f, backend=backend)

        @functools.wraps(f)
        def call(*args: Any) -> Any:
            with torch._functorch.config.patch(activation_memory_budget=budget):
                return fast(*args)

        return call

    return transform


PEERS = [
    Peer("checkpoint, each block", run=_checkpoint_each()),
    Peer("checkpoint, sqrt(n) segments", run=_checkpoint_segments),
    Peer(
        "selective checkpoint, products kept",
        run=_checkpoint_each(functools.partial(create_selective_checkpoint_contexts, PRODUCTS)),
    ),
    *(
        Peer(f"compile, {backend}, {budget:g}", _compiled(full_name, budget), compiler=backend)
        for backend, full_name in (
            ("aot_eager", "aot_eager_decomp_partition"),
            ("inductor", "inductor"),
        )
        for budget in COMPILED_BUDGETS
    ),
    *([Peer("RETURNN's scope, each block", run=_returnn_scope)] if find_spec("returnn") else ()),
]


class TookTooLongError(BaseException):
    """A peer was not ready in time. No :class:`Exception`: compilers carry on after those."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise :class:`TookTooLongError` if the block runs for longer; for the main thread."""

    def stop(signum: int, frame: object) -> None:
        raise TookTooLongError(f"not ready within {seconds:g} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds, 10)  # again, where it was swallowed
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
