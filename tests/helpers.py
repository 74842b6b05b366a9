# SPDX-License-Identifier: Apache-2.0
"""The oracle (bitwise equality with the untransformed function) and the ways to transform.

A test is written as `run(transform)`, which builds everything from fixed seeds, applies
`transform` where `remat` stands, and returns all that the caller ends up holding. The oracle is
`run(untransformed)`; a mode is another way to choose `transform`.
"""

import functools
import gc
import inspect
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import optree
import torch
from programs import Case, Program
from torch import Tensor, nn

import rematfn
from rematfn import _C
from rematfn._C import format_bytes
from rematfn._transform.budget import parse_budget

Transform = Callable[..., Any]
Item = TypeVar("Item")
Other = TypeVar("Other")
Run = Callable[[Transform], Any]


def described(value: object) -> str:
    """Return a test's id that is the same in every process: `repr`, without addresses."""
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


EXHAUSTIVE = bool(os.environ.get("REMATFN_EXHAUSTIVE"))


def some(items: Iterable[Item], share: int) -> list[Item]:
    """Return one of `share` items; `make test-exhaustive` takes all."""
    return list(items)[:: 1 if EXHAUSTIVE else share]


def spread(first: Iterable[Item], second: Iterable[Other], share: int) -> list[tuple[Item, Other]]:
    """Return pairs: with each of `first` one of `share` of `second`, and others with the next.

    `make test-exhaustive` takes all.
    """
    share, seconds = 1 if EXHAUSTIVE else share, list(second)
    return [(a, b) for k, a in enumerate(first) for b in seconds[k % share :: share]]


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


# --- the oracle ---------------------------------------------------------------------------------


_PARTS = {
    torch.strided: (),
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}


def address_of(t: Tensor) -> int:
    """Return the address of `t` as C++ code takes it: nobody is told."""
    return torch._C.TensorBase.data_ptr(t)


def parts(t: Tensor) -> list[Tensor]:
    """Return the tensors that a sparse tensor is made of; none, if it is strided."""
    return [getattr(t.detach(), name)() for name in _PARTS[t.layout]]


def bits(t: Tensor) -> Tensor:
    """Return the bit pattern of `t`: NaN payloads and signed zeros are told apart."""
    t = t.detach().resolve_conj().resolve_neg()
    if t.is_complex():
        t = torch.view_as_real(t)
    return t.contiguous().view(_BITS[t.element_size()])


def difference(actual: Any, expected: Any) -> str:
    """Return in what two leaves differ, or nothing."""
    if not isinstance(expected, Tensor):
        nan = expected != expected and actual != actual
        same = type(actual) is type(expected) and (nan or actual == expected)
        return "" if same else f"{actual!r} instead of {expected!r}"
    if type(actual) is not type(expected):
        return f"{type(actual)} instead of {type(expected)}"
    for name in ("layout", "dtype", "device", "shape", "requires_grad", "is_leaf"):
        if getattr(actual, name) != getattr(expected, name):
            return f"{name} {getattr(actual, name)} instead of {getattr(expected, name)}"
    if expected.layout != torch.strided:
        found = map(difference, parts(actual), parts(expected))
        return next((f"of the parts, {f}" for f in found if f), "")
    for name in ("stride", "storage_offset", "is_conj", "is_neg", "is_inference"):
        if getattr(actual, name)() != getattr(expected, name)():
            return f"{name} {getattr(actual, name)()} instead of {getattr(expected, name)()}"
    unequal = int((bits(actual) != bits(expected)).sum())
    return f"{unequal} elements differ in {expected.numel()}" if unequal else ""


def sharing(tensors: list[Tensor]) -> list[int]:
    """Return for each tensor the first one on the same storage: what aliases what."""
    strided = (t for t in tensors if t.layout == torch.strided and not t._is_zerotensor())
    pointers = [t.untyped_storage().data_ptr() for t in strided]
    return [pointers.index(p) if p else -1 for p in pointers]


def assert_bitwise_equal(actual: Any, expected: Any) -> None:
    """Assert that two pytrees agree in structure, in every bit, and in what aliases what."""
    ours, theirs = optree.tree_paths(actual), optree.tree_paths(expected)
    assert ours == theirs, f"structure {ours} instead of {theirs}"
    leaves, others = optree.tree_leaves(actual), optree.tree_leaves(expected)
    for path, a, e in zip(theirs, leaves, others, strict=True):
        found = difference(a, e)
        assert not found, f"at {path}: {found}"
    aliases = sharing([t for t in leaves if isinstance(t, Tensor)])
    assert aliases == sharing([t for t in others if isinstance(t, Tensor)]), "aliasing differs"


def tensors_in(tree: Any) -> Iterator[Tensor]:
    """Yield the tensors of a pytree, each followed by its gradients of any order."""
    for leaf in optree.tree_leaves(tree):
        while isinstance(leaf, Tensor):
            yield leaf
            leaf = leaf.grad if leaf.is_leaf else None


def assert_nothing_keyed(tree: Any) -> None:
    """Assert that no tensor the caller holds belongs to a level."""
    keyed = [tuple(t.shape) for t in tensors_in(tree) if _C.has_key(t)]
    assert not keyed, f"{len(keyed)} tensors still carry the key, of shapes {keyed}"


def assert_exact_within(budget: int, g: Transform, f: Transform, *args: Any) -> None:
    """Assert that `g` gives what `f` does, and that what it holds but for that is in the budget."""
    expected = f(*args)
    with rematfn.testing.MemoryTimeline() as timeline:
        found = g(*args)
    assert_bitwise_equal(found, expected)
    assert timeline.peak_excluding_survivors <= budget


# --- what is left behind --------------------------------------------------------------------------


def remains() -> dict[str, int]:
    """Count what is alive, cycles through autograd graphs and tracebacks aside."""
    if _C.testing.live_levels() or _C.testing.live_operations():
        # autograd's queue holds on to a backward that failed until the thread runs another one.
        torch.ones((), requires_grad=True).sin().backward()
        gc.collect()
    return {"levels": _C.testing.live_levels(), "operations": _C.testing.live_operations()}


def doubling(see: Callable[[Tensor, Tensor], object]) -> Callable[[Tensor], Tensor]:
    """Return a function that doubles. Its backward shows `see` two gradients."""

    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            doubled = gradient * 2
            see(gradient, doubled)
            return doubled

    return Doubled.apply


@torch.library.custom_op(
    "rematfn_tests::drawn", mutates_args=(), tags=(torch.Tag.nondeterministic_bitwise,)
)
def drawn(x: Tensor) -> Tensor:
    """An operator that is never replayed."""
    return x + 1


drawn.register_fake(torch.empty_like)
drawn.register_autograd(lambda ctx, grad: grad)


def assert_nothing_left(before: dict[str, int]) -> None:
    """Assert that no level, and no lineage, has been added to what there was before."""
    assert _C.stack_depth() == 0, "a level was left on the stack"
    after = remains()
    assert all(after[k] <= before[k] for k in after), f"left behind: {after}, before: {before}"


# --- the ways to transform ------------------------------------------------------------------------


def kept(how: Transform) -> tuple[Transform, list[Any]]:
    """Return a transform that does what `how` does, and the list of all that it has made."""
    made: list[Any] = []

    def transform(f: Any) -> Any:
        made.append(how(f))
        return made[-1]

    return transform, made


def untransformed(f: Transform) -> Transform:
    return f


EVERYTHING = functools.partial(rematfn.remat, policy=rematfn.testing.EvictEverything(), verify=True)


NO_LIMIT = 1 << 50  # bytes; with a budget the level records what its operators need
ROUNDS = 20


def asked_for(error: rematfn.BudgetError) -> int:
    """Return the bytes that a BudgetError advises."""
    advice = r"Raise the budget to (?:at least |about )?(?:.*?\((\d+) bytes\)|([\d.]+ [A-Za-z]+))"
    found = re.search(advice, str(error))
    assert found, f"no advice in: {error}"
    exact = parse_budget(found[1] or found[2]).bytes
    assert exact
    return exact


def smallest_budgets(
    run: Run,
    fraction: float = 0.0,
    policy: rematfn.policies.Policy | None = None,
    look: Callable[[str, Any], None] = lambda name, result: None,
) -> list[int]:
    """Return, for each function that `run` transforms, about the smallest budget that does.

    The largest need of a single operator is where to start, or a fraction of the unconstrained
    peak if that is more. Two inputs of one operator may not fit together while the second one is
    replayed; then a BudgetError says what would. `look` sees what the measuring runs give.
    """
    transformed: list[Any] = []

    def probe(f: Transform, how: Transform) -> Transform:
        transformed.append(how(f))
        return transformed[-1]

    everything = functools.partial(EVERYTHING, budget=NO_LIMIT)
    look("everything", run(lambda f: probe(f, everything)))
    needs = [rematfn.stats(g).min_budget for g in transformed]
    transformed.clear()
    look("plain", run(lambda f: probe(f, rematfn.remat)))
    peaks = [int(fraction * rematfn.stats(g).peak_bytes) for g in transformed]
    transformed.clear()
    budgets = [max(2, need, peak) for need, peak in zip(needs, peaks, strict=True)]
    for _ in range(ROUNDS):
        error = shortage(run, budgets, policy)
        if error is None:
            return budgets
        asked = asked_for(error)
        named = [f"budget={format_bytes(b)}" in str(error) for b in budgets]
        assert any(named), f"no budget of {budgets} in: {error}"
        assert all(asked > b for b, n in zip(budgets, named, strict=True) if n), str(error)
        # At least by a fifth, since advice for the next operator alone can rise in small steps.
        budgets = [max(asked, b * 6 // 5) if n else b for b, n in zip(budgets, named, strict=True)]
    raise AssertionError(f"still not enough after {ROUNDS} rounds of advice: {budgets}")


def shortage(
    run: Run, budgets: list[int], policy: rematfn.policies.Policy | None = None
) -> rematfn.BudgetError | None:
    """Return the BudgetError that `run` meets within `budgets`, if any, without its traceback."""
    try:
        return refusal_of(lambda: run(within(budgets, policy)))
    except RuntimeError as error:
        # Below a tracer, TorchScript keeps neither the type of an error nor its message.
        if "TorchScript interpreter" not in str(error):
            raise
        return rematfn.BudgetError(_C.testing.last_message())


def refusal_of(run: Callable[[], Any]) -> rematfn.BudgetError | None:
    """Return the BudgetError that `run` ends with, if any, without its traceback."""
    try:
        run()
    except rematfn.BudgetError as error:
        return error.with_traceback(None)
    return None


def within(budgets: list[int], policy: rematfn.policies.Policy | None = None) -> Transform:
    """Return a transform that gives the k-th function it meets the k-th budget."""
    left = iter(budgets)
    remat = rematfn.remat if policy is None else functools.partial(rematfn.remat, policy=policy)
    return lambda f: remat(f, budget=next(left))


@dataclass(frozen=True)
class Mode:
    """One way to put `remat` into a program: no cap, hardly enough room, or none to spare."""

    name: str
    fraction: float = 0.0  # the least budget, as a fraction of the unconstrained peak

    def __call__(self, run: Run) -> Any:
        """Return `run` under this mode."""
        if self.name == "plain":
            return run(rematfn.remat)
        if self.name == "everything":
            return run(EVERYTHING)
        return run(within(smallest_budgets(run, self.fraction)))


PLAIN, TIGHT, EVERY = Mode("plain"), Mode("tight"), Mode("everything")
EACH = Mode("each")  # the three in turn: the runs that measure for the tight one are the other two
# For hundreds of operators: the smallest budget of all would cost them far too many replays.
SNUG = Mode("each", 0.3)


def assert_same_as_eager(run: Run, mode: Mode = EACH) -> Any:
    """Assert that `run` under `mode` is bitwise the untransformed run; return what it gave."""
    expected = run(untransformed)

    def compare(name: str, actual: Any) -> Any:
        assert_nothing_keyed(actual)
        try:
            assert_bitwise_equal(actual, expected)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error
        return actual

    if mode.name != "each":
        return compare(mode.name, mode(run))
    return compare("tight", run(within(smallest_budgets(run, mode.fraction, look=compare))))


def same_as_eager(program: Callable[..., Any] | None = None, *, mode: Mode = EACH) -> Any:
    """Make a test of a program that takes `transform`: in each mode it gives what eager gives.

    What else the program takes, the test takes.
    """
    if program is None:
        return functools.partial(same_as_eager, mode=mode)

    @functools.wraps(program)
    def test(**arguments: Any) -> None:
        assert_same_as_eager(lambda transform: program(transform=transform, **arguments), mode)

    signature = inspect.signature(program)
    others = [p for name, p in signature.parameters.items() if name != "transform"]
    test.__signature__ = signature.replace(parameters=others)  # type: ignore[attr-defined]
    return test


def same_as_untransformed(program: Callable[..., Any]) -> Callable[..., None]:
    """Make a test of a program that takes `transform`: under that of the test it gives the same."""

    @functools.wraps(program)
    def test(transform: Transform, **arguments: Any) -> None:
        actual = program(transform=transform, **arguments)
        rematfn.testing.check()
        assert_nothing_keyed(actual)
        assert_bitwise_equal(actual, program(transform=untransformed, **arguments))

    return test


def world(program: Program, transform: Transform, calls: int = 1) -> dict[str, Any]:
    """Call the program and return all that can be seen of it afterwards."""
    case = program.make()
    g = transform(case.f)
    torch.manual_seed(7)
    outputs = [g(*case.args) for _ in range(calls)]
    return {
        "outputs": outputs,
        "arguments": case.args,  # mutated alike
        "held": case.held,  # a BatchNorm's buffers: written once a call
        "grads": [t.grad for t in case.held if t.is_leaf],
        "next draw": torch.rand(3),  # the stream of random numbers goes on where eager's does
        "stream": torch.get_rng_state(),
        "generators": [g.get_state() for g in case.generators],
    }


# --- gradients ------------------------------------------------------------------------------------


def weights_like(t: Tensor) -> Tensor:
    """Return numbers of which no two are alike, in the shape of `t`."""
    return torch.linspace(0.5, 1.5, t.numel(), dtype=t.dtype).view(t.shape)


def weighted(t: Tensor) -> Tensor:
    """Reduce a tensor to one number whose gradient tells every element from every other."""
    return (t * weights_like(t)).sum()


def scalar(outputs: Any) -> Tensor:
    """Reduce outputs to one number whose gradient tells every element from every other."""
    total = torch.zeros(())
    for leaf in optree.tree_leaves(outputs):
        if isinstance(leaf, Tensor) and leaf.requires_grad:
            leaf = leaf if leaf.layout == torch.strided else leaf.to_dense()
            real = torch.view_as_real(leaf.resolve_conj()) if leaf.is_complex() else leaf
            total = total + weighted(real).float()
    return total


def loss_of(case: Case, transform: Transform) -> Tensor:
    """Call the case's function under `transform`, seeded, and reduce what it returns."""
    g = transform(case.f)
    torch.manual_seed(7)
    return scalar(g(*case.args))


def stepped(program: Program, transform: Transform) -> Any:
    """Call the program, and its backward if it has one; return what can be seen afterwards."""
    if not program.differentiable:
        return world(program, transform, calls=2)
    case = program.make()
    loss = loss_of(case, transform)
    loss.backward()
    return loss, case.args, case.held, [t.grad for t in case.leaves()], torch.rand(2)


# --- a network of three blocks --------------------------------------------------------------------


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 4)
        self.dropout = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.second(self.dropout(torch.tanh(self.first(x))))
        return h.exp().cos() * x + h


def blocks() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(*(_Block() for _ in range(3)))


def rows() -> Tensor:
    """Return what they take."""
    return torch.linspace(-1, 1, 12).view(3, 4).requires_grad_()


def trained(f: Callable[[Tensor], Tensor], net: nn.Module) -> Any:
    """Call `f`, which is made of `net`, and return what that and its backward give."""
    x = rows()
    torch.manual_seed(5)
    out = f(x)
    out.square().sum().backward()
    return out, x.grad, [p.grad for p in net.parameters()], torch.rand(2)


# --- a chain whose values are of one size ---------------------------------------------------------

UNIT = 4096  # bytes of each


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Set torch's default dtype for the while."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def leaf() -> Tensor:
    return torch.linspace(-1, 1, UNIT // 4).requires_grad_()


def inner(x: Tensor) -> Tensor:
    for _ in range(4):
        x = (x.sin() * x).exp()
    return x


@contextmanager
def no_shape_function_in_python() -> Iterator[None]:
    """Fail if torch asks Python for the shape of a result.

    See Note [Shapes are asked for where they decide].
    """
    asked: set[str] = set()
    parts = ("_decomp", "_refs", "_prims_common")

    def see(frame: FrameType, event: str, _: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and (path.name == "_meta_registrations.py" or path.parent.name in parts):
            asked.add(frame.f_code.co_name)

    sys.setprofile(see)
    try:
        yield
    finally:
        sys.setprofile(None)
    assert not asked, sorted(asked)
