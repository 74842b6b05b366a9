# SPDX-License-Identifier: Apache-2.0
"""Traces of programs that run on shapes alone: nothing is computed, and nothing takes memory."""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._library.utils import mutated_args_kwargs
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from .. import _C
from .._interop.pytrees import graph_behind, tensors_in, tensors_of

# Writes that the schema does not tell of, while training: positions.
_UNTOLD = {"aten::native_batch_norm": (3, 4), "aten::cudnn_batch_norm": (3, 4)}

# Note [A trace of shapes]
# ~~~~~~~~~~~~~~~~~~~~~~~~~
# The engine sees no operator on fake tensors, see Note [Shapes alone]: what it would see are those
# that a fake tensor's shape function is made of. So a dispatch mode, above the fake tensors',
# writes the trace: the operators are the same, since both stand below autograd and the transforms.
# A tensor that is not fake becomes so on its way in; it came from outside. A storage is released
# when its Python object goes, which lives as long as the storage does. Two things are not in the
# trace: the scratch of kernels, which no shape function knows, and bytes beside operators.
# And where autograd adds up gradients in place, fake ones are added into a fresh tensor: a guide
# takes the one for the other.


class _Shapes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Writes down what the operators inside read, make and overwrite."""

    def __init__(self, fakes: FakeTensorMode, state: "_State") -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.core = _C.Trace()
        self.ran_backward = False
        self._fakes = fakes
        self._state = state
        self._values: dict[int, int] = {}  # by storage
        self._counted: set[int] = set()
        self._watched: dict[int, weakref.ref[Any]] = {}
        self.pauses = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map(self.faked, (args, kwargs or {}))
        if self.pauses:
            return func(*args, **kwargs)
        places: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
        given = [(place, t) for place, x in places for t in tensors_in(x)]
        result = func(*args, **kwargs)
        self._note(func, given, args, result)
        return result

    def faked(self, x: Any) -> Any:
        """Return what the operators are given instead of ``x``."""
        if not isinstance(x, Tensor) or isinstance(x, FakeTensor):
            return x
        self._state.note_leaf(x)
        return self._fakes.from_tensor(x)

    def _note(
        self, func: Any, given: list[tuple[int | str, Tensor]], args: Any, result: Any
    ) -> None:
        name = func._schema.name
        positions, names = mutated_args_kwargs(func._schema)
        untold = _UNTOLD.get(name, ())
        written = {*positions, *names, *(untold if untold and args[5] is True else ())}
        reads = [(self._value(t, counted=False), place in written) for place, t in given]
        results = {t.untyped_storage()._cdata: t for t in tensors_in(result)}
        fresh = [t for cdata, t in results.items() if cdata not in self._values]
        makes: list[tuple[int, int]] = []
        touched = 0
        for i, (place, t) in enumerate(given):
            touched += t.nbytes * (2 if place in written else 1)
            cdata = t.untyped_storage()._cdata
            if place in written and cdata in self._counted:
                value = self.core.add_value(t.untyped_storage().nbytes(), True)
                if all(self._values[cdata] != v for v, _ in makes):
                    self._values[cdata] = value
                    makes.append((value, i))
        if not fresh and not any(w for _, w in reads) and type(result) is not bool:
            return  # a view, or a question that no level sees
        nbytes = sum(t.untyped_storage().nbytes() for t in fresh)
        makes += [(self._value(t, counted=True), -1) for t in fresh]
        example = next(iter(fresh), given[0][1] if given else torch.empty(0))
        made = [*fresh, *(t for place, t in given if place in written)]
        elements = max((t.numel() for t in made), default=0)
        overload, device = func._schema.overload_name, example.device.type
        flops, cost = _C.modelled_cost(
            name, overload, args, elements, touched + nbytes, device, example.itemsize
        )
        raw = "empty" in name and not written
        backward = torch._C._current_graph_task_id() != -1
        self.ran_backward |= backward
        self.core.add_call(name, cost, flops, nbytes, 0, True, raw, backward, reads, makes)

    def _value(self, t: Tensor, counted: bool) -> int:
        storage = t.untyped_storage()
        cdata = storage._cdata
        value = self._values.get(cdata)
        if value is None:
            value = self._values[cdata] = self.core.add_value(storage.nbytes(), counted)
            self._watched[cdata] = weakref.ref(storage, lambda _: self._release(cdata))
            if counted:
                self._counted.add(cdata)
        return value

    def _release(self, cdata: int) -> None:
        value = self._values.pop(cdata)
        del self._watched[cdata]
        if cdata in self._counted:
            self._counted.discard(cdata)
            self.core.add_release(value)

    def seal(self, t: Tensor) -> None:
        """Note that ``t`` is the caller's from now on."""
        cdata = t.untyped_storage()._cdata
        if cdata in self._counted:
            self._counted.discard(cdata)
            self.core.add_seal(self._values[cdata])


def is_on_shapes(args: Any) -> bool:
    """Whether fake tensors are among the arguments, or made of everything there is."""
    return _active() is not None or _has_fakes(tensors_of(args))


class _State:
    """What a call on shapes would leave fake: it is put back as it was.

    Those are the attributes of modules and the state of optimisers that run, and the gradients of
    leaves that are read.
    """

    def __init__(self) -> None:
        self._before: dict[int, tuple[Any, dict[Any, Any]]] = {}  # by the mapping
        self._leaves: dict[int, tuple[Tensor, Tensor | None]] = {}

    def note_module(self, module: torch.nn.Module) -> None:
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None and is_lazy(tensor):
                raise RuntimeError(
                    f"a call on shapes alone: {type(module).__name__} is lazy: `{name}` has no "
                    "shape yet. Call it once on real tensors first."
                )
        for place in (module.__dict__, module._parameters, module._buffers):
            self._note(place)

    def note_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        for place in (optimizer.state, *optimizer.state.values()):
            self._note(place)

    def _note(self, place: Any) -> None:
        self._before.setdefault(id(place), (place, dict(place)))

    def note_leaf(self, t: Tensor) -> None:
        if t.is_leaf and t.requires_grad:
            self._leaves.setdefault(id(t), (t, t.grad))

    def put_back(self) -> None:
        for place, was in reversed(self._before.values()):  # an optimiser's whole state at last
            for name in [n for n, x in place.items() if _has_fakes(tensors_in(x))]:
                if name in was:
                    place[name] = was[name]
                else:
                    del place[name]
        for leaf, gradient in self._leaves.values():
            if isinstance(leaf.grad, FakeTensor):
                leaf.grad = gradient


def _has_fakes(tensors: list[Tensor]) -> bool:
    return any(isinstance(t, FakeTensor) for t in tensors)


@contextmanager
def _state_kept(f: Callable[..., Any]) -> Iterator[_State]:
    """Put back what ``f`` makes fake inside, also where it fails.

    Raises:
        RuntimeError: A module has parameters or buffers without a shape, which would become fake.
    """
    state = _State()
    owner = getattr(f, "__self__", None)
    for module in owner.modules() if isinstance(owner, torch.nn.Module) else ():
        state.note_module(module)
    hooks = (
        register_module_forward_pre_hook(lambda module, args: state.note_module(module)),
        register_optimizer_step_pre_hook(lambda optimizer, *_: state.note_optimizer(optimizer)),
    )
    try:
        yield state
    finally:
        for hook in hooks:
            hook.remove()
        state.put_back()


def trace_on_shapes(
    f: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], backward: bool
) -> _C.Trace:
    """Return the trace of a call of ``f`` on fake tensors, and of a backward of its results."""
    given = [t for t in tensors_of((args, kwargs)) if isinstance(t, FakeTensor)]
    fakes = _active() or (given[0].fake_mode if given else FakeTensorMode())
    try:
        with _state_kept(f) as state:
            shapes = _Shapes(fakes, state)
            args, kwargs = tree_map(shapes.faked, (args, kwargs))
            with torch.random.fork_rng(devices=()), fakes, shapes:
                results = f(*args, **kwargs)
                leaving = tensors_of(results)
                for t in leaving:
                    shapes.seal(t)
                if backward:
                    _run_backward(leaving, shapes)
                del results, leaving
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise RuntimeError(
            f"`{error.func}` asks for the contents of a tensor; on shapes alone there are none. "
            f"Let the first call measure, or record(f, *args) on real tensors."
        ) from error
    return shapes.core


def _run_backward(results: list[Tensor], shapes: _Shapes) -> None:
    """Run the backward of all the results; no tensor's ``grad`` is touched."""
    ends = [t for t in results if t.requires_grad and t.grad_fn is not None]
    if shapes.ran_backward:  # a loss, say, that ``f`` has called backward() of
        freed = {node for node in graph_behind(ends) if _is_freed(node, shapes)}
        ends = [t for t in ends if freed.isdisjoint(graph_behind([t]))]
    leaves = [node.variable for node in graph_behind(ends) if hasattr(node, "variable")]
    if not leaves:
        return
    shapes.pauses = True  # the gradients that come in are the caller's
    given = [torch.ones_like(t) for t in ends]
    shapes.pauses = False
    # A gradient that has arrived is its leaf's.
    handles = [leaf.register_hook(shapes.seal) for leaf in leaves]
    try:
        torch.autograd.grad(ends, leaves, given, allow_unused=True)
    finally:
        for handle in handles:
            handle.remove()


def _is_freed(node: Any, shapes: _Shapes) -> bool:
    """Whether a backward has freed what ``node`` had saved."""
    names = [name for name in dir(node) if name.startswith("_saved_") or name == "saved_tensors"]
    shapes.pauses = True  # hooks on saved tensors may compute
    try:
        for name in names:
            getattr(node, name)
    except RuntimeError:  # torch's own: a second time through the graph
        return True
    finally:
        shapes.pauses = False
    return False


def _active() -> FakeTensorMode | None:
    found: FakeTensorMode | None = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
    return found
