# SPDX-License-Identifier: Apache-2.0
"""What a graph of AOTAutograd's writes into its inputs, taken out of it.

Note [Statistics are no input of their block]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A batch norm's graph makes the new running statistics from the old ones. Were these inputs of the
block's operators, then once they are overwritten these could not be replayed without a copy of
them, and all that the block saves would stay (Note [What an old value is needed for]). But nothing
else in the block depends on them. So what depends on the old contents of an input that is written,
and serves the new ones alone, is taken out, and runs after the block: an operator of its own, which
writes in place. An optimizer's step is hardly anything else. So there is one operator for each
input, or for those that depend on each other: else all that they are made of would be there at
once. What is little is one operator: the statistics of a block.
"""

import operator
from typing import Any, NamedTuple

from torch import fx
from torch._ops import HigherOrderOperator

from .compiled_graphs import aten, has_to_stay, is_little, is_look, is_view, part_of, refuse, visit


class Update(NamedTuple):
    """Writes of inputs, taken out of a graph."""

    gm: fx.GraphModule  # has no results
    written: list[fx.Node]  # what it takes first
    others: list[fx.Node]
    is_compiled: bool  # else it has copies that inductor would take for useless


# See Note [Statistics are no input of their block]
def take_writes(gm: fx.GraphModule) -> list[Update]:
    """Take the writes of inputs out of a graph: those together that depend on each other.

    What they need of the graph it returns after its own results.
    """
    inputs = gm.graph.find_nodes(op="placeholder")
    output = gm.graph.output_node()
    contents: dict[fx.Node, fx.Node] = {}
    for node in list(gm.graph.nodes):
        schema = getattr(node.target, "_schema", None)
        if node.op != "call_function" or schema is None or not schema.is_mutable:
            continue
        if node.target is not aten.copy_.default or node.args[0] not in inputs:
            refuse(node, "writes in the middle of the graph")
        contents[node.args[0]] = node.args[1]
        node.replace_all_uses_with(node.args[1])
        gm.graph.erase_node(node)
    if not contents:
        return []
    calls = (node for node in gm.graph.nodes if node.op == "call_function")
    stay = [n for n in calls if has_to_stay(n) or isinstance(n.target, HigherOrderOperator)]
    needed = set(visit([*output.all_input_nodes, *stay], lambda n: True))
    reads: set[fx.Node] = set(contents)
    for node in gm.graph.nodes:
        if not reads.isdisjoint(node.all_input_nodes):
            reads.add(node)
    apart = set(visit(contents.values(), lambda n: True)) & reads - needed
    places = {node: place for place, node in enumerate(gm.graph.nodes)}
    moved: dict[fx.Node, None] = {}
    for node in places:
        is_part = node.target is operator.getitem and node.args[0] not in moved
        if node.op != "placeholder" and node in apart and not is_part:
            moved[node] = None
    own = {*contents, *moved}
    groups: list[set[fx.Node]] = []
    in_one = is_little(contents)
    for node, new in contents.items():
        group = {node, *visit([new], lambda n: n in moved or is_view(n))}
        joined = [other for other in groups if in_one or other & group & own]
        groups = [*(g for g in groups if g not in joined), group.union(*joined)]
    updates: list[Update] = []
    for group in groups:
        written = [node for node in contents if node in group]
        body = sorted((n for n in group if n in moved or is_view(n)), key=places.__getitem__)
        news = [contents[node] for node in written]
        sources = [*(n for node in body for n in node.all_input_nodes), *news]
        others = [n for n in dict.fromkeys(sources) if n not in written and n not in body]
        part = part_of(gm, [*written, *others], body, news)
        updates.append(Update(part, written, others, not _write_at_end(part, len(written))))
    results: Any = output.args[0]
    output.args = ((*results, *dict.fromkeys(n for update in updates for n in update.others)),)
    for node in reversed(moved):
        gm.graph.erase_node(node)
    return updates


def _write_at_end(gm: fx.GraphModule, written: int) -> bool:
    """Have a graph write what it gives into its first inputs; return whether it copies that before.

    All that it gives is from before the first write.
    """
    end = gm.graph.output_node()
    inputs = gm.graph.find_nodes(op="placeholder")[:written]

    def call(target: Any, *args: fx.Node) -> fx.Node:
        with gm.graph.inserting_before(end):
            node = gm.graph.call_function(target, args)
        node.meta = dict(args[0].meta)
        return node

    given: Any = end.args[0]
    contents = [call(aten.clone.default, n) if n in inputs or is_look(n) else n for n in given]
    for node, new in zip(inputs, contents, strict=True):
        call(aten.copy_.default, node, new)
    end.args = ((),)
    gm.recompile()
    return contents != list(given)
