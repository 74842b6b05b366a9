# SPDX-License-Identifier: Apache-2.0
"""Whatever moves comes back as it was; what somebody may read or fill by address does not move."""

import ctypes
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from helpers import (
    Transform,
    address_of,
    assert_bitwise_equal,
    assert_nothing_keyed,
    untransformed,
)
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import rematfn

DISK = rematfn.Disk(verify=True)
PACKED = rematfn.Packed(verify=True)
EVICTING = rematfn.testing.EvictEverything()
ALL = functools.partial(rematfn.offload, to=DISK, policy=EVICTING)
PACK = functools.partial(rematfn.offload, to=PACKED, policy=EVICTING)
HOW: dict[str, Transform] = {
    "what is not in use": functools.partial(rematfn.offload, to=DISK),
    "everything": ALL,
    "move or drop": functools.partial(rematfn.remat, offload=DISK, policy=EVICTING),
    "what is not in use, packed": functools.partial(rematfn.offload, to=PACKED),
    "packed": PACK,
    "pack or drop": functools.partial(rematfn.remat, offload=PACKED, policy=EVICTING),
    "pack or move": functools.partial(rematfn.offload, to=[PACKED, DISK], policy=EVICTING),
    "packed in a level that drops": lambda f: rematfn.remat(
        lambda *xs: PACK(f)(*xs), policy=EVICTING
    ),
    "in a level that drops": lambda f: rematfn.remat(lambda *xs: ALL(f)(*xs), policy=EVICTING),
}


@pytest.fixture(params=HOW)
def how(request: pytest.FixtureRequest, costs_at_random: None) -> Iterator[Transform]:
    yield HOW[request.param]
    assert DISK.held_bytes == PACKED.held_bytes == 0


def moved_and_back(t: Tensor) -> Tensor:
    """Let other operators run, so that the tensor leaves; then hand it on."""
    other = torch.ones(7)
    for _ in range(4):
        other = other.sin()
    return t


# --- values ---------------------------------------------------------------------------------------

DTYPES = [
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2),
]
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda t: t,
    "transposed": lambda t: t.mT,
    "strided": lambda t: t[..., ::2],
    "offset": lambda t: t[1:],
    "expanded": lambda t: t[:1].expand(4, *t.shape[1:]),
    "channels last": lambda t: t.contiguous(memory_format=torch.channels_last),
    "zero-size": lambda t: t[:0],
    "scalar": lambda t: t[0, 0, 0, 0],
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_and_layout_comes_back(dtype: torch.dtype, how: Transform) -> None:
    bits = torch.arange(2 * 3 * 4 * 6 * dtype.itemsize).mul(37).to(torch.uint8)
    if dtype == torch.bool:
        bits = bits % 2

    def f(given: Tensor) -> list[tuple[Tensor, ...]]:
        found = []
        for layout in LAYOUTS.values():
            made = given.clone().view(dtype) if dtype != torch.bool else given == 1
            seen = layout(made.view(2, 3, 4, 6))
            copied = seen.clone()
            alone = torch.empty_like(seen).copy_(seen)
            moved_and_back(made)
            found.append((seen, copied, alone, made))
        return found

    found = how(f)(bits)
    assert_nothing_keyed(found)
    assert_bitwise_equal(found, f(bits))


# --- gradients ------------------------------------------------------------------------------------


def checkpointed(t: Transform, x: Tensor) -> Any:
    def f(x: Tensor) -> Tensor:
        y = checkpoint(torch.sin, x, use_reentrant=False)
        return checkpoint(lambda y: (y * 1.5).sin() * y.cos(), y, use_reentrant=False)

    checkpoint(t(f), x * 1, use_reentrant=False).square().sum().backward()


def hooked(t: Transform, x: Tensor) -> Any:
    kept: list[Tensor] = []

    def f(x: Tensor) -> Tensor:
        y = x.sin()
        y.register_hook(lambda grad: kept.append(grad))
        y.register_hook(lambda grad: grad * 2)
        kept.append(y.detach())
        return (y * 1.5).sin() * y.cos()

    t(f)(x).square().sum().backward()
    return [k * 1 for k in kept]


@pytest.mark.parametrize("case", [checkpointed, hooked])
def test_as_in_eager(case: Callable[[Transform, Tensor], Any], how: Transform) -> None:
    leaves = [torch.linspace(-1, 1, 600).view(20, 30).requires_grad_() for _ in range(2)]
    found, expected = [case(t, x) for t, x in zip((how, untransformed), leaves, strict=True)]
    assert_nothing_keyed((found, leaves[0].grad))
    assert_bitwise_equal((found, leaves[0].grad), (expected, leaves[1].grad))


# --- what stays -----------------------------------------------------------------------------------

SIZE = 1 << 12
# A write that no operator makes is lost to a replay: docs/limitations.md.
moving = pytest.mark.parametrize("way", ["what is not in use", "everything"])


@moving
def test_what_was_never_filled_stays(way: str) -> None:
    """Somebody may be about to fill it by its address."""

    def f(x: Tensor) -> Tensor:
        buffer = torch.empty(SIZE)
        address = address_of(buffer)
        moved_and_back(buffer)
        assert address_of(buffer) == address
        ctypes.memset(address, 0, buffer.nbytes)
        moved_and_back(buffer)
        return buffer + x

    x = torch.ones(SIZE)
    assert_bitwise_equal(HOW[way](f)(x), x)


@moving
def test_an_address_that_was_given_out_is_good(way: str) -> None:
    """Until the level's next operator; what is written there since is not lost either."""

    def f(x: Tensor) -> Tensor:
        y = x * 2
        address = address_of(y)
        ctypes.memset(address, 0, y.nbytes)
        return y + 1

    x = torch.ones(SIZE)
    assert_bitwise_equal(HOW[way](f)(x), x)


# --- what is taken or dropped while it leaves -----------------------------------------------------


@moving
def test_a_storage_that_is_taken_while_it_leaves_stays(way: str) -> None:
    def f(x: Tensor) -> Tensor:
        y = x * 2
        some = []
        if way == "what is not in use":  # two operators have to pass
            some = [torch.ones(7).sin(), torch.ones(7).cos()]
        storage = y.untyped_storage()
        address = storage.data_ptr()
        time.sleep(0.02)  # the copy is made
        moved_and_back(y)
        assert address_of(y) == address  # an error if it has gone
        return y + storage.nbytes() + len(some)

    x = torch.ones(SIZE)
    assert_bitwise_equal(HOW[way](f)(x), f(x))


GRADIENTS: dict[str, Callable[[Transform, Any, Tensor], Tensor]] = {
    "backward": lambda how, f, x: torch.autograd.grad(how(f)(x), x)[0],
    "grad around": lambda how, f, x: torch.func.grad(how(f))(x),
    "grad inside": lambda how, f, x: how(torch.func.grad(f))(x),
    "vmap around": lambda how, f, x: torch.func.vmap(torch.func.grad(how(f)))(x.expand(2, 8, 1)),
    "vmap inside": lambda how, f, x: how(torch.func.vmap(torch.func.grad(f)))(x.expand(2, 8, 1)),
}


@pytest.mark.parametrize("nesting", GRADIENTS)
def test_gradients_meet_as_in_eager_while_one_leaves(nesting: str) -> None:
    """In place, that is, in a backward: out of place the sum of one column has another stride."""
    triangle = torch.eye(8) + torch.ones(8, 8).triu(1) / 8

    def f(x: Tensor) -> Tensor:
        solved = [torch.linalg.solve_triangular(triangle, t, upper=True) for t in (x, x * 1)]
        return (solved[0] * solved[1]).sum()

    slow = rematfn.Disk(bandwidth=3e6)  # a value, whose place is a page, takes a millisecond
    found = []
    for how in untransformed, functools.partial(rematfn.offload, to=slow, policy=EVICTING):
        x = torch.linspace(1, 2, 8).view(8, 1).requires_grad_()
        found.append(GRADIENTS[nesting](how, f, x))
    assert_bitwise_equal(found[1], found[0])
    if nesting == "backward":
        assert found[0].stride() == (1, 8)


# Under `grad` a constant has no address in eager either.
NESTED: dict[str, Callable[[Transform, Any], Any]] = {
    "plain": lambda how, f: how(f),
    "in vmap": lambda how, f: torch.func.vmap(how(f)),
    "around vmap": lambda how, f: how(torch.func.vmap(f)),
}
nested = pytest.mark.parametrize("nesting", NESTED)


def value_and_gradient(f: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    x = torch.linspace(1, 2, 2 * SIZE).view(2, SIZE).requires_grad_()
    y = f(x)
    return y.detach(), torch.autograd.grad(y.sin().sum(), x)[0]


@moving
@nested
def test_what_is_written_where_an_address_is_kept_stays(nesting: str, way: str) -> None:
    def f(x: Tensor) -> Tensor:
        constant = torch.tensor([1.5] * SIZE)
        kept = torch.from_dlpack(constant)
        constant.add_(1)
        moved_and_back(constant)
        time.sleep(0.02)  # a copy would be made
        moved_and_back(constant)
        assert address_of(constant) == address_of(kept)
        return x * constant * kept

    found = value_and_gradient(NESTED[nesting](HOW[way], f))
    assert_bitwise_equal(found, value_and_gradient(f))


@pytest.mark.parametrize("to_move", [rematfn.offload, rematfn.remat])
def test_in_a_shared_budget_what_is_on_its_way_out_is_waited_for(to_move: Any) -> None:
    def f(x: Tensor) -> Tensor:
        made = [x.sin()]
        for _ in range(6):
            made.append(made[-1].cos())
        return torch.stack([y.sum() for y in made])

    budget = rematfn.Budget(3 * 4 * SIZE + 4096)
    disk = rematfn.Disk(bandwidth=3e6)
    x = torch.linspace(0, 1, SIZE)
    if to_move is rematfn.offload:
        g = rematfn.offload(f, budget, to=disk, policy=EVICTING)
    else:
        inner = rematfn.offload(f, to=disk)
        g = rematfn.remat(lambda x: inner(x), budget)
    assert_bitwise_equal(g(x), f(x))
    assert budget.peak_bytes <= 3 * 4 * SIZE + 4096
