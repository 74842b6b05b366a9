# SPDX-License-Identifier: Apache-2.0
"""Graphs of AOTAutograd's: cut into pieces, which are operators.

Note [A graph is cut at its products]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
An operator's arguments and results are resident together, and a replay runs all of it. So were a
graph one operator, then a block's backward would hold all that the block has saved, and one missing
value would have all of the forward run again. Inductor fuses what is element-wise, and reductions,
but no matrix product, convolution or attention: these are calls of a library. So a graph is cut at
each of them. A product stays the operator that it is. What is between two is a piece, one operator.

An operator that a level has to treat in its own way stays one, too: what draws from a generator,
writes or adds up in an order that differs from run to run, or talks to other processes. So does a
higher-order operator that is given such an operator, or of which nobody can tell what it does. So a
piece gives the same bits whenever it runs. Random numbers of a given seed are a piece of their own:
on a CPU they take longer than all that is done with them. They are those that inductor draws.

Where all that a graph makes is little, calling its operators takes longer than a finer choice among
them could save. So it is not cut at its products and random numbers then: the cell of an LSTM,
which is called step by step, is one operator each way. What a backward returns is there at its end
in any case, and does not count. Where sizes differ from call to call, later ones may be large. On
an accelerator only matrix products give the same bits each time.

A sum of a piece's results belongs to it, although the graph has it later: a bias's part of a
backward reads a gradient that is at hand. So does a mask of random numbers. Views, constants and
arithmetic on sizes are no reason to hold a value. Each piece has its own copy of those it uses.
"""

import math
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from .. import _C
from .pytrees import tensors_in

aten = torch.ops.aten
_CPU_ATTENTION = aten._scaled_dot_product_flash_attention_for_cpu  # draws nothing: no dropout
# torch counts no FLOPs for a CPU's attention, which is called as a GPU's is.
_FLOPS = {
    **flop_registry,
    _CPU_ATTENTION: flop_registry[aten._scaled_dot_product_flash_attention],
    aten._scaled_dot_product_flash_attention_for_cpu_backward: flop_registry[
        aten._scaled_dot_product_flash_attention_backward
    ],
}
# Threads of a compiled kernel race here, where torch's own operators may not.
_RACES_IF_COMPILED = {
    "embedding_dense_backward",
    "index_add",
    "index_reduce",
    "scatter",
    "scatter_add",
    "scatter_reduce",
}
_MATRIX_PRODUCTS = {aten.mm, aten.addmm, aten.bmm, aten.baddbmm}
_SEEDS = "prims.inductor_seeds.default"
_LITTLE = 1 << 18  # elements
_FLOPS_OF_A_RANDOM_NUMBER = 800  # on a CPU, by its time beside a product's


def part_of(
    gm: fx.GraphModule, takes: Sequence[fx.Node], body: Sequence[fx.Node], gives: Sequence[fx.Node]
) -> fx.GraphModule:
    """Return the graph of these nodes alone, as a function of others."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in takes:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = dict(node.meta)
    for node in body:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[node] for node in gives))
    return fx.GraphModule(gm, graph)


class Piece(NamedTuple):
    """A part of a graph, as a graph of its own."""

    gm: fx.GraphModule
    takes: list[fx.Node]  # inputs of the whole graph, or what other pieces give
    gives: list[fx.Node]
    is_fused: bool  # else it stays the operator that it is, or looks at what it takes


def _has_effects(node: fx.Node) -> bool:
    name = str(node.target)
    # An error is no effect that a replay does again: it finds what the first run has found.
    is_check = name == "with_effects" and node.args[1] is aten._linalg_check_errors.default
    return name in ("with_effects", "print", "call_torchbind") and not is_check


# See Note [A graph is cut at its products]
def cut(gm: fx.GraphModule, is_backward: bool) -> list[Piece]:
    """Cut a graph into pieces, in the order in which they run."""
    _fill_in_values(gm)
    is_whole = _makes_little(gm, is_backward)
    for node in _calls_in(gm):
        node.meta["stays"] = has_to_stay(node) if is_whole else _is_operator(node)
        if _has_effects(node):
            refuse(node, "has effects beside its results")
        if node.graph is not gm.graph and _stays(node) and _packet(node) not in _FLOPS:
            refuse(node, "may have other bits each time, and is in a branch or a loop")
    gm.graph.eliminate_dead_code()
    results = list(dict.fromkeys(gm.graph.output_node().all_input_nodes))
    places: dict[int, list[fx.Node]] = {}
    for node, place in _places(gm, results, is_whole).items():
        places.setdefault(place, []).append(node)
    sizes = [n for n in gm.graph.find_nodes(op="placeholder") if _is_size(n)]
    symbols = [n for n in sizes if not is_of_nested(n.meta["val"])]  # their parts are plain
    taken: dict[int, list[fx.Node]] = {}
    bodies: dict[int, list[fx.Node]] = {}
    for place, own in places.items():
        body, taken[place] = set(own), list(symbols)
        for node in visit(own, lambda n, own=set(own): n in own or _is_copied(n)):  # type: ignore[misc]
            if _is_copied(node):
                body.add(node)
            elif node not in body and node not in symbols:
                taken[place].append(node)
        bodies[place] = [node for node in gm.graph.nodes if node in body]
    wanted = set(results).union(*taken.values())
    pieces: list[Piece] = []
    for place in sorted(places):
        gives = [node for node in places[place] if node in wanted]
        part = part_of(gm, taken[place], bodies[place], gives)
        is_fused = not all(map(is_look, bodies[place])) and not any(map(_stays, places[place]))
        if not is_fused:
            for view in part.graph.find_nodes(op="call_function", target=aten.view.default):
                view.target = aten.reshape.default  # of whatever strides a piece gives
            for node in part.graph.nodes:
                if isinstance(node.target, torch._ops.HigherOrderOperator):
                    node.target = _for_levels(node.target)
                elif str(node.target) == _SEEDS:  # drawn as inductor draws them
                    of = torch.iinfo(torch.int64)
                    node.kwargs = {"dtype": torch.int64, "device": node.args[1]}
                    node.target, node.args = aten.randint.low, (of.min, of.max, [node.args[0]])
            part.recompile()
        pieces.append(Piece(part, taken[place], gives, is_fused))
    return pieces


def _fill_in_values(gm: fx.GraphModule) -> None:
    """Note what a node comes to where torch has not: in nodes that its partitioner adds."""
    for node in gm.graph.nodes:
        is_added = isinstance(node.target, torch._ops.HigherOrderOperator)
        if (is_added or node.target is operator.getitem) and "val" not in node.meta:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta.get("val"))
            node.meta["val"] = node.target(*args, **kwargs)


def _places(gm: fx.GraphModule, results: Sequence[fx.Node], is_whole: bool) -> dict[fx.Node, int]:
    """Return the piece of each node that computes something, and of each result."""
    found: dict[fx.Node, int] = {}
    place = 0  # what stays the operator that it is has an odd one
    for node in gm.graph.nodes:
        if node.op != "call_function" or _is_copied(node):
            continue
        whole: Any = node.args[0] if node.target is operator.getitem else node
        if str(node.target) == _SEEDS:
            found[node] = place - 1  # beside the last that stays: it depends on no piece
        elif _stays(node):
            found[node] = place + 1
            place += 2
        elif _is_random(node) and not is_whole:
            found[node] = place + 2
            place += 4
        elif whole in found:
            found[node] = found[whole]
        else:
            sources = [found[n] for n in visit(node.all_input_nodes, _is_copied) if n in found]
            latest = max(sources, default=place)
            found[node] = latest + latest % 2 if _sums_up(node) else place
    for node in results:
        if node.op != "placeholder" and node not in found:
            seen = [n for n in visit([node], _is_copied) if n.op != "placeholder"]
            made = [found[n] for n in seen if n in found]
            found[node] = max(made, default=place + 3 if all(map(is_look, seen)) else 0)
    return found


def visit(nodes: Iterable[fx.Node], through: Callable[[fx.Node], bool]) -> list[fx.Node]:
    """Return the nodes and what they are computed from, as far as it goes `through` nodes."""
    found = dict.fromkeys(nodes)
    todo = list(found)
    while todo:
        node = todo.pop()
        if through(node):
            todo.extend(n for n in node.all_input_nodes if n not in found)
            found.update(dict.fromkeys(node.all_input_nodes))
    return list(found)


def _is_copied(node: fx.Node) -> bool:
    """Return whether each piece computes it by itself: no memory is held by it, or none is read."""
    if is_look(node):
        return True
    if node.op != "call_function" or _stays(node):
        return False
    is_constant = not any(tensors_in(n.meta.get("val")) for n in node.all_input_nodes)
    return is_constant and isinstance(node.meta.get("val"), Tensor)


def is_look(node: fx.Node) -> bool:
    """Return whether a node is a view of its argument, a size, or there from the beginning."""
    if node.op != "call_function" or node.target is operator.getitem:
        return node.op == "get_attr" or is_view(node)
    return is_view(node) or _is_size(node)


def is_view(node: fx.Node) -> bool:
    """Return whether a node is a view of its argument, or one of several."""
    if node.op != "call_function":
        return False
    if node.target is operator.getitem:
        return isinstance(node.args[0], fx.Node) and is_view(node.args[0])
    return bool(getattr(node.target, "is_view", False))


def _sums_up(node: fx.Node) -> bool:
    """Return whether a node's result is much smaller than what it reads, or a mask of that."""
    if any(map(_is_random, node.all_input_nodes)):
        return all(value.dtype == torch.bool for value in tensors_in(node.meta["val"]))
    read = sum(map(_elements_of, node.all_input_nodes))
    return read > 0 and _elements_of(node) * 4 <= read


def _elements_of(node: fx.Node) -> int:
    """Return the elements of a node's results, for the sizes with which it was traced."""
    found = 0
    for value in tensors_in(node.meta.get("val")):
        sizes: Sequence[Any] = value.shape
        hints = [s.node.hint if isinstance(s, torch.SymInt) else s for s in sizes]
        found += math.prod(hint or 0 for hint in hints)
    return found


def _makes_little(gm: fx.GraphModule, is_backward: bool) -> bool:
    """Return whether a graph takes less time than its operators take the host, at any sizes."""
    results = gm.graph.output_node().all_input_nodes if is_backward else []
    returned = set(visit(results, is_look))
    calls = (n for n in gm.graph.nodes if n.op == "call_function" and n not in returned)
    return is_little(n for n in calls if not is_look(n) and n.target is not operator.getitem)


def is_little(made: Iterable[fx.Node]) -> bool:
    """Return whether it takes the host longer to call operators than what they make."""
    sizes = [value.numel() for value in tensors_in([node.meta.get("val") for node in made])]
    return not any(isinstance(size, torch.SymInt) for size in sizes) and sum(sizes) <= _LITTLE


def has_to_stay(node: fx.Node) -> bool:
    """Return whether a node is no part of any piece: a second run may give other bits."""
    on_cpu = _is_on_cpu(node)
    is_product = _packet(node) in (_FLOPS if on_cpu else _MATRIX_PRODUCTS)
    attends = _packet(node) is _CPU_ATTENTION
    repeats = is_product and (attends or _has_one_result(node.target, on_cpu))
    return _is_operator(node) and not repeats


def _stays(node: fx.Node) -> bool:
    """Return whether a node stays the operator that it is, as has been found."""
    return bool(node.meta.get("stays"))


def _is_on_cpu(node: fx.Node) -> bool:
    return all(value.is_cpu for value in tensors_in(node.meta.get("val")))


def _is_operator(node: fx.Node) -> bool:
    """Return whether a node stays the operator that it is, where graphs are cut at products."""
    on_cpu = _is_on_cpu(node)
    if not isinstance(node.target, torch._ops.HigherOrderOperator):
        return _stays_itself(node.target, on_cpu)
    # One that carries neither an operator nor a graph, into which `cut` looks, may do anything.
    leaves = tree_leaves([node.args, node.kwargs])
    operators = [leaf for leaf in leaves if isinstance(leaf, torch._ops.OpOverload)]
    stays = any(_stays_itself(each, on_cpu) for each in operators)
    stays |= not (operators or any(map(_is_graph, leaves)))
    return stays or str(node.target) == "with_effects"


def _for_levels(target: Any) -> Callable[..., Any]:
    """Return a function for an operator that chooses by dispatch keys, and does not know ours."""
    by_device = target.py_kernels.get(torch._C.DispatchKey.BackendSelect, target)

    def run(*args: Any, **kwargs: Any) -> Any:
        return (by_device if _C.sees_level(list(args)) else target)(*args, **kwargs)

    return run


def _is_graph(value: Any) -> bool:
    if not isinstance(value, fx.Node) or value.op != "get_attr":
        return False
    attribute = operator.attrgetter(str(value.target))
    return isinstance(attribute(value.graph.owning_module), fx.GraphModule)


def _stays_itself(target: Any, on_cpu: bool) -> bool:
    if not isinstance(target, torch._ops.OpOverload):
        return False
    name = target._schema.name.removeprefix("aten::")
    is_product = target.overloadpacket in _FLOPS
    return is_product or name in _RACES_IF_COMPILED or not _has_one_result(target, on_cpu)


def _has_one_result(target: Any, on_cpu: bool) -> bool:
    return bool(_C.has_one_result(target._schema.name, target._schema.overload_name, on_cpu))


def _is_random(node: fx.Node) -> bool:
    return str(node.target) in ("prims.inductor_random.default", "prims.inductor_randint.default")


def _is_size(node: fx.Node) -> bool:
    return isinstance(
        node.meta.get("val"), int | float | torch.SymInt | torch.SymFloat | torch.SymBool
    )


def is_of_nested(value: Any) -> bool:
    """Return whether it is the size of a jagged tensor, which is no number."""
    return isinstance(value, torch.SymInt) and bool(value.node.is_nested_int())


def _packet(node: fx.Node) -> Any:
    return getattr(node.target, "overloadpacket", None)


def refuse(node: fx.Node, what: str) -> None:
    raise NotImplementedError(
        f'torch.compile(f, backend="rematfn"): {node.target} {what}, and a replay would do it '
        "again. Compile with another backend, and wrap that: rematfn.opaque(torch.compile(f))."
    )


def bytes_of_results(gm: fx.GraphModule) -> list[int | torch.SymInt]:
    """Return the bytes of each storage that the graph makes, and returns something of."""
    given = [node.meta.get("val") for node in gm.graph.find_nodes(op="placeholder")]
    seen = {value.untyped_storage()._cdata for value in tensors_in(given)}
    found: list[int | torch.SymInt] = []
    results = [node.meta.get("val") for node in gm.graph.output_node().all_input_nodes]
    for value in tensors_in(results):
        storage = value.untyped_storage()
        if storage._cdata not in seen:
            seen.add(storage._cdata)
            found.append(storage.nbytes())
    return found


def flops_of(gm: fx.GraphModule) -> list[int | torch.SymInt]:
    """Return the FLOPs of products and random numbers in the graph, as torch counts the former."""

    def value(node: fx.Node) -> Any:
        return node.meta.get("val")

    found: list[int | torch.SymInt] = []
    for node in _calls_in(gm):
        count = _FLOPS.get(_packet(node))
        if count is not None:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), value)
            found.append(count(*args, **kwargs, out_val=value(node)))
        elif _is_random(node) and value(node).is_cpu:
            found.append(value(node).numel() * _FLOPS_OF_A_RANDOM_NUMBER)
    return found


def _calls_in(gm: fx.GraphModule) -> Iterator[fx.Node]:
    """Visit the calls of a graph, and of those in it."""
    for module in gm.modules():
        if isinstance(module, fx.GraphModule):
            yield from (node for node in module.graph.nodes if node.op == "call_function")
