# SPDX-License-Identifier: Apache-2.0
"""Tensors as users treat them: printed, converted, copied, saved, compared, handed on.

A level tensor that has been evicted becomes resident by itself, or the error says what to call.
"""

import copy
import ctypes
import functools
import io
import pickle
import time
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import pytest
import torch
from helpers import (
    EVERYTHING,
    Transform,
    assert_bitwise_equal,
    assert_same_as_eager,
    same_as_eager,
)
from torch import Tensor, nn

import rematfn
from rematfn.testing import EvictEverything

Access = Callable[[Tensor], Any]


def saved(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def loaded(data: bytes) -> Any:
    return torch.load(io.BytesIO(data))


def plain(array: Any) -> tuple[str, tuple[int, ...], bytes]:
    """Return a NumPy array as a value that compares bit for bit."""
    return array.dtype.str, array.shape, array.tobytes()


WORKS: dict[str, Access] = {
    "repr": repr,
    "format": lambda x: f"{x} {x[0, 0]:.3f}",
    "numpy": lambda x: plain(x.numpy()),
    "numpy(force=True)": lambda x: plain(x.numpy(force=True)),
    "np.asarray": lambda x: plain(np.asarray(x)),
    "tolist": lambda x: x.tolist(),
    "tolist of a view": lambda x: x.t()[1:].tolist(),
    "item": lambda x: x[1, 2].item(),
    "bool": lambda x: bool(x[0, 0]),
    "float": lambda x: float(x[0, 1]),
    "index": lambda x: ["a", "b"][(x[0, 0] * 0 + 1).long()],
    "iteration": lambda x: [[float(v) for v in row] for row in x],
    "in": lambda x: 2.0 in x,
    "hash": lambda x: hash(x) == hash(x) and {x: 1}[x],
    "dlpack": lambda x: torch.from_dlpack(x).clone(),
    "new_ones, new_full, new_empty": lambda x: x.new_ones(2) + x.new_full((2,), 3.0),
    "new_tensor": lambda x: x.new_tensor([1.0, 2.0]),
    "new": lambda x: x.new(2, 3).fill_(2.0),
    "new of a list": lambda x: x.new([1.0, 2.0]),
    "new of a tensor": lambda x: x.new(x * 2),
    "new of a subclass": lambda x: x.as_subclass(nn.Parameter).new(2).zero_() + x[0, 0],
    "new within vmap": lambda x: torch.func.vmap(lambda r: r + r.new(r.shape).fill_(2.0))(x),
    "a sample": lambda x: (torch.manual_seed(3), torch.distributions.Laplace(x, 2.0).sample())[1],
    "torch.tensor of elements": lambda x: torch.tensor([x[0, 0], x[1, 1]]),
    "torch.as_tensor": lambda x: torch.as_tensor(x).clone(),
    "torch.as_tensor converts": lambda x: torch.as_tensor(x, dtype=torch.float64),
    "torch.asarray": lambda x: torch.asarray(x).clone(),
    "torch.Tensor": lambda x: torch.Tensor(x).clone(),
    "type(dtype)": lambda x: x.type(torch.float64),
    "type(str)": lambda x: x.type("torch.DoubleTensor"),
    "to": lambda x: x.to("cpu", torch.float64),
    "cpu": lambda x: x.cpu().clone(),
    "shape and layout": lambda x: (x.shape, x.stride(), x.storage_offset(), x.nbytes, x.layout),
    "untyped_storage().nbytes()": lambda x: x.untyped_storage().nbytes(),
    "set_(tensor)": lambda x: torch.empty(0).set_(x).clone(),
    "nn.Parameter": lambda x: nn.Parameter(x).detach().clone(),
    "as_subclass": lambda x: x.as_subclass(Tensor).clone(),
    "view(dtype)": lambda x: x.view(torch.int32).clone(),
    "torch.equal": lambda x: torch.equal(x, x.clone()),
    "sparse_coo_tensor without a size": lambda x: torch.sparse_coo_tensor(
        (x[:2, :3] * 10).long(), x[2, :3], check_invariants=False
    ).to_dense(),
    "indexed by an array": lambda x: x[np.array([0, 1])],
    "times a NumPy number": lambda x: x * np.float32(2),
    "given a NumPy array": lambda x: torch.from_numpy(np.ones(4, dtype=np.float32)) + x,
    "is_pinned": lambda x: x.is_pinned(),
    "data_ptr": lambda x: x.data_ptr() != 0,  # See Note [An address that was asked for stays good]
    # These take the storage: see Note [A storage that is read comes back].
    "deepcopy": copy.deepcopy,
    "deepcopy of two on one storage": lambda x: copy.deepcopy([x, x[1:]]),
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
    "torch.save": lambda x: loaded(saved({"x": x, "tail": x[1:]})),
    "is_shared": lambda x: x.is_shared(),
    "share_memory_": lambda x: x.share_memory_().clone(),
    "multiprocessing": lambda x: pickle.loads(bytes(ForkingPickler.dumps(x))).clone(),
    "untyped_storage().data_ptr()": lambda x: x.untyped_storage().data_ptr() != 0,
    "untyped_storage().clone()": lambda x: x.untyped_storage().clone().tolist(),
    "parameters_to_vector": lambda x: nn.utils.parameters_to_vector([x]),
    # These make a tensor over the storage, too. Only an active level sees that.
    "copy.copy": lambda x: copy.copy(x).clone(),
    "untyped_storage()[0]": lambda x: x.untyped_storage()[0],
    "untyped_storage().tolist()": lambda x: x.untyped_storage().tolist(),
    "set_(storage)": lambda x: torch.empty(0).set_(x.untyped_storage(), 0, x.shape).clone(),
}

# They ask for the address of the bytes, and nobody hears of it.
NEEDS_MATERIALIZE: dict[str, Access] = {
    "C++": lambda x: torch._C.TensorBase.data_ptr(x) != 0,
    "np.from_dlpack": lambda x: plain(np.from_dlpack(x)),
    "to_dlpack": lambda x: torch.from_dlpack(torch.utils.dlpack.to_dlpack(x)).clone(),
}

EVICTED = "its bytes were asked for outside of the dispatcher. Call rematfn.materialize\\(x\\)"


def start() -> Tensor:
    return torch.linspace(0.1, 1.0, 192).view(48, 4).clone()


def inside(access: Access, transform: Transform) -> Any:
    """Access an intermediate, after another operator has run."""

    def f(x: Tensor) -> Any:
        y = x.sin()
        z = y.cos()
        return access(y), y * z

    return transform(f)(start())


def after(access: Access, transform: Transform, requires_grad: bool = False) -> Any:
    """Access what has left through a side effect, when the level is gone."""
    kept: list[Tensor] = []

    def f(x: Tensor) -> Tensor:
        kept.append(x.sin().detach())
        return x.cos()

    out = transform(f)(start().requires_grad_(requires_grad))
    return access(kept[0]), out


def between(access: Access, transform: Transform) -> Any:
    """The same before the backward, which may still want what is evicted."""
    return after(access, transform, requires_grad=True)


Place = Callable[[Access, Transform], Any]
PLACES: list[Place] = [inside, after, between]


# torch 2.12 warns of what it does not check, whatever it is told of that.
@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled:UserWarning")
@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.__name__)
@pytest.mark.parametrize("access", WORKS.values(), ids=WORKS.keys())
def test_an_access_works_whether_or_not_the_tensor_was_evicted(
    access: Access, place: Place
) -> None:
    assert_same_as_eager(lambda transform: place(access, transform))


@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.__name__)
@pytest.mark.parametrize("access", NEEDS_MATERIALIZE.values(), ids=NEEDS_MATERIALIZE.keys())
def test_an_access_behind_the_dispatcher_works_on_a_resident_tensor(
    access: Access, place: Place
) -> None:
    def resident(x: Tensor) -> Any:
        return access(rematfn.materialize(x))

    assert_same_as_eager(lambda transform: place(resident, transform))


@pytest.mark.parametrize("access", NEEDS_MATERIALIZE.values(), ids=NEEDS_MATERIALIZE.keys())
def test_it_just_works_on_what_was_stored_away_by_a_function_without_a_graph(
    access: Access,
) -> None:
    assert_same_as_eager(lambda transform: after(access, transform))


@pytest.mark.parametrize("place", [inside, between], ids=lambda place: place.__name__)
@pytest.mark.parametrize("access", NEEDS_MATERIALIZE.values(), ids=NEEDS_MATERIALIZE.keys())
def test_the_same_access_on_an_evicted_tensor_says_what_to_call(
    access: Access, place: Place
) -> None:
    with pytest.raises(RuntimeError, match=EVICTED):
        place(access, EVERYTHING)


@pytest.mark.parametrize(
    ("transform", "what"),
    [
        (rematfn.remat, "was evicted by rematfn and"),
        (rematfn.offload, r"was moved away by rematfn \(offload\) and"),
    ],
)
def test_the_error_says_what_has_become_of_the_bytes(transform: Any, what: str) -> None:
    def f(x: Tensor) -> None:
        y = x.sin()
        for _ in range(500):  # what moves is there until it has been written
            x.cos()
            NEEDS_MATERIALIZE["C++"](y)
            time.sleep(0.01)

    with pytest.raises(RuntimeError, match=what):
        transform(f, policy=EvictEverything())(start())


GUARDS: dict[str, Callable[[], Any]] = {
    "of the excluded keys": torch._C._DisableFuncTorch,  # as in repr
    "of all keys": lambda: torch._C._ForceDispatchKeyGuard(
        torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    ),
}


@pytest.mark.parametrize("make_guard", GUARDS.values(), ids=GUARDS.keys())
def test_a_guard_that_an_exception_keeps_alive_does_not_bring_the_level_back(
    make_guard: Callable[[], Any],
) -> None:
    """It restores the thread's keys, long after the level, as they were inside."""

    def f(x: Tensor) -> Tensor:
        guard = make_guard()
        raise ValueError("a guard is held", guard)

    expected = torch.ones(3) + torch.arange(3)
    for _ in range(2):
        try:
            EVERYTHING(f)(start())
        except ValueError as error:
            held = error
        del held
        assert_bitwise_equal(torch.ones(3) + torch.arange(3), expected)
        assert "CustomRNGKeyId" not in str(torch._C._dispatch_tls_local_include_set())
        assert "BackendSelect" not in str(torch._C._dispatch_tls_local_exclude_set())


@pytest.mark.parametrize("around", [False, True], ids=["inside", "around"])
@same_as_eager
def test_mutation_on_saved_tensors(transform: Transform, around: bool) -> Any:
    """Torch looks for what a write changes by its address."""

    def step(x: Tensor) -> Any:
        saved = x.sin()
        out = saved.square() + x.exp()
        for _ in range(3):
            out = out * x.cos()  # where there is a budget, `saved` goes meanwhile
        out = out * saved  # and comes back
        saved.mul_(2)
        return (out * saved).sum()

    def f(x: Tensor) -> Any:
        with torch.autograd.graph.allow_mutation_on_saved_tensors():
            return torch.autograd.grad(step(x), x)

    x = start().requires_grad_()
    if not around:
        return transform(f)(x)
    with torch.autograd.graph.allow_mutation_on_saved_tensors():
        y = x * 2
        loss = transform(step)(y)
        y.mul_(3)
        loss.backward()
    return loss, x.grad


def as_another_process(y: Tensor) -> Tensor:
    """Return the tensor that a process has which was sent ``y``."""
    shared = torch.UntypedStorage._new_shared_fd_cpu(*y.untyped_storage()._share_fd_cpu_())
    return torch.empty(0).set_(shared)


ADDRESSES: dict[str, Callable[[Tensor], Callable[[], object]]] = {
    "data_ptr": lambda y: functools.partial(ctypes.memset, y.data_ptr(), 0, y.nbytes),
    "numpy": lambda y: functools.partial(y.numpy().fill, 0),
    "dlpack": lambda y: torch.from_dlpack(y).zero_,
    "shared memory": lambda y: as_another_process(y).zero_,
}


@pytest.mark.parametrize("asked", ["before", "after"])
@pytest.mark.parametrize("way", ADDRESSES)
def test_what_was_read_before_a_write_by_address_is_not_replayed_from_it(
    way: str, asked: str
) -> None:
    """That is an error, and nothing else is: what reads afterwards has read what is there."""

    def f(x: Tensor, needed: bool) -> Tensor:
        y = x.sin()
        if asked == "before":
            write = ADDRESSES[way](y)
        z = y.exp()
        if asked == "after":
            write = ADDRESSES[way](y)
        write()
        w = (y + 1).cos()
        if not needed:
            del z
        return w.sin() * (z if needed else 1)

    x = start()
    for needed in (False, True):
        assert_bitwise_equal(rematfn.remat(f)(x, needed), f(x, needed))
    assert_bitwise_equal(EVERYTHING(f)(x, False), f(x, False))
    with pytest.raises(rematfn.ReplayError, match="exp` was written by its address"):
        EVERYTHING(f)(x, True)


@same_as_eager
def test_what_an_array_writes_stays(transform: Transform) -> Any:
    """One element that no sample holds; before an operator reads, or another array is made."""

    def f(x: Tensor) -> Tensor:
        y, z = x.sin(), x + 1
        array = y.detach().numpy()
        array.reshape(-1)[5] = 7
        y.mul_(2)
        array.reshape(-1)[7] = 8
        w = y.cos()
        z.detach().numpy().reshape(-1)[5] = 8
        z.detach().numpy().reshape(-1)[6] = 9
        del array, y
        return (w.sin() * z.mul_(2)).exp().sum()

    x = torch.linspace(0, 1, 1000).requires_grad_()
    loss = transform(f)(x)
    (gradient,) = torch.autograd.grad(loss, x)
    return loss, gradient


def test_an_array_that_is_looked_at_costs_nothing() -> None:
    """As in a program that logs: what it shows may be dropped, and replayed."""

    def f(x: Tensor, look: Callable[[Tensor], object]) -> Tensor:
        for _ in range(16):
            h = x.sin()
            look(h)
            x = h.exp().tanh()  # which save their results, and not h
            del h
        return x.sum()

    def run(look: Callable[[Tensor], object]) -> Tensor | None:
        x = torch.linspace(0, 1, 10_000).requires_grad_()
        with rematfn.testing.MemoryTimeline() as timeline:
            rematfn.remat(f, 5 * x.nbytes)(x, look).backward()
        loss = 4  # bytes, and as many of its gradient: the caller's
        assert timeline.peak_excluding_survivors <= 5 * x.nbytes + 2 * loss
        return x.grad

    assert_bitwise_equal(run(lambda h: h.detach().numpy().mean()), run(lambda h: None))


def test_an_address_stays_good_when_a_collective_has_been_waited_for() -> None:
    """What it is given may be moved from then on, unless somebody else has the address as well."""

    def f(x: Tensor) -> Tensor:
        y = x.sin()
        address = y.data_ptr()
        torch.ops._c10d_functional.wait_tensor(y)
        z = x
        for _ in range(6):
            z = z.cos()
        ctypes.memset(address, 0, y.nbytes)
        return y + z

    x = torch.linspace(0, 1, 1 << 16)
    assert_same_as_eager(lambda transform: transform(f)(x))
    for g in (rematfn.offload(f), rematfn.remat(f, 4 * x.nbytes, offload=True)):
        for _ in range(3):
            assert_bitwise_equal(g(x), f(x))
