# SPDX-License-Identifier: Apache-2.0
"""Compiled blocks as operators: ``torch.compile(block, backend="rematfn")``.

Note [A compiled graph is an operator]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
AOTAutograd makes a forward and a backward graph of a block, and inductor a function of each, which
takes the addresses of what it is given. As the kernel of an operator it may: a level has the
arguments of an operator in place, and meters what it allocates. So each graph is one call of
`rematfn::compiled`, which is counted, evicted and replayed as any other. A replay finds the
function by its number.

An operator reads its arguments and returns fresh tensors. A graph of AOTAutograd's does more than
that, and this is undone on the two sides of the operator:

- It writes its inputs, by `copy_` at its end. These are taken out of the graph, and are operators
  of their own: Note [Statistics are no input of their block]. So a replay writes nothing.
- Among its results are inputs, views of inputs and of other results, the same one twice, sizes and
  None. The operator returns one tensor for each fresh storage. What the rest is made of is found by
  the storages when the graph runs, and put together outside.
- It draws random numbers. Then the operator is `rematfn::compiled_random`, whose tag has a level
  keep the state of the generator: a replay draws the same.
- It adds up in an order that differs from run to run, or talks to other processes. Then it is
  `rematfn::compiled_once`, which is not replayed.

What the forward saves for the backward is among its results, and all of it is: the level decides
what goes, and so no partitioner recomputes. Without a level the functions are called as they are.

Note [Statistics are no input of their block]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A batch norm's graph makes the new running statistics from the old ones. Were these inputs of the
block's operator, then once they are overwritten it could not be replayed without a copy of them,
and all that the block saves would stay (Note [What an old value is needed for]). But nothing else
in the block depends on them. So what depends on the old contents of an input that is written, and
serves the new ones alone, is taken out, and runs after the block: an operator of its own, whose
results are gone once they are written.

Note [The compiler is hidden from levels]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
The first call of a block under a level compiles: dynamo's guards know the dispatch keys that a
thread includes, and ours is among them. The compiler runs operators of its own. On record these
would be the program's, and the next call, which compiles nothing, another program. So the thread's
levels are hidden for the while. The key stays, since the guards are made from it.
"""

import functools
import operator
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch._decomp import get_decompositions
from torch._functorch import config as functorch_config
from torch._functorch.partitioners import default_partition
from torch._guards import TracingContext
from torch._inductor.custom_graph_pass import CustomPartitionerFn
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from .. import _C
from .opaque import show_levels

aten = torch.ops.aten
# The arguments of a graph, by kind; the number that it has here; the FLOPs that it takes.
_SIGNATURE = "(Tensor[] tensors, int[] sizes, float[] numbers, int graph, int flops) -> Tensor[]"
_LIBRARY: Any = torch.library.Library("rematfn", "DEF")  # type: ignore[no-untyped-call]
_TAGS = {
    "compiled": (),
    "compiled_random": (torch.Tag.nondeterministic_seeded,),
    "compiled_once": (torch.Tag.nondeterministic_bitwise,),
}
# These take the running statistics though nothing depends on them. Inductor decomposes them itself.
_READ_STATISTICS = [aten._native_batch_norm_legit_functional, aten.native_batch_norm_backward]
_SUMS_IN_ANY_ORDER = {
    "_unsafe_index_put",
    "embedding_dense_backward",
    "index_add",
    "index_put",
    "index_reduce",
    "put",
    "scatter_add",
    "scatter_reduce",
}
_COMMUNICATES = ("_c10d_functional", "c10d", "c10d_functional", "_dtensor", "symm_mem", "fsdp")

# See Note [A compiled graph is an operator]
# What has compiled a graph may be gone when a level replays it, so all that ran stay.
_graphs: list["_Graph"] = []
_ran = threading.local()  # what the last graph's results are made of


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
    }
    with _C.Outside(), functorch_config.patch(settings):
        if inner == "inductor":
            from torch._inductor.compile_fx import compile_fx, compile_fx_inner

            def compile_inner(gm: fx.GraphModule, inputs: Sequence[Any], **given: Any) -> Any:
                def compile_used(
                    gm: fx.GraphModule, inputs: Sequence[Any], used: list[int]
                ) -> Callable[[list[Any]], Any]:
                    static = given.pop("static_input_idxs", ())
                    now = [used.index(i) for i in static if i in used]
                    return compile_fx_inner(gm, inputs, static_input_idxs=now, **given)

                return _compiled(gm, inputs, compile_used)

            patches = {
                "custom_partitioner_fn": _SavesAll(),
                **patches,
                "triton.cudagraphs": False,
            }
            compiled: Callable[..., Any] = compile_fx(  # type: ignore[assignment]
                gm, example_inputs, compile_inner, config_patches=patches
            )
            return compiled
        if inner == "aot_eager":
            from torch._dynamo.backends.common import aot_autograd

            compile_graph = functools.partial(_compiled, compile_inner=_as_it_is)
            return aot_autograd(
                fw_compiler=compile_graph,
                decompositions=get_decompositions(_READ_STATISTICS),
                partition_fn=default_partition,
                keep_inference_input_mutations=True,
            )(gm, example_inputs)
    raise ValueError(
        'torch.compile(f, backend="rematfn", options={"inner": ...}): "inductor" or "aot_eager" is '
        f"needed, got {inner!r}."
    )


class _SavesAll(CustomPartitionerFn):
    """The partitioner that recomputes nothing, as inductor asks for one."""

    def __call__(
        self, gm: fx.GraphModule, joint_inputs: Sequence[object], **given: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        given.pop("compiler", None)
        return default_partition(gm, joint_inputs, **given)

    def uuid(self) -> str:
        return "rematfn: default_partition"


# Compiles a graph for inputs, which were those at these places.
_Compile = Callable[[fx.GraphModule, Sequence[Any], list[int]], Callable[[list[Any]], Any]]


def _as_it_is(
    gm: fx.GraphModule, inputs: Sequence[Any], used: list[int]
) -> Callable[[list[Any]], Any]:
    def run(args: list[Any]) -> Any:
        taken = tuple(args)
        args.clear()
        return gm(*taken)

    return run


def _compiled(
    gm: fx.GraphModule, inputs: Sequence[Any], compile_inner: _Compile
) -> "_Graph | _Writer":
    context = TracingContext.try_get()
    if context is not None and context.fw_metadata is not None:
        context.fw_metadata.bw_donated_idxs = []  # None is taken for some by what runs a backward
    taken = _take_writes(gm)
    graph = _Graph(gm, inputs, compile_inner)
    if taken is None:
        return graph
    # Inductor has told AOTAutograd of results that it does not know.
    if context is not None and context.output_strides:
        del context.output_strides[len(context.output_strides) - taken.extra :]
    return _Writer(graph, taken)


class _Graph:
    """A graph that AOTAutograd has made, and what calls it.

    Attributes:
        run: The function that was compiled of it. It empties the list that it is given.
    """

    def __init__(self, gm: fx.GraphModule, inputs: Sequence[Any], compile_inner: _Compile) -> None:
        self._boxed_call = True  # AOTAutograd is to hand over a list, and hold nothing of it
        self._used = _drop_unused(gm, inputs)
        inputs = [inputs[i] for i in self._used]
        self._operator = getattr(torch.ops.rematfn, _operator_of(gm)).default
        self._kinds = [_kind_of(value) for value in inputs]
        self._symbols = list(_symbols_in(inputs))
        self._result_bytes = _bytes_of_results(gm)
        self._products = _flops_of(gm)
        self._known: dict[tuple[Any, ...], tuple[int, int]] = {}
        self.run = compile_inner(gm, inputs, self._used)
        self._number = len(_graphs)
        _graphs.append(self)

    # See Note [A compiled graph is an operator]
    def __call__(self, args: list[Any]) -> list[Any]:
        show_levels()
        used = [args[i] for i in self._used]
        args.clear()
        if _C.is_intercepting() or any(isinstance(a, Tensor) and _C.has_key(a) for a in used):
            return self._run_as_operator(used)
        return list(self.run(used))

    def _run_as_operator(self, args: list[Any]) -> list[Any]:
        tensors: list[Tensor] = []
        sizes: list[int] = []
        numbers: list[float] = []
        of_kind: dict[type, list[Any]] = {Tensor: tensors, int: sizes, float: numbers}
        for kind, value in zip(self._kinds, args, strict=True):
            if kind not in of_kind:
                raise NotImplementedError(
                    'torch.compile(f, backend="rematfn") inside of remat: the graph is given '
                    f"{value!r}, which cannot be written down. Compile with another backend, and "
                    "wrap that: rematfn.opaque(torch.compile(f))."
                )
            of_kind[kind].append(value)
        flops, _ = self.known_of(args)
        args.clear()
        _ran.parts = None
        fresh = self._operator(tensors, sizes, numbers, self._number, flops)
        if _ran.parts is None:
            raise RuntimeError(
                'torch.compile(f, backend="rematfn"): nothing was computed, since what runs '
                "around it asks for shapes alone."
            )
        sources = (tensors, fresh)
        return [part.value if part.source is None else _view(sources, part) for part in _ran.parts]

    def arguments(
        self, tensors: Sequence[Tensor], sizes: Sequence[int], numbers: Sequence[float]
    ) -> list[Any]:
        """Return what the graph is given, in its order."""
        of_kind = {Tensor: iter(tensors), int: iter(sizes), float: iter(numbers)}
        return [next(of_kind[kind]) for kind in self._kinds]

    def known_of(self, args: Sequence[Any]) -> tuple[int, int]:
        """Return the FLOPs of a call, and the bytes of its results."""
        at = tuple(args[i] if d is None else args[i].shape[d] for _, i, d in self._symbols)
        known = self._known.get(at)
        if known is None:
            values = {of[0]: value for of, value in zip(self._symbols, at, strict=True)}
            known = (
                sum(_number(n, values) for n in self._products),
                sum(_number(n, values) for n in self._result_bytes),
            )
            self._known[at] = known
        return known


class _Writer:
    """A graph that writes some of its inputs: that part of it is done when the rest is."""

    def __init__(self, graph: _Graph, taken: "_Taken") -> None:
        self._boxed_call = True
        self._graph = graph
        self._taken = taken
        values = [node.meta.get("val") for node in taken.update.graph.find_nodes(op="placeholder")]
        self._update = _Graph(taken.update, values, _as_it_is)

    def __call__(self, args: list[Any]) -> list[Any]:
        written = [args[i] for i in self._taken.written]
        results = self._graph(args)
        end = len(results) - self._taken.extra
        given = [*written, *results[end:]]
        del results[end:]
        with torch.no_grad():
            for tensor, contents in zip(written, self._update(given), strict=True):
                tensor.copy_(contents)
        return results


# ---- what a graph does ---------------------------------------------------------------------------


class _Taken(NamedTuple):
    """The writes of a graph, taken out of it."""

    written: list[int]  # which of its inputs
    update: fx.GraphModule  # makes the new contents of the old ones and of what the graph returns
    extra: int  # results that the graph returns for it, which are the last


# See Note [Statistics are no input of their block]
def _take_writes(gm: fx.GraphModule) -> _Taken | None:
    """Take the writes of inputs out of a graph, if there are any."""
    inputs = gm.graph.find_nodes(op="placeholder")
    output = gm.graph.output_node()
    contents: dict[fx.Node, fx.Node] = {}
    for node in list(gm.graph.nodes):
        schema = getattr(node.target, "_schema", None)
        if node.op != "call_function" or schema is None or not schema.is_mutable:
            continue
        if node.target is not aten.copy_.default or node.args[0] not in inputs:
            _refuse(node, "writes in the middle of the graph")
        contents[node.args[0]] = node.args[1]
        node.replace_all_uses_with(node.args[1])
        gm.graph.erase_node(node)
    if not contents:
        return None
    needed = _ancestors(output.all_input_nodes)
    reads: set[fx.Node] = set(contents)
    for node in gm.graph.nodes:
        if not reads.isdisjoint(node.all_input_nodes):
            reads.add(node)
    apart = _ancestors(contents.values()) & reads - needed
    moved: list[fx.Node] = []
    for node in gm.graph.nodes:
        is_part = node.target is operator.getitem and node.args[0] not in moved
        if node.op != "placeholder" and node in apart and not is_part:
            moved.append(node)
    sources = [n for node in moved for n in node.all_input_nodes] + list(contents.values())
    returned = [n for n in dict.fromkeys(sources) if n not in contents and n not in moved]

    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in [*contents, *returned]:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = dict(node.meta)
    for node in moved:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[node] for node in contents.values()))
    update = fx.GraphModule(gm, graph)
    results: Any = output.args[0]
    output.args = ((*results, *returned),)
    for node in reversed(moved):
        gm.graph.erase_node(node)
    gm.recompile()
    return _Taken([inputs.index(node) for node in contents], update, len(returned))


def _drop_unused(gm: fx.GraphModule, inputs: Sequence[Any]) -> list[int]:
    """Take tensors that nothing is computed of off the inputs; return which are left."""
    used: list[int] = []
    for i, node in enumerate(gm.graph.find_nodes(op="placeholder")):
        if isinstance(inputs[i], Tensor) and not node.users and not any(_symbols_in([inputs[i]])):
            gm.graph.erase_node(node)
        else:
            used.append(i)
    gm.recompile()
    return used


def _ancestors(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """Return the nodes, and all that they are computed from."""
    found: set[fx.Node] = set()
    todo = list(nodes)
    while todo:
        node = todo.pop()
        if node not in found:
            found.add(node)
            todo.extend(node.all_input_nodes)
    return found


def _operator_of(gm: fx.GraphModule) -> str:
    """Return how the graph is recorded: by the name of the operator."""
    devices = {str(value.device.type) for value in _values_of(gm, "placeholder")}
    draws = False
    for node in _calls_in(gm):
        name = str(node.target)
        if isinstance(node.target, torch._ops.HigherOrderOperator):
            if name in ("with_effects", "print", "call_torchbind"):
                _refuse(node, "has effects beside its results")
            continue
        namespace, _, called = name.rpartition(".")[0].partition(".")
        sums = called.removesuffix("_") in _SUMS_IN_ANY_ORDER and _adds_up(node)
        if sums or namespace in _COMMUNICATES:
            return "compiled_once"
        tags = getattr(node.target, "tags", ())
        if torch.Tag.nondeterministic_bitwise in tags:
            return "compiled_once"
        if torch.Tag.nondeterministic_seeded in tags:
            draws = True
            devices |= {str(value.device.type) for value in _tensors_in(node.meta.get("val"))}
    if draws:  # of one generator, or else of several
        return "compiled_random" if len(devices) == 1 else "compiled_once"
    return "compiled"


def _adds_up(node: fx.Node) -> bool:
    """Return whether several threads may add to one element, and the order be another each time."""
    if torch.are_deterministic_algorithms_enabled():
        return False
    on_cpu = all(value.device.type == "cpu" for value in _tensors_in(node.meta.get("val")))
    if on_cpu and torch.get_num_threads() == 1:
        return False
    return "index_put" not in str(node.target) or (len(node.args) > 3 and bool(node.args[3]))


def _refuse(node: fx.Node, what: str) -> None:
    raise NotImplementedError(
        f'torch.compile(f, backend="rematfn"): {node.target} {what}, and a replay would do it '
        "again. Compile with another backend, and wrap that: rematfn.opaque(torch.compile(f))."
    )


def _calls_in(gm: fx.GraphModule) -> Iterator[fx.Node]:
    """Visit the calls of a graph, and of those in it."""
    for module in gm.modules():
        if isinstance(module, fx.GraphModule):
            yield from (node for node in module.graph.nodes if node.op == "call_function")


def _tensors_in(values: Any) -> list[Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, Tensor)]


def _values_of(gm: fx.GraphModule, kind: str) -> list[Tensor]:
    return _tensors_in([node.meta.get("val") for node in gm.graph.find_nodes(op=kind)])


def _bytes_of_results(gm: fx.GraphModule) -> list[int | torch.SymInt]:
    """Return the bytes of each storage that the graph makes, and returns something of."""
    seen = {value.untyped_storage()._cdata for value in _values_of(gm, "placeholder")}
    found: list[int | torch.SymInt] = []
    results = [node.meta.get("val") for node in gm.graph.output_node().all_input_nodes]
    for value in _tensors_in(results):
        storage = value.untyped_storage()
        if storage._cdata not in seen:
            seen.add(storage._cdata)
            found.append(storage.nbytes())
    return found


def _flops_of(gm: fx.GraphModule) -> list[int | torch.SymInt]:
    """Return the FLOPs of each product in the graph, as torch counts them."""

    def value(node: fx.Node) -> Any:
        return node.meta.get("val")

    found: list[int | torch.SymInt] = []
    for node in _calls_in(gm):
        count = flop_registry.get(getattr(node.target, "overloadpacket", None))
        if count is not None:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), value)
            found.append(count(*args, **kwargs, out_val=value(node)))
    return found


# ---- sizes ---------------------------------------------------------------------------------------


def _kind_of(value: Any) -> type:
    if isinstance(value, Tensor):
        return Tensor
    if isinstance(value, int | torch.SymInt) and not isinstance(value, bool):
        return int
    return float if isinstance(value, float | torch.SymFloat) else type(value)


def _symbols_in(inputs: Sequence[Any]) -> Iterator[tuple[Any, int, int | None]]:
    """Visit the sizes that differ from call to call: the symbol, of which input, which extent."""
    seen: set[Any] = set()
    for i, value in enumerate(inputs):
        sizes = enumerate(value.shape) if isinstance(value, Tensor) else [(None, value)]
        for d, size in sizes:
            symbol = size.node.expr if isinstance(size, torch.SymInt) else None
            if symbol is not None and symbol.is_Symbol and symbol not in seen:
                seen.add(symbol)
                yield symbol, i, d


def _number(size: int | torch.SymInt, values: dict[Any, int]) -> int:
    """Return what a size comes to; 0 where that depends on data."""
    if not isinstance(size, torch.SymInt):
        return int(size)
    found = size.node.expr.xreplace(values)
    return int(found) if found.is_number else 0


# ---- the operator --------------------------------------------------------------------------------


class _Part(NamedTuple):
    """What a result of a graph is: no tensor, or a view of an argument or of what is fresh."""

    value: Any = None
    source: int | None = None  # 0: an argument; 1: what is fresh
    at: int = 0  # which of them
    view: tuple[Any, ...] | None = None  # its sizes, strides and offset, where it is not all of it


def _run(
    tensors: list[Tensor], sizes: list[int], numbers: list[float], graph: int, flops: int
) -> list[Tensor]:
    ran = _graphs[graph]
    with torch._C._AutoDispatchBelowAutograd():
        results = ran.run(ran.arguments(tensors, sizes, numbers))
        fresh, _ran.parts = _take_apart(results, tensors)
    return fresh


def _run_on_shapes(
    tensors: list[Tensor], sizes: list[int], numbers: list[float], graph: int, flops: int
) -> list[Tensor]:
    """Return a tensor of as many bytes as the results have: a level asks for no more."""
    ran = _graphs[graph]
    _, nbytes = ran.known_of(ran.arguments(tensors, sizes, numbers))
    return [torch.empty(nbytes, dtype=torch.uint8, device="meta")]


def _take_apart(results: Iterable[Any], tensors: list[Tensor]) -> tuple[list[Tensor], list[_Part]]:
    """Return a tensor for each storage that is no argument's, and what the results are made of."""
    fresh: list[Tensor] = []
    same = {id(t): (0, i) for i, t in enumerate(tensors)}
    sources = (tensors, fresh)
    homes: dict[int, tuple[int, int]] = {}
    for i, t in enumerate(tensors):
        homes.setdefault(_storage_of(t), (0, i))
    parts: list[_Part] = []
    for result in results:
        if not isinstance(result, Tensor):
            parts.append(_Part(result))
            continue
        found = same.get(id(result))
        if found is not None:
            parts.append(_Part(None, *found))
            continue
        source, index = homes.get(_storage_of(result), (1, len(fresh)))
        if index < len(sources[source]) and sources[source][index].dtype != result.dtype:
            result = result.clone()
            source, index = 1, len(fresh)
        if index == len(fresh) and source == 1:
            fresh.append(result)
            homes[_storage_of(result)] = same[id(result)] = (1, index)
            parts.append(_Part(None, 1, index))
        else:
            view = (result.shape, result.stride(), result.storage_offset())
            parts.append(_Part(None, source, index, view))
    return fresh, parts


def _storage_of(tensor: Tensor) -> int:
    number: int = tensor.untyped_storage()._cdata
    return number


def _view(sources: tuple[Sequence[Tensor], Sequence[Tensor]], part: _Part) -> Tensor:
    assert part.source is not None
    tensor = sources[part.source][part.at]
    return tensor if part.view is None else tensor.as_strided(*part.view)


for _name, _tags in _TAGS.items():
    _LIBRARY.define(_name + _SIGNATURE, tags=_tags)
    _LIBRARY.impl(_name, _run, "CompositeExplicitAutograd")
    _LIBRARY.impl(_name, _run_on_shapes, "Meta")
