# SPDX-License-Identifier: Apache-2.0
"""The notebooks' toy: a dispatcher, and vmap, grad and remat as levels of one stack."""

import sys
from collections.abc import Callable, Iterator
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
        thread,
    )
finally:
    sys.path.remove(str(FOLDER))
AMPLE = 10**9  # bytes


@pytest.fixture(autouse=True)
def the_stack_is_empty_again() -> Iterator[None]:
    yield
    assert thread.stack == ()
    assert thread.included == KeySet()
    assert thread.in_charge is None


def numbers(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).uniform(-1, 1, shape)


def test_the_program_in_the_readme() -> None:
    text = (FOLDER / "toy" / "README.md").read_text(encoding="utf-8")
    lines = text.split("```python\n")[1].split("```")[0].splitlines()
    names: dict[str, Any] = {}
    exec("\n".join(lines[:-1]), names)
    expected = np.cos(names["x"].data) + np.sin(names["x"].data)
    expected *= np.exp(names["x"].data)
    np.testing.assert_allclose(eval(lines[-1], names), expected)


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
        assert result.storage.version is None

    ample = toy.remat(PROGRAMS[name](toy, rows_of_toy), AMPLE)
    check(ample)
    assert ample.level.evictions == 0
    # A forward alone holds five arrays, and one operator needs three of them.
    budget = int((0.6 if "grad" in name else 0.8) * ample.level.peak)
    tight = toy.remat(PROGRAMS[name](toy, rows_of_toy), budget)
    check(tight)
    assert tight.level.evictions > 0
    assert tight.level.peak <= budget
    check(PROGRAMS[name](toy, toy.remat(rows_of_toy, AMPLE)))
    check(PROGRAMS[name](toy, toy.remat(rows_of_toy, budget)))
