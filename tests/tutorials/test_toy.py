# SPDX-License-Identifier: Apache-2.0
"""The notebooks' toy: a dispatcher, and vmap, grad and remat as levels of one stack."""

from __future__ import annotations

import ast
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

FOLDER = Path(__file__).parents[2] / "tutorials"
sys.path.insert(0, str(FOLDER))
try:
    import toy
    from toy import operators as ops
    from toy.dispatcher import (
        Key,
        KeySet,
        Operator,
        fallbacks,
        fallthrough,
        keys_changed,
        thread,
        unboxed,
    )
finally:
    sys.path.remove(str(FOLDER))

LINES = 400
AMPLE = 10**9  # bytes


@pytest.fixture(autouse=True)
def the_stack_is_empty_again() -> Iterator[None]:
    yield
    assert thread.stack == ()
    assert thread.included == KeySet()
    assert thread.in_charge is None


def numbers(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).uniform(-1, 1, shape)


def lines_of_code(path: Path) -> int:
    """Those that are neither blank, nor a comment, nor a docstring."""
    source = path.read_text(encoding="utf-8")
    documented: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(
            node
        ):
            documented.update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    return sum(
        bool(line.strip()) and not line.strip().startswith("#") and number not in documented
        for number, line in enumerate(source.splitlines(), 1)
    )


def test_it_is_short() -> None:
    counted = {path.name: lines_of_code(path) for path in (FOLDER / "toy").glob("*.py")}
    assert len(counted) == 7
    assert 0 < sum(counted.values()) < LINES, counted


def test_a_number_can_be_subtracted() -> None:
    x = numbers(3)
    result = toy.vmap(lambda row: row - 1.0)(toy.Array(x))
    np.testing.assert_array_equal(result.data, x - 1.0)


def test_it_stands_on_its_own() -> None:
    """It imports the standard library and NumPy."""
    for path in (FOLDER / "toy").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [str(node.module)]
            assert all(
                name.split(".")[0] in {*sys.stdlib_module_names, "numpy"} for name in names
            ), path


def test_the_program_in_the_readme() -> None:
    text = (FOLDER / "toy" / "README.md").read_text(encoding="utf-8")
    lines = text.split("```python\n")[1].split("```")[0].splitlines()
    names: dict[str, Any] = {}
    exec("\n".join(lines[:-1]), names)
    expected = np.cos(names["x"].data) + np.sin(names["x"].data)
    expected *= np.exp(names["x"].data)
    np.testing.assert_allclose(eval(lines[-1], names), expected)


class Tagged:
    def __init__(self, *keys: Key) -> None:
        self.keys = KeySet.of(*keys)


def test_the_most_urgent_key_wins_and_redispatch_goes_on() -> None:
    op, calls = Operator("op"), []

    def passes_on(op: Operator, keys: KeySet, args: tuple) -> Any:
        calls.append(list(keys))
        return op.redispatch(keys.below(Key.GRAD), args)

    op.kernels[Key.CPU] = unboxed(lambda x: "cpu")
    op.kernels[Key.GRAD] = passes_on
    op.kernels[Key.REMAT] = fallthrough
    assert op(Tagged(Key.CPU, Key.REMAT, Key.GRAD)) == "cpu"
    assert calls == [[Key.GRAD, Key.REMAT, Key.CPU]]
    assert op(Tagged(Key.CPU)) == "cpu"
    assert len(calls) == 1


def test_a_kernel_of_its_own_comes_before_the_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    op, other = Operator("op"), Operator("other")
    op.kernels[Key.GRAD] = unboxed(lambda x: "own")
    monkeypatch.setitem(fallbacks, Key.GRAD, lambda op, keys, args: f"fallback for {op.name}")
    assert op(Tagged(Key.GRAD)) == "own"
    assert other(Tagged(Key.GRAD)) == "fallback for other"


def test_a_thread_includes_and_excludes_keys() -> None:
    op = Operator("op")
    for key in (Key.CPU, Key.GRAD):
        op.kernels[key] = unboxed(lambda x, key=key: key)
    x = Tagged(Key.CPU)
    with keys_changed(include=KeySet.of(Key.GRAD)):
        assert op(x) is Key.GRAD
        with keys_changed(exclude=KeySet.of(Key.GRAD)):
            assert op(x) is Key.CPU
        assert op(x) is Key.GRAD
    assert op(x) is Key.CPU


def test_no_kernel() -> None:
    with pytest.raises(NotImplementedError, match="op has no kernel for CPU"):
        Operator("op")(Tagged(Key.CPU))
    with pytest.raises(NotImplementedError, match="no key of this call"):
        Operator("op")(1)


def program(m: Any, x: Any, w: Any) -> Any:
    """Two layers; m has the functions of the toy, or those of torch."""
    for _ in range(3):
        x = m.sin(x @ w) * m.exp(-x) + x
    return (x * x - 2.0 * m.cos(x)).sum()


def of_toy(x: Any, w: Any) -> Any:
    return program(ops, x, w)


def of_torch(x: Any, w: Any) -> Any:
    return program(torch, x, w)


def rows_of_toy(row: Any, w: Any) -> Any:
    """One row, as a matrix: matmul of the toy wants two dimensions."""
    return of_toy(ops.reshape(row, (1, *row.shape)), w)


def rows_of_torch(row: Any, w: Any) -> Any:
    return of_torch(row.reshape(1, -1), w)


def second(grad: Callable, f: Callable) -> Callable:
    """The gradient of a number that is made from the gradient."""
    return grad(lambda x, w: (grad(f)(x, w) * x).sum())


PROGRAMS: dict[str, Callable[[Any, Callable], Callable]] = {
    "f": lambda m, f: f,
    "grad": lambda m, f: m.grad(f),
    "grad of grad": lambda m, f: second(m.grad, f),
    "vmap": lambda m, f: m.vmap(f, in_dims=(0, None)),
    "vmap of grad": lambda m, f: m.vmap(m.grad(f), in_dims=(0, None)),
    "vmap of grad of grad": lambda m, f: m.vmap(second(m.grad, f), in_dims=(0, None)),
    "grad of vmap": lambda m, f: m.grad(lambda x, w: m.vmap(f, in_dims=(0, None))(x, w).sum()),
    "grad of vmap of grad": lambda m, f: m.grad(
        lambda x, w: (m.vmap(m.grad(f), in_dims=(0, None))(x, w) * x).sum()
    ),
    "vmap of vmap": lambda m, f: (
        lambda x, w: m.vmap(lambda row: m.vmap(lambda column: f(row * column, w))(x))(x)
    ),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_it_computes_what_torch_func_computes(name: str) -> None:
    x, w = numbers(4, 3), numbers(3, 3)
    mine = PROGRAMS[name](toy, rows_of_toy)
    theirs = PROGRAMS[name](torch.func, rows_of_torch)
    if not name.startswith(("vmap", "grad of vmap")):
        x = x[0]
    expected = theirs(torch.from_numpy(x), torch.from_numpy(w))
    np.testing.assert_allclose(
        mine(toy.Array(x), toy.Array(w)).data, expected.numpy(), rtol=1e-10, atol=1e-12
    )


@pytest.mark.parametrize("name", PROGRAMS)
def test_remat_around_or_inside_changes_no_bit(name: str) -> None:
    x, w = toy.Array(numbers(4, 3)), toy.Array(numbers(3, 3))
    if not name.startswith(("vmap", "grad of vmap")):
        x = toy.Array(numbers(4, 3)[0])
    expected = PROGRAMS[name](toy, rows_of_toy)(x, w)

    def check(f: Callable) -> None:
        result = f(x, w)
        assert result.data.tobytes() == expected.data.tobytes()
        assert result.keys == KeySet.of(Key.CPU)
        assert result.level is result.made_by is None

    ample = toy.remat(PROGRAMS[name](toy, rows_of_toy), AMPLE)
    check(ample)
    assert ample.level.evictions == 0
    budget = int(0.6 * ample.level.peak)
    tight = toy.remat(PROGRAMS[name](toy, rows_of_toy), budget)
    check(tight)
    assert tight.level.evictions > 0
    assert tight.level.peak <= budget
    check(PROGRAMS[name](toy, toy.remat(rows_of_toy, AMPLE)))
    check(PROGRAMS[name](toy, toy.remat(rows_of_toy, budget)))


def per_sample(order: tuple[str, ...], budget: int) -> Callable:
    """Gradients for each row: vmap of grad, with remat at any place."""
    f = rows_of_toy
    for name in order:
        if name == "remat":
            f = toy.remat(f, budget)
        elif name == "grad":
            f = toy.grad(lambda x, w, f=f: f(x, w).sum())
        else:
            f = toy.vmap(f, in_dims=(0, None))
    return f


@pytest.mark.parametrize("order", list(permutations(["grad", "vmap", "remat"])), ids="-".join)
def test_every_order(order: tuple[str, ...]) -> None:
    x, w = toy.Array(numbers(40, 3)), toy.Array(numbers(3, 3))
    plain = per_sample(tuple(name for name in order if name != "remat"), 0)(x, w)
    result = per_sample(order, 16_000)(x, w)
    assert result.data.tobytes() == plain.data.tobytes()
    again = per_sample(("vmap", "grad"), 0)(x, w)
    np.testing.assert_allclose(plain.data, again.data, rtol=1e-10)


def test_levels_of_remat_nest() -> None:
    x, w = toy.Array(numbers(20, 10)), toy.Array(numbers(10, 10))
    inner = toy.remat(of_toy, 15_000)
    outer = toy.remat(toy.grad(lambda x, w: of_toy(x, w) + inner(x, w)), 20_000)
    result = outer(x, w)
    plain = toy.grad(lambda x, w: of_toy(x, w) + of_toy(x, w))(x, w)
    assert result.data.tobytes() == plain.data.tobytes()
    assert outer.level.evictions > 0
    assert inner.level.replays > 0
    assert outer.level.peak <= 20_000
    assert inner.level.peak <= 15_000


def measured_peak(f: Callable, *args: Any) -> int:
    """What NumPy itself asked for, as tracemalloc saw it."""
    tracemalloc.start()
    try:
        f(*args)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("order", ["grad of remat", "remat of grad"])
def test_the_budget_holds(order: str) -> None:
    x, w = toy.Array(numbers(256, 256)), toy.Array(numbers(256, 256))
    one = x.nbytes
    budget, objects = 9 * one, one // 2  # what Python's own objects may take

    def with_budget(budget: int) -> tuple[Callable, Callable]:
        if order == "grad of remat":
            f = toy.remat(of_toy, budget)
            return f, toy.grad(f)
        f = toy.remat(toy.grad(of_toy), budget)
        return f, f

    _, ample = with_budget(AMPLE)
    assert measured_peak(ample, x, w) > 2 * budget
    f, tight = with_budget(budget)
    assert measured_peak(tight, x, w) <= budget + objects
    assert budget - one < f.level.peak <= budget
    assert f.level.evictions > 0
    assert f.level.replays > 0


def test_the_budget_that_is_too_small_for_one_operator() -> None:
    x = toy.Array(numbers(10, 10))
    with pytest.raises(MemoryError, match="needs 1600 bytes, and the budget is 1000"):
        toy.remat(lambda x: ops.sin(ops.sin(x)), 1000)(x)


def test_replays_end() -> None:
    x, w = toy.Array(numbers(10, 10)), toy.Array(numbers(10, 10))
    with pytest.raises(MemoryError):
        toy.remat(toy.grad(of_toy), 2400)(x, w)


@pytest.mark.parametrize("transform", [toy.vmap, toy.grad], ids=["vmap", "grad"])
def test_a_dead_wrapper(transform: Callable) -> None:
    kept = []

    def keeps(x: Any) -> Any:
        kept.append(ops.sin(x))
        return kept[-1].sum()

    transform(keeps)(toy.Array(numbers(3)))
    with pytest.raises(RuntimeError, match="cos: an argument is of a level that has ended"):
        ops.cos(kept[0])
    with pytest.raises(RuntimeError, match="of a level that has ended"):
        transform(lambda x: (x * kept[0]).sum())(toy.Array(numbers(3)))


def test_an_array_that_escapes_from_remat_is_sealed_when_it_is_used() -> None:
    kept = []

    def keeps(x: Any) -> Any:
        kept.append(ops.sin(x))
        y = ops.exp(kept[0])
        for _ in range(3):
            y = ops.cos(y)
        return y

    x = toy.Array(numbers(10, 10))
    f = toy.remat(keeps, 1600)
    f(x)
    assert kept[0].data is None
    assert Key.REMAT in kept[0].keys
    result = ops.cos(kept[0])
    assert kept[0].keys == result.keys == KeySet.of(Key.CPU)
    assert np.array_equal(result.data, np.cos(np.sin(x.data)))


def test_an_operator_without_a_batching_rule_runs_for_each_example() -> None:
    calls = []

    def sort(x: np.ndarray) -> np.ndarray:
        calls.append(x.shape)
        return np.sort(x)

    op = ops.define("sort", sort)
    x = numbers(4, 3)
    result = toy.vmap(lambda row: op(row) * 2.0)(toy.Array(x))
    assert np.array_equal(result.data, 2 * np.sort(x))
    assert calls == [(3,)] * 4


def test_vmap_over_another_dimension_and_what_is_not_batched() -> None:
    x, y = numbers(4, 3), numbers(4)
    f = toy.vmap(lambda a, b: (a * b, b), in_dims=(1, None))
    product, same = f(toy.Array(x), toy.Array(y))
    assert np.array_equal(product.data, x.T * y)
    assert np.array_equal(same.data, np.stack([y] * 3))


def test_what_no_example_goes_into_is_computed_once() -> None:
    shapes = []
    op = ops.define("square", lambda x: shapes.append(x.shape) or x * x)
    w = toy.Array(numbers(3))
    result = toy.vmap(lambda row: row + op(w))(toy.Array(numbers(4, 3)))
    assert np.array_equal(result.data, numbers(4, 3) + w.data * w.data)
    assert shapes == [(3,)]


def test_gradients_of_a_tuple_and_of_what_does_not_matter() -> None:
    x, y = toy.Array(numbers(3)), toy.Array(numbers(3))
    of_x, of_y = toy.grad(lambda xy: ops.sin(xy[0]).sum())((x, y))
    assert np.array_equal(of_x.data, np.cos(x.data))
    assert np.array_equal(of_y.data, np.zeros(3))
    with pytest.raises(ValueError, match="one number"):
        toy.grad(ops.sin)(x)


def test_each_level_has_its_own_derivative() -> None:
    """x times the derivative of x * y by y, which is x: derived by x that is 2 x."""
    f = toy.grad(lambda x: x * toy.grad(lambda y: x * y)(toy.Array(5.0)))
    assert f(toy.Array(3.0)).data == 6.0


@pytest.mark.parametrize("name", ["stack", "select", "embed", "permute", "expand"])
def test_gradients_of_the_operators_that_move_numbers(name: str) -> None:
    f = {
        "stack": lambda x: ops.stack(1, x, ops.sin(x), x * x),
        "select": lambda x: ops.select(x, 1, 2),
        "embed": lambda x: ops.embed(x, 1, 2, 4),
        "permute": lambda x: ops.permute(ops.reshape(x, (2, 2, 3)), (2, 0, 1)),
        "expand": lambda x: ops.expand(ops.reshape(x, (4, 1, 3)), (5, 4, 2, 3)),
    }[name]
    x, direction = numbers(4, 3), np.random.default_rng(1).uniform(-1, 1, (4, 3))
    weights = toy.Array(numbers(*f(toy.Array(x)).shape))

    def loss(x: Any) -> Any:
        return (weights * f(x)).sum()

    step = 1e-6
    ahead, behind = (loss(toy.Array(x + s * direction)).data for s in (step, -step))
    slope = (toy.grad(loss)(toy.Array(x)).data * direction).sum()
    np.testing.assert_allclose(slope, (ahead - behind) / (2 * step), rtol=1e-6)
    batched = toy.vmap(toy.grad(loss))(toy.Array(np.stack([x, direction])))
    assert np.array_equal(batched.data[0], toy.grad(loss)(toy.Array(x)).data)
