# SPDX-License-Identifier: Apache-2.0
"""``rematfn::compiled``: the operator that a compiled piece of a graph is to a level.

Note [Compiled pieces are operators]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
AOTAutograd makes a forward and a backward graph of a block. These are cut into pieces
(Note [A graph is cut at its products]), and inductor makes a function of each, which takes the
addresses of what it is given. As the kernel of an operator it may: a level has the arguments of an
operator in place, and meters what it allocates. So each piece is one call of `rematfn::compiled`,
which is counted, evicted and replayed as any other. A replay finds the function by its number:
Note [A piece outlives its function].

An operator reads its arguments and returns fresh tensors. A graph of AOTAutograd's does more than
that, and this is undone outside of the operators:

- It writes its inputs, by `copy_` at its end. These are taken out of the graph, and are calls of
  `rematfn::compiled_`: Note [Statistics are no input of their block]. So a replay writes nothing.
- Among its results are inputs, views, the same one twice, sizes and None. An operator returns one
  tensor for each fresh storage. What the rest is made of is found by the storages when it runs.

Without a level the functions are called as they are. They are the same, and so are the bits.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from .. import _C
from .compiled_graphs import bytes_of_results, flops_of, is_of_nested


# See Note [Compiled pieces are operators]
class CompiledPiece:
    """A piece of a graph, compiled."""

    def __init__(
        self,
        gm: fx.GraphModule,
        inputs: Sequence[Any],
        written: int,
        compile_it: Callable[[], Callable[[list[Any]], Any]],
    ) -> None:
        self._kinds = "".join(map(_kind_of, inputs))
        self._symbols = list(_symbols_in(inputs))
        self._result_bytes = bytes_of_results(gm)
        self._products = flops_of(gm)
        self._known = functools.cache(self._evaluate)
        # It empties the list that it is given. To compile may change the graph.
        self.run = compile_it()
        self.number = _C.add_piece(
            self._kinds, written, self.run, lambda args: self._known_of(args)[1]
        )

    def run_as_operator(self, args: list[Any]) -> list[Any]:
        if "?" in self._kinds:
            raise NotImplementedError(
                'torch.compile(f, backend="rematfn") inside of remat: the graph is given '
                f"{args[self._kinds.index('?')]!r}, which cannot be written down. Compile with "
                "another backend, and wrap that: rematfn.opaque(torch.compile(f))."
            )
        results: list[Any] | None = _C.run_piece(self.number, self._known_of(args)[0], args)
        if results is None:
            raise RuntimeError(
                'torch.compile(f, backend="rematfn"): nothing was computed, since what runs '
                "around it asks for shapes alone."
            )
        return results

    def _known_of(self, args: Sequence[Any]) -> tuple[int, int]:
        """Return the FLOPs of a call, and the bytes of its results."""
        sizes = (args[i] if d is None else args[i].shape[d] for _, i, d in self._symbols)
        return self._known(*sizes)

    def _evaluate(self, *sizes: int) -> tuple[int, int]:
        values = {of[0]: size for of, size in zip(self._symbols, sizes, strict=True)}
        flops = sum(_number(n, values) for n in self._products)
        return flops, sum(_number(n, values) for n in self._result_bytes)


def _kind_of(value: Any) -> str:
    """Return what the operator calls it: T, i, f; or ? for what it does not take."""
    if isinstance(value, Tensor):
        return "T"
    if isinstance(value, int | torch.SymInt) and not isinstance(value, bool):
        return "?" if is_of_nested(value) else "i"
    return "f" if isinstance(value, float | torch.SymFloat) else "?"


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
    found = size.node.expr.xreplace(values)  # a Python number, where it was a symbol alone
    return int(found) if isinstance(found, int) or found.is_number else 0
