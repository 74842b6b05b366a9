# SPDX-License-Identifier: Apache-2.0
"""`Packed`: what is packed comes back bit for bit, and takes the bytes that it is said to."""

import copy
import ctypes
import functools
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import assert_bitwise_equal, bits
from processes import forking, in_a_child, in_a_process, together
from torch import Tensor, func, nn

import rematfn
from rematfn.testing import EvictEverything, MemoryTimeline

N = 1 << 18


def words(dtype: torch.dtype, n: int = N) -> Tensor:
    """Return every pattern of 16 bits, as the upper half of a float or as a half."""
    patterns = torch.arange(n, dtype=torch.int32) % (1 << 16)
    halves = (patterns - (1 << 15)).to(torch.int16).view(dtype)
    return halves.float()


def sparse(t: Tensor, share: float = 0.5) -> Tensor:
    return torch.where(torch.rand(t.shape) < share, torch.zeros((), dtype=t.dtype), t)


# What a value is, and the share of its bytes that it may take, packed.
CONTENTS: dict[str, tuple[Callable[[], Tensor], float]] = {
    "relu": (lambda: torch.randn(N).relu(), 0.54),
    "relu of doubles": (lambda: torch.randn(N, dtype=torch.float64).relu(), 0.53),
    "relu of bfloat16": (lambda: torch.randn(N).bfloat16().relu(), 0.58),
    "negative zeros": (lambda: torch.randn(N).relu().neg(), 1),
    "zeros of both signs": (lambda: sparse(torch.full((N,), -0.0)), 0.04),
    "noise of a dropout": (lambda: torch.empty(N).bernoulli_(0.9) / 0.9, 0.04),
    "truth values": (lambda: torch.rand(N) < 0.5, 0.13),
    "equal": (lambda: torch.full((N,), 3.0), 0.01),
    "from bfloat16": (lambda: torch.randn(N).bfloat16().float(), 0.51),
    "from half": (lambda: torch.rand(N).add(1).half().float(), 0.51),
    "relu from bfloat16": (lambda: torch.randn(N).bfloat16().float().relu(), 0.29),
    "every bfloat16": (lambda: words(torch.bfloat16), 0.51),
    "every half": (lambda: words(torch.float16), 1),
    "indices": (lambda: torch.randint(0, 50_000, (N,)), 0.51),
    "classes": (lambda: torch.randint(-100, 100, (N,)), 0.13),
    "ends of ranges": (lambda: torch.tensor([-128, 127, -129, 128, 0, -1]).repeat(N // 6), 0.26),
    "short classes": (lambda: torch.randint(-100, 100, (N,), dtype=torch.int16), 0.51),
    "int32 classes": (lambda: torch.randint(-100, 100, (N,), dtype=torch.int32), 0.26),
    "int32 positions": (lambda: torch.randint(-(2**15), 2**15, (N,), dtype=torch.int32), 0.51),
    "from float": (lambda: torch.randn(N).double(), 0.51),
    "every end of a float": (
        lambda: (
            torch.tensor([float("nan"), float("inf"), -0.0, 1e-45, 3.4028235e38])
            .repeat(N // 5)
            .double()
        ),
        0.51,
    ),
    "too large for a float": (
        lambda: sparse(torch.tensor([1e300, -1e-300, 1e39], dtype=torch.float64).repeat(N // 3)),
        0.53,
    ),
    "long ends": (lambda: torch.tensor([-(2**31), 2**31 - 1]).repeat(N), 0.51),
    "too long": (lambda: sparse(torch.tensor([2**31, -(2**31) - 1]).repeat(N), 0.6), 0.42),
    "nan and infinities": (
        lambda: sparse(torch.tensor([float("nan"), float("inf"), -float("inf")]).repeat(N // 3)),
        0.54,
    ),
    "odd in length": (lambda: torch.randn(N + 13).relu(), 0.54),
    "subnormal": (lambda: sparse(torch.randn(N) * 1e-41), 0.54),
    "a block that differs": (lambda: torch.cat([torch.zeros(N), torch.randn(5000)]), 0.05),
}


@pytest.mark.parametrize("name", CONTENTS)
def test_a_value_comes_back_in_its_own_bits_and_takes_no_more_than_its_contents(name: str) -> None:
    make, share = CONTENTS[name]
    torch.manual_seed(0)
    value = make()
    packed = rematfn.Packed(verify=True)

    def f(x: Tensor) -> Tensor:
        y = x.clone()
        torch.ones(7).sin()
        return y

    found = rematfn.offload(f, to=packed, policy=EvictEverything())(value)
    assert torch.equal(bits(found), bits(value))
    assert packed.held_bytes == 0
    if share < 1:
        assert 0 < packed.peak_bytes <= share * value.nbytes
        assert packed.bytes_out >= value.nbytes
        assert packed.bytes_out % value.nbytes == 0


def test_what_cannot_be_packed_stays() -> None:
    packed = rematfn.Packed()

    def f(x: Tensor) -> Tensor:
        y = x * 2
        return y.sin().cos().mul(y).sum()

    for make in (lambda: torch.randn(N), lambda: torch.ones(100)):
        rematfn.offload(f, to=packed, policy=EvictEverything())(make())
    assert packed.bytes_out == 0


def layers(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    blocks = [nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Dropout(0.5)) for _ in range(8)]
    return nn.Sequential(*blocks)


X = torch.randn(1024, 256)


def gradients(net: nn.Module, run: Callable[..., Tensor], x: Tensor = X) -> list[Tensor]:
    torch.manual_seed(1)
    run(x).sum().backward()
    found = [p.grad for p in net.parameters() if p.grad is not None]
    net.zero_grad()
    return found


@pytest.mark.parametrize("share", [0.55, 0.7])
def test_a_budget_holds_without_a_replay(share: float) -> None:
    net = layers()
    expected = gradients(net, net)
    trace = rematfn.record(lambda: net(X).sum().backward())
    net.zero_grad()
    budget = int(share * trace.peak_bytes)
    g = rematfn.offload(net, budget, to="packed")
    for _ in range(4):
        torch.manual_seed(1)
        with MemoryTimeline() as timeline:
            g(X).sum().backward()
            found = [p.grad for p in net.parameters()]
            net.zero_grad()
        assert_bitwise_equal(found, expected)
        del found
        stats = rematfn.stats(g)
        assert stats.moves > 0
        assert stats.replays == 0
        assert stats.peak_bytes <= budget
        assert timeline.peak_excluding_survivors <= budget
        rematfn.testing.check()


def test_beside_replays_there_are_fewer_of_them() -> None:
    net = layers()
    expected = gradients(net, net)

    def replayed(**options: Any) -> float:
        """Return the least of three calls: on a busy machine, what packing takes is any number."""
        g = rematfn.remat(net, "40%", **options)
        gradients(net, g)
        costs = []
        for _ in range(3):
            assert_bitwise_equal(gradients(net, g), expected)
            rematfn.testing.check()
            costs.append(rematfn.stats(g).replayed_cost)
        return min(costs)

    assert 0 < replayed(offload=rematfn.Packed()) < 0.5 * replayed()


def test_a_profile_knows_what_can_be_packed() -> None:
    net = layers()

    def predicted(**options: Any) -> float:
        net.zero_grad()
        step = functools.partial(gradients, net, net)
        found = rematfn.profile(step, budgets=["45%"], **options)
        return found.costs[0].time * found.seconds - found.seconds

    assert predicted(offload="packed") < 0.7 * predicted()


def test_a_copy_that_stands_in_the_way_is_dropped() -> None:
    """All that has been packed is replayed, for an operator that needs nearly all of the budget."""

    def f(x: Tensor) -> Tensor:
        values = [(x @ x * i).relu() for i in range(1, 13)]  # costly, so that they are packed
        large = torch.ones(12 * N)
        return sum(values[1:], values[0]) * large[0]

    x = torch.randn(512, 512)
    g = rematfn.remat(f, 17 * x.nbytes, offload="packed")
    torch.testing.assert_close(g(x), f(x), rtol=0, atol=0)
    stats = rematfn.stats(g)
    assert stats.moves > 0
    assert stats.replays > 0
    rematfn.testing.check()


@pytest.mark.parametrize("order", [1, -1])
def test_what_is_packed_moves_on_to_a_disk(order: int) -> None:
    """A budget that is too small for what is packed, and large enough for a disk alone."""
    net = layers()
    expected = gradients(net, net)
    trace = rematfn.record(lambda: net(X).sum().backward())
    net.zero_grad()
    budget = int(0.3 * trace.peak_bytes)
    with pytest.raises(rematfn.BudgetError):
        rematfn.offload(net, budget, to="packed")(X).sum().backward()
    net.zero_grad()
    # New ones: until something has moved, packing is taken to be the faster.
    packed, disk = rematfn.Packed(verify=True), rematfn.Disk(verify=True)
    g = rematfn.offload(net, budget, to=[packed, disk][::order])
    for _ in range(4):
        assert_bitwise_equal(gradients(net, g), expected)
        stats = rematfn.stats(g)
        assert stats.replays == 0
        assert stats.peak_bytes <= budget
        rematfn.testing.check()
    assert packed.bytes_out > 0
    assert disk.bytes_out > 0
    assert packed.held_bytes == disk.held_bytes == 0


def test_a_disk_that_is_full_takes_over_what_it_has_room_for() -> None:
    """Beside the large value there is no room for one of the others, however packed."""

    def f(x: Tensor) -> Tensor:
        values = [x.relu() * i for i in range(1, 4)]
        large = torch.ones(4 * N).sum()
        return sum(values[1:], values[0]) * large

    x = torch.randn(N)
    for room, fits in ((2, False), (3, True)):
        disk = rematfn.Disk(budget=room * x.nbytes)
        g = rematfn.offload(f, 4 * x.nbytes + (64 << 10), to=["packed", disk])
        if fits:
            assert_bitwise_equal(g(x), f(x))
            assert disk.peak_bytes == 3 * x.nbytes
        else:
            with pytest.raises(rematfn.BudgetError):
                g(x)
        assert disk.held_bytes == 0
        rematfn.testing.check()


@torch.library.custom_op("rematfn_tests::make_packable", mutates_args=())
def make_packable(x: Tensor) -> Tensor:
    made = x.relu()
    ADDRESSES.append(made.data_ptr())
    return made


make_packable.register_fake(torch.empty_like)
ADDRESSES: list[int] = []


@pytest.mark.parametrize("moves_on", [False, True])
def test_verify_finds_what_has_been_written_to(moves_on: bool) -> None:
    """It is replayed instead. Without `verify`, what comes back are other values."""

    def run(verify: bool) -> tuple[Tensor, int]:
        def f(x: Tensor) -> Tensor:
            y = make_packable(x)
            torch.ones(7).sin()
            ctypes.memset(ADDRESSES[-1] + 4096, 0x55, 256)  # where it lies, packed
            torch.ones(2 * N).sum()  # beside which it has no room
            return y * 1

        disk = rematfn.Disk()
        to = [rematfn.Packed(verify=verify), disk] if moves_on else rematfn.Packed(verify=verify)
        budget = 2 * x.nbytes + (64 << 10) if moves_on else None
        g = rematfn.offload(f, budget, to=to, policy=EvictEverything())
        found = g(x)
        assert (disk.bytes_in > 0) == moves_on
        return found, rematfn.stats(g).replays

    x = torch.randn(N)
    found, replays = run(verify=True)
    assert replays > 0
    assert_bitwise_equal(found, x.relu())
    found, replays = run(verify=False)
    assert replays == 0
    assert not torch.equal(found, x.relu())


NESTINGS: dict[str, Callable[[Callable[..., Any], Callable[..., Any]], Callable[..., Any]]] = {
    "grad": lambda how, f: func.grad(how(f)),
    "of grad": lambda how, f: how(func.grad(f)),
    "vmap of grad": lambda how, f: func.vmap(func.grad(how(f))),
    "jvp": lambda how, f: lambda x: func.jvp(how(f), (x,), (torch.ones_like(x),)),
    "in remat": lambda how, f: rematfn.remat(lambda x: func.grad(how(f))(x), "60%"),
    "around remat": lambda how, f: how(lambda x: func.grad(rematfn.remat(f, "60%"))(x)),
}


@pytest.mark.parametrize("nesting", NESTINGS)
@pytest.mark.parametrize("everything", [False, True])
@pytest.mark.parametrize("beside_a_disk", [False, True])
def test_it_nests(nesting: str, everything: bool, beside_a_disk: bool) -> None:
    def f(x: Tensor) -> Tensor:
        for _ in range(4):
            x = (x.sin() * 3).relu()
        return x.square().sum()

    policy = {"policy": EvictEverything()} if everything else {}
    packed = rematfn.Packed(verify=True)
    x = torch.randn(4, N // 4)
    # So tight that what is packed has to move on; and a disk that is never faster than packing.
    disk = rematfn.Disk(verify=True, bandwidth=1 << 28)
    tiers = {"to": [packed, disk], "budget": 4 * x.nbytes} if beside_a_disk else {"to": packed}
    how = functools.partial(rematfn.offload, **tiers, **policy)
    expected = NESTINGS[nesting](lambda g: g, f)(x)
    assert_bitwise_equal(NESTINGS[nesting](how, f)(x), expected)
    assert packed.bytes_out > 0 or "remat" in nesting  # which may drop it instead
    assert packed.held_bytes == disk.held_bytes == 0


def test_threads_share_one() -> None:
    packed = rematfn.Packed(verify=True)
    net = layers()
    expected = gradients(net, net)
    found: list[Any] = []

    def work() -> None:
        own = copy.deepcopy(net)
        g = rematfn.offload(own, to=packed)
        for _ in range(3):
            with torch.random.fork_rng():
                g(X)
        found.append(packed.bytes_out > 0)

    together(*[work] * 3)
    assert found == [True] * 3
    assert_bitwise_equal(gradients(net, rematfn.offload(net, to=packed)), expected)
    assert packed.held_bytes == 0


@pytest.mark.parametrize("budget", [None, *range(4, 12)])
def test_what_torch_shares_until_it_is_written(budget: int | None) -> None:
    """It is neither packed nor dropped; and room is wanted where it is copied to be written."""

    def f(x: Tensor) -> Any:
        a = x.relu().relu()
        b = torch._lazy_clone(a)
        c = b.relu().relu()
        b.add_(1)
        return c, a.relu().relu(), b.relu().relu(), a + 0

    x = torch.randn(N)
    g = rematfn.remat(f, budget and budget * x.nbytes, offload="packed")
    for _ in range(3):
        try:
            made = g(x)
        except rematfn.BudgetError:
            assert budget in range(4, 8)
        else:
            assert_bitwise_equal(made, f(x))


@forking
@in_a_process
def test_a_child_has_what_was_packed_before_the_fork() -> None:
    """It unpacks on threads of its own.

    In a process of its own: a CUDA build of torch that has compiled, or has made fake tensors, runs
    no backward in a child if its first came after that, even if there is no GPU.
    """
    torch.set_num_threads(2)
    x = torch.randn(N, requires_grad=True)
    packed = rematfn.Packed(verify=True)
    loss = rematfn.offload(lambda x: x.relu().sin().relu().sin().sum(), to=packed)(x)
    assert packed.held_bytes > 0

    def child() -> None:
        loss.backward()
        z = x.detach().clone().requires_grad_()
        z.relu().sin().relu().sin().sum().backward()
        assert_bitwise_equal(x.grad, z.grad)

    assert in_a_child(child) == 0


def test_options() -> None:
    packed = rematfn.Packed(verify=True)
    assert repr(packed) == "Packed(verify=True)"
    assert repr(pickle.loads(pickle.dumps(packed))) == repr(packed)
    assert copy.deepcopy(packed) is packed
    with pytest.raises(TypeError, match=r"Packed\(verify=\.\.\.\): True or False is needed, got 1"):
        rematfn.Packed(verify=1)  # type: ignore[arg-type]
    assert "Packed()" in repr(rematfn.offload(torch.sin, to="packed"))
    with pytest.raises(rematfn.BudgetError, match=r"packed +0 B, in the budget"):
        rematfn.offload(lambda x: (x * 2) @ (x * 3), "1MiB", to="packed")(torch.randn(512, 512))
