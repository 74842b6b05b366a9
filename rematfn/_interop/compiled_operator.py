# SPDX-License-Identifier: Apache-2.0
"""``rematfn::compiled``: the operator that a compiled piece of a graph is to a level.

Note [Compiled pieces are operators]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
AOTAutograd makes a forward and a backward graph of a block. These are cut into pieces
(Note [A graph is cut at its products]), and inductor makes a function of each, which takes the
addresses of what it is given. As the kernel of an operator it may: a level has the arguments of an
operator in place, and meters what it allocates. So each piece is one call of `rematfn::compiled`,
which is counted, evicted and replayed as any other. A replay finds the function by its number.

An operator reads its arguments and returns fresh tensors. A graph of AOTAutograd's does more than
that, and this is undone outside of the operators:

- It writes its inputs, by `copy_` at its end. These are taken out of the graph, and are operators
  of their own: Note [Statistics are no input of their block]. So a replay writes nothing.
- Among its results are inputs, views, the same one twice, sizes and None. An operator returns one
  tensor for each fresh storage. What the rest is made of is found by the storages when it runs.

Without a level the functions are called as they are. They are the same, and so are the bits.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from .compiled_graphs import bytes_of_results, flops_of

# See Note [Compiled pieces are operators]
# What has compiled a graph may be gone when a level replays it, so all that ran stay.
_pieces: list["CompiledPiece"] = []
_ran = threading.local()  # what the last piece's results are made of


class CompiledPiece:
    """A piece of a graph, compiled.

    Attributes:
        run: The function that was compiled of it. It empties the list that it is given.
    """

    def __init__(
        self,
        gm: fx.GraphModule,
        inputs: Sequence[Any],
        compile_it: Callable[[], Callable[[list[Any]], Any]],
    ) -> None:
        self._kinds = [_kind_of(value) for value in inputs]
        self._symbols = list(_symbols_in(inputs))
        self._result_bytes = bytes_of_results(gm)
        self._products = flops_of(gm)
        self._known: dict[tuple[Any, ...], tuple[int, int]] = {}
        self.run = compile_it()  # which may change the graph
        self._number = len(_pieces)
        _pieces.append(self)

    def run_as_operator(self, args: list[Any]) -> list[Any]:
        """Return what `run` does, by the operator."""
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
        fresh = _OPERATOR(tensors, sizes, numbers, self._number, flops)
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
    tensors: list[Tensor], sizes: list[int], numbers: list[float], piece: int, flops: int
) -> list[Tensor]:
    ran = _pieces[piece]
    with torch._C._AutoDispatchBelowADInplaceOrView():
        results = ran.run(ran.arguments(tensors, sizes, numbers))
        fresh, _ran.parts = _take_apart(results, tensors)
    return fresh


def _run_on_shapes(
    tensors: list[Tensor], sizes: list[int], numbers: list[float], piece: int, flops: int
) -> list[Tensor]:
    """Return a tensor of as many bytes as the results have: a level asks for no more."""
    ran = _pieces[piece]
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


# The arguments of a piece, by kind; the number that it has here; the FLOPs that it takes.
_SIGNATURE = "(Tensor[] tensors, int[] sizes, float[] numbers, int piece, int flops) -> Tensor[]"
_LIBRARY: Any = torch.library.Library("rematfn", "DEF")  # type: ignore[no-untyped-call]
_LIBRARY.define("compiled" + _SIGNATURE)
_LIBRARY.impl("compiled", _run, "CompositeExplicitAutograd")
_LIBRARY.impl("compiled", _run_on_shapes, "Meta")
_OPERATOR = torch.ops.rematfn.compiled.default
