# SPDX-License-Identifier: Apache-2.0
"""Nothing grows: not over many steps of training, nor in a loop that never ends.

Lineage may be long, and goes when the last tensor that needs it goes.
"""

import gc
import threading
import tracemalloc
import weakref
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from helpers import EVERYTHING, EXHAUSTIVE, Transform, assert_bitwise_equal, remains, untransformed
from processes import together
from torch import Tensor, nn

import rematfn
from rematfn import _C
from rematfn.testing import MemoryTimeline

remat = rematfn.remat
NOTHING = {"levels": 0, "operations": 0}

transforms = pytest.mark.parametrize(
    "transform",
    [remat, partial(remat, budget="12KiB"), EVERYTHING],
    ids=["plain", "tight", "everything"],
)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 3, 3, padding=1), nn.BatchNorm2d(3)
        self.head = nn.Linear(48, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu_(self.norm(self.conv(x)))
        return self.head(nn.functional.dropout(x.flatten(1), 0.2, self.training))


def backward_steps(transform: Transform) -> Callable[[], Tensor]:
    """A module, `.backward()` and an optimiser with state."""
    torch.manual_seed(0)
    net = Net()
    g, optimizer = transform(net), torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)

    def step() -> Tensor:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(g(torch.rand(2, 1, 4, 4)), torch.tensor([1, 3]))
        loss.backward()
        optimizer.step()
        return loss  # whose graph is freed

    return step


def functional_steps(transform: Transform) -> Callable[[], Tensor]:
    """`torch.func.grad` and parameters that are replaced."""
    torch.manual_seed(0)
    state = {"w": torch.rand(8, 8), "b": torch.rand(8)}

    def loss_fn(state: dict[str, Tensor], x: Tensor) -> Tensor:
        for _ in range(3):
            x = torch.tanh(x @ state["w"] + state["b"])
        return x.square().mean()

    gradient = torch.func.grad_and_value(transform(loss_fn))

    def step() -> Tensor:
        grads, loss = gradient(state, torch.rand(4, 8))
        for name in state:
            state[name] = state[name] - 0.1 * grads[name]
        return loss

    return step


def whole_steps(transform: Transform) -> Callable[[], Tensor]:
    """The whole step is transformed, optimiser and all."""
    return transform(backward_steps(untransformed))


Make = Callable[[Transform], Callable[[], Tensor]]
STEPS = {"backward": backward_steps, "functional": functional_steps, "whole": whole_steps}
steps = pytest.mark.parametrize("make", STEPS.values(), ids=STEPS.keys())


def live_objects() -> Counter[str]:
    gc.collect()
    return Counter(type(o).__name__ for o in gc.get_objects())


@steps
@transforms
def test_many_steps_leave_nothing(make: Make, transform: Transform) -> None:
    live_objects()  # abstract classes note down what they are asked about: `Counter` asks
    step, count = make(transform), 1000 if EXHAUSTIVE else 100
    losses = [step() for _ in range(10)]
    before, bytes_before = live_objects(), None
    tracemalloc.start(1)
    try:
        for k in range(count):
            losses.append(step())
            live = (_C.testing.live_levels(), _C.testing.live_operations())
            assert live == (0, 0), f"after step {k}"
            if k == count // 5:
                bytes_before = tracemalloc.get_traced_memory()[0]
        grown = tracemalloc.get_traced_memory()[0] - bytes_before
    finally:
        tracemalloc.stop()
    after = live_objects()
    held = len(losses)
    more = {k: n - before[k] for k, n in after.items() if n > before[k] + 50 and k != "Tensor"}
    assert not more, more
    assert after["Tensor"] <= before["Tensor"] + held
    assert grown < 1000 * held, f"{grown} bytes of Python objects in {held} steps"
    twin = make(untransformed)
    assert_bitwise_equal(losses, [twin() for _ in range(held)])


@pytest.mark.parametrize("budget", [None, "16KiB"])
def test_a_loop_with_two_states_keeps_a_bounded_lineage(budget: str | None) -> None:
    """Each state is needed to replay the other: to cut one alone would free next to nothing."""
    most, peak = 2_000, 0

    def f(h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        nonlocal peak
        for _ in range(5_000):
            h, c = (h + c).sin(), (h - c).tanh()
            peak = max(peak, _C.testing.live_operations())
        return h, c

    x, y = torch.arange(256.0), torch.ones(256)
    g = remat(f, budget, max_operations=most)
    with torch.no_grad():
        assert_bitwise_equal(g(x, y), f(x, y))
    assert most // 2 < peak <= most + 4


def test_a_loop_whose_states_may_move_keeps_a_bounded_lineage() -> None:
    """What is cut can still go to the disk, so it takes no room for good."""
    most, peak = 500, 0

    def f(x: Tensor) -> Tensor:
        nonlocal peak
        states = [x + k for k in range(40)]
        for k in range(3_000):
            states[k % 40] = states[k % 40].sin()
            peak = max(peak, _C.testing.live_operations())
        total = states[0]
        for state in states[1:]:
            total = total + state
        return total

    x = torch.arange(256.0)
    g = remat(f, 64 << 10, policy=rematfn.policies.ON(), offload=True, max_operations=most)
    with torch.no_grad():
        assert_bitwise_equal(g(x), f(x))
    assert most // 2 < peak <= 4 * most


def test_a_long_record_of_what_is_held_refuses_nothing() -> None:
    """Of 3,000 results a hundred are resident; to make constants of those would free nothing."""
    most, count = 1_000, 3_000

    def f(x: Tensor) -> Tensor:
        held = [x + k for k in range(count)]
        total = torch.zeros(256)
        for h in held:
            total = total + h
        return total

    x, budget = torch.ones(256), 100 << 10
    g = remat(f, budget, policy=rematfn.policies.ON(), max_operations=most)
    with MemoryTimeline() as timeline:
        result = g(x)
    assert_bitwise_equal(result, f(x))
    assert timeline.peak <= budget + result.nbytes
    assert rematfn.stats(g).replays < 2 * count
    assert remains() == NOTHING


class Keeper(nn.Module):
    """A module that holds its own output, and with it the graph that leads to itself."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.kept: Any = None

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x).sin()
        self.kept = [self, y, y * 2]
        return y.exp()


@transforms
@pytest.mark.parametrize("differentiated", [False, True], ids=["forward", "backward"])
def test_a_module_that_holds_its_output_is_collected(
    transform: Transform, differentiated: bool
) -> None:
    module = Keeper()
    gone = weakref.ref(module)
    out = transform(module)(torch.rand(3, 8))
    if differentiated:
        out.sum().backward()
    del module, out
    gc.collect()
    assert gone() is None
    assert remains() == NOTHING


# --- long chains ----------------------------------------------------------------------------------

UNIT = 16  # bytes of the four floats that every link of a chain holds


def read_in_reverse(x: Tensor, n: int) -> Tensor:
    """Make a chain of `n` operators, all held in a list, and read it from its end."""
    links = [x]
    for _ in range(n):
        links.append(links[-1] + 1.0)
    total = torch.zeros(4)
    while links:
        total = total * 0.5 + links.pop()
    return total


@pytest.mark.parametrize("n", [1_000, 100_000 if EXHAUSTIVE else 20_000])
def test_a_chain_in_two_square_roots_of_its_length(n: int) -> None:
    """No stack overflows, and no link is replayed again and again."""
    x = torch.arange(4.0)
    budget = 2 * int(n**0.5) * UNIT
    g = rematfn.remat(lambda x: read_in_reverse(x, n), budget=budget)
    assert_bitwise_equal(g(x), read_in_reverse(x, n))
    stats = rematfn.stats(g)
    assert stats.peak_bytes <= budget
    assert n // 2 < stats.replays < 8 * n, f"{stats.replays / n} replays a link"
    assert _C.testing.live_operations() == 0


def test_a_long_chain_is_replayed_and_destroyed_without_recursion() -> None:
    """One value at the end of a chain that kept none of its links."""

    def f(x: Tensor) -> Tensor:
        y = x * 2
        for _ in range(50_000):
            y = y + 1.0
        a = torch.ones(4)
        b = a + 1
        c = a * b  # a, b and c leave no room for y
        del a, b
        return y * c

    x = torch.arange(4.0)
    g = rematfn.remat(f, budget=4 * UNIT - 1)

    def work() -> None:
        assert_bitwise_equal(g(x), f(x))
        assert _C.testing.live_operations() == 0, "its lineage has gone, all at once"

    in_a_small_thread(work)
    assert rematfn.stats(g).replays >= 50_000


def in_a_small_thread(work: Any) -> None:
    """Run `work` on a thread of 256 KiB of stack, where any deep recursion is the end."""
    before = threading.stack_size(256 * 1024)
    try:
        together(work)
    finally:
        threading.stack_size(before)
