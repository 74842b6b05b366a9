# SPDX-License-Identifier: Apache-2.0
"""The compiler's backend: ``torch.compile(block, backend="rematfn")``.

Note [The partitioner recomputes what is free]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
What the forward saves for the backward is among its results. Torch's partitioner saves the least
from which the backward's own kernels make the rest as they read it: a minimal cut of bytes, without
a product or a random number a second time. That is cheaper than an eviction, after which a kernel
writes the value once more. So the partitioner goes first, without the rules by which it holds back
(they take a longer backward for a slower one), and the level decides what goes of the rest. Torch's
own `activation_memory_budget` begins with the same rules off.

One of them stays on: `ban_recompute_used_far_apart`. What is read before a product and again behind
it, as a residual stream is, is not made again for the latter. Else all sums of the stream, from the
first block of a model to the last, were one chain. The last block's backward, which runs first,
would make the whole of it, as one piece: resident at once, and more with each block.

Note [A backward graph has no derivative]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
With `create_graph` the engine runs a backward in grad mode, and differentiates what it returns.
What the forward has saved leads to no input of the block there: AOTAutograd has detached it. So a
second derivative lacks a term. AOTAutograd calls the backward graph within a function whose own
backward is an error (https://github.com/pytorch/pytorch/pull/181606). The engine does not come to
that function, and the value is wrong, if it is asked for gradients of tensors that the function
does not lead to, `torch.autograd.grad(gradient.sum(), x)`. And torch 2.11 seldom calls it within
one. So a backward graph refuses to run with `create_graph`. Within that function grad mode is off;
its caller is known.
"""

import sys
import weakref
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import fx
from torch._decomp import get_decompositions
from torch._functorch import config as functorch_config
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._guards import TracingContext

from .. import _C
from .compiled_graphs import Piece, aten, cut
from .compiled_operator import CompiledPiece
from .compiled_writes import take_writes

# These take the running statistics though nothing depends on them. Inductor decomposes them itself.
_READ_STATISTICS = [aten._native_batch_norm_legit_functional, aten.native_batch_norm_backward]


def rematfn(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: dict[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compile a graph for ``torch.compile(f, backend="rematfn")``: a recorded operator each way.

    Args:
        gm: What dynamo has captured.
        example_inputs: Its inputs, as fake tensors.
        mode: As of inductor's: None, ``"default"`` or ``"max-autotune-no-cudagraphs"``.
        options: As of inductor's; and ``"inner"``, ``"inductor"`` or ``"aot_eager"``, which calls
            the graphs operator by operator and needs no compiler.

    Raises:
        ValueError: The mode or an option uses CUDA graphs, whose results the next replay of the
            graph overwrites; or ``"inner"`` is neither.
        NotImplementedError: The graph does what no replay could do again.
    """
    patches = dict(options or {})
    inner = patches.pop("inner", "inductor")
    if mode is not None:
        from torch._inductor import list_mode_options

        patches = {**list_mode_options(mode), **patches}
    if patches.get("triton.cudagraphs"):
        what = "options" if mode is None else f"mode={mode!r}"
        raise ValueError(
            f'torch.compile(f, backend="rematfn", {what}): CUDA graphs overwrite their results at '
            "the next replay, and a level may want them later. Leave the mode out, or take "
            'mode="max-autotune-no-cudagraphs".'
        )
    settings = {
        "donated_buffer": False,  # what is saved is the level's
        "force_non_lazy_backward_lowering": True,  # the backward may run under other levels
        "enable_autograd_cache": False,  # it keeps what inductor gives, and not what we make of it
        "activation_memory_budget": 1.0,
        # See Note [The partitioner recomputes what is free]
        "ban_recompute_long_fusible_chains": False,
        "ban_recompute_materialized_backward": False,
    }
    with _C.Outside(), functorch_config.patch(settings):
        if inner == "inductor":
            from torch._inductor.compile_fx import compile_fx, compile_fx_inner

            def compile_graph(
                gm: fx.GraphModule,
                inputs: Sequence[Any],
                static_input_idxs: Sequence[int] = (),
                is_backward: bool = False,
                **given: Any,
            ) -> "_Graph":
                def compile_piece(gm: fx.GraphModule, inputs: Sequence[Any], at: list[int]) -> Any:
                    static = [i for i, place in enumerate(at) if place in static_input_idxs]
                    return compile_fx_inner(
                        gm, inputs, static_input_idxs=static, is_backward=is_backward, **given
                    )

                return _Graph(gm, inputs, compile_piece, is_backward)

            patches["triton.cudagraphs"] = False
            return compile_fx(gm, example_inputs, compile_graph, patches)  # type: ignore[return-value, arg-type]
        if inner == "aot_eager":
            from torch._dynamo.backends.common import aot_autograd

            return aot_autograd(
                fw_compiler=lambda gm, inputs: _Graph(gm, inputs, _as_it_is, False),
                bw_compiler=lambda gm, inputs: _Graph(gm, inputs, _as_it_is, True),
                decompositions=get_decompositions(_READ_STATISTICS),
                partition_fn=min_cut_rematerialization_partition,
                keep_inference_input_mutations=True,
            )(gm, example_inputs)
    raise ValueError(
        'torch.compile(f, backend="rematfn", options={"inner": ...}): "inductor" or "aot_eager" is '
        f"needed, got {inner!r}."
    )


# Compiles a piece for its inputs, which are the values at these places: first come the graph's.
_Compile = Callable[[fx.GraphModule, Sequence[Any], list[int]], Callable[[list[Any]], Any]]


def _as_it_is(gm: fx.GraphModule, inputs: Sequence[Any], places: list[int]) -> Any:
    forward = gm.forward

    def run(args: list[Any]) -> Any:
        taken = tuple(args)
        args.clear()
        return forward(*taken)

    return run


class _Step(NamedTuple):
    """A piece of a graph, and the places of what it takes and gives in a list of all values."""

    run: Callable[[list[Any]], Sequence[Any]]
    run_as_operator: Callable[[list[Any]], Sequence[Any]]
    takes: list[int]
    ends: list[int]  # of these: no later step takes them
    gives: list[int]


# See Note [Compiled pieces are operators]
class _Graph:
    """A graph that AOTAutograd has made: what AOTAutograd calls."""

    def __init__(
        self,
        gm: fx.GraphModule,
        inputs: Sequence[Any],
        compile_piece: _Compile,
        is_backward: bool,
    ) -> None:
        self._boxed_call = True  # AOTAutograd is to hand over a list, and hold nothing of it
        self._is_backward = is_backward
        context = TracingContext.try_get()
        if context is not None and context.fw_metadata is not None:
            context.fw_metadata.bw_donated_idxs = []  # None is taken for some by what runs it
            # Who runs it would bump the counters before it runs, and a level take what is still to
            # be written for overwritten. The operators that write bump them.
            context.fw_metadata.mutated_graph_handled_indices_seen_by_autograd = []
        output = gm.graph.output_node()
        own: Any = output.args[0]
        updates = take_writes(gm)
        shown = [own[i] for i in output.meta.get("user_visible_output_idxs", ())]
        placeholders = gm.graph.find_nodes(op="placeholder")
        places = {node: place for place, node in enumerate(placeholders)}
        values = dict(zip(placeholders, inputs, strict=True))
        strides: dict[fx.Node, tuple[int, ...] | None] = {}
        self._steps: list[_Step] = []
        numbers: list[int] = []  # of pieces
        weakref.finalize(self, _C.forget_pieces, numbers).atexit = False

        def add_step(piece: Piece, compile_piece: _Compile, written: int = 0) -> None:
            takes = [places[node] for node in piece.takes]
            given = [values[node] for node in piece.takes]
            end = piece.gm.graph.output_node()
            end.meta["user_visible_output_idxs"] = [
                i for i, node in enumerate(piece.gives) if node in shown
            ]
            if piece.is_fused:
                with TracingContext.report_output_strides() as found:
                    made = CompiledPiece(
                        piece.gm, given, written, lambda: compile_piece(piece.gm, given, takes)
                    )
                run_as_operator = made.run_as_operator
                run = run_as_operator if written else made.run  # it counts what it writes
                numbers.append(made.number)
                for node, stride in zip(piece.gives, found or [], strict=False):
                    strides[node] = stride
                values.update((n, _laid_out(n.meta["val"], strides.get(n))) for n in piece.gives)
            else:
                run = run_as_operator = _as_it_is(piece.gm, given, takes)
                values.update(zip(piece.gives, piece.gm(*given), strict=True))
            for node in piece.gives:
                places[node] = len(places)
            gives = [places[node] for node in piece.gives]
            self._steps.append(_Step(run, run_as_operator, takes, [], gives))

        for piece in cut(gm, is_backward):
            add_step(piece, compile_piece)
        self._results = [
            (places[node], None) if isinstance(node, fx.Node) else (-1, node) for node in own
        ]
        for update in updates:
            takes = [*update.written, *update.others]
            how = compile_piece if update.is_compiled else _as_it_is
            add_step(Piece(update.gm, takes, [], True), how, len(update.written))
        stay = {place for place, _ in self._results}
        for step in reversed(self._steps):
            step.ends.extend(place for place in step.takes if place not in stay)
            stay.update(step.takes)
        self._unused = [place for place in range(len(inputs)) if place not in stay]
        self._blank = [None] * (len(places) - len(inputs))
        if context is not None and context.output_strides is not None and any(strides.values()):
            context.output_strides[:] = [
                strides.get(node) if isinstance(node, fx.Node) else None for node in own
            ]

    def __call__(self, args: list[Any]) -> list[Any]:
        if self._is_backward and _creates_graph():
            raise RuntimeError(
                'torch.compile(f, backend="rematfn"): a backward with create_graph=True comes to '
                "f, and there is no double backward of compiled code. Leave f uncompiled where you "
                "need second derivatives."
            )
        _C.show_levels()
        is_seen = _C.sees_level(args)
        values = [*args, *self._blank]
        args.clear()
        for place in self._unused:
            values[place] = None
        # A product casts under autocast, and the graph has its casts already.
        with torch.no_grad(), torch._C._DisableAutocast():
            value_at = values.__getitem__
            for step in self._steps:
                given = list(map(value_at, step.takes))
                for place in step.ends:
                    values[place] = None
                made = step.run_as_operator(given) if is_seen else step.run(given)
                for place, value in zip(step.gives, made, strict=True):
                    values[place] = value
                del made
        return [other if place < 0 else values[place] for place, other in self._results]


# See Note [A backward graph has no derivative]
def _creates_graph() -> bool:
    """Return whether the backward that calls a graph is one with ``create_graph``."""
    if torch.is_grad_enabled():
        return True
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_name not in ("backward", "_double_backward"):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_name == "_double_backward"


def _laid_out(value: Any, stride: tuple[int, ...] | None) -> Any:
    """Return the fake tensor with the strides that the compiler has given it."""
    if stride is None or tuple(value.stride()) == tuple(stride):
        return value
    return value.as_strided(value.shape, stride)
