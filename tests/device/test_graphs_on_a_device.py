# SPDX-License-Identifier: Apache-2.0
"""A call that is captured in a graph keeps to its budget, and the graph gives what eager would."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import optree
import pytest
import torch
from fake_device import DEVICE, ONE, big, captured, chain
from helpers import assert_bitwise_equal, spread, untransformed
from torch import Tensor, func, nn

import rematfn
from rematfn import _C
from rematfn.testing import EvictEverything

pytestmark = pytest.mark.skipif(
    DEVICE == "fake" and torch.__version__ < "2.13",
    reason="torch 2.12 does not tell of every device",
)

Step = Callable[[Tensor], Any]
EVERYTHING = functools.partial(rematfn.remat, policy=EvictEverything())
WAYS = {
    "plain": rematfn.remat,
    "everything": EVERYTHING,
    "0.6": lambda f: rematfn.remat(f, 0.6),
}


@pytest.fixture(autouse=True)
def on_the_device() -> Iterator[None]:
    with torch.device(DEVICE):
        yield
    torch.accelerator.synchronize()


def assert_graph_is_eager(make: Callable[[Any], Step], transform: Any, like: Tensor) -> None:
    """Capture a step once, and replay it with other inputs at the same address."""
    step, eager = make(transform), make(untransformed)
    static = like.clone()
    for _ in range(3):
        step(static)
        eager(static)
    with captured() as replay:
        out = step(static)
        for leaf in optree.tree_leaves(out):
            rematfn.materialize(leaf)
    for k in range(3):
        torch.manual_seed(k)
        static.copy_(torch.randn_like(static))
        replay()
        assert_bitwise_equal(out, eager(static.clone()))


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(64, 128), nn.BatchNorm1d(128), nn.ReLU(inplace=True),
        nn.Linear(128, 128), nn.GELU(), nn.LayerNorm(128), nn.Linear(128, 1),
    )  # fmt: skip


def training_step(transform: Any) -> Step:
    """A step with its optimiser inside: parameters and statistics are written by each replay."""
    model = net()
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)
    loss = transform(lambda x: model(x).square().mean())

    def step(x: Tensor) -> Any:
        optimiser.zero_grad(set_to_none=True)
        value = loss(x)
        value.backward()
        optimiser.step()
        return value.detach(), [p.detach() for p in model.parameters()], list(model.buffers())

    return step


def functional_step(way: str) -> Callable[[Any], Step]:
    def f(x: Tensor) -> Tensor:
        return (x.sin() * x.exp()).cos().square().sum()

    def make(transform: Any) -> Step:
        return {
            "grad": func.grad(transform(f)),
            "inside": transform(func.grad(f)),
            "vmap of grad": func.vmap(func.grad(transform(f))),
            "jvp": lambda x: func.jvp(transform(f), (x,), (x,)),
            "hessian-vector": lambda x: func.jvp(func.grad(transform(f)), (x,), (x,)),
        }[way]

    return make


@pytest.mark.parametrize("way", WAYS)
def test_a_training_step_is_eagers(way: str) -> None:
    assert_graph_is_eager(training_step, WAYS[way], torch.randn(256, 64))


NESTED = ["grad", "inside", "vmap of grad", "jvp", "hessian-vector"]


@pytest.mark.parametrize(("way", "nested"), spread(["plain", "everything"], NESTED, 2))
def test_functional_transforms_are_eagers(way: str, nested: str) -> None:
    assert_graph_is_eager(functional_step(nested), WAYS[way], torch.randn(16, 64))


def test_the_peak_of_a_capture_is_within_the_budget() -> None:
    def step(x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        (grad,) = torch.autograd.grad(loss(x), x)
        return grad

    budget = 6 * ONE
    loss = rematfn.remat(lambda x: chain(x).sum(), budget)
    static = big()
    for _ in range(3):
        step(static)
    torch.accelerator.synchronize()
    torch.accelerator.reset_peak_memory_stats()
    before = torch.accelerator.memory_allocated() - _C.workspace_bytes()
    with captured() as replay:
        out = step(static)
    stats = rematfn.stats(loss)
    assert stats.replays > 0
    given = 2 * ONE  # the step's leaf, and its gradient
    peak = torch.accelerator.max_memory_allocated() - _C.workspace_bytes() - before
    assert peak <= budget + given
    replay()
    x = static.clone().requires_grad_()
    assert_bitwise_equal(out, torch.autograd.grad(chain(x).sum(), x)[0])


def test_forward_and_backward_may_be_graphs_of_their_own() -> None:
    loss = EVERYTHING(lambda x: chain(x).sum())
    static = big().requires_grad_()
    for _ in range(2):
        loss(static).backward()
    static.grad = None
    with captured() as forward:
        value = loss(static)
    with captured() as backward:
        (grad,) = torch.autograd.grad(value, static)
    for k in range(2):
        with torch.no_grad():
            static.copy_(torch.randn_like(static) + k)
        forward()
        backward()
        x = static.detach().clone().requires_grad_()
        expected = chain(x).sum()
        gradients = torch.autograd.grad(expected, x)
        assert_bitwise_equal((value.detach(), grad), (expected.detach(), *gradients))


def test_what_was_evicted_before_a_capture_is_refused_in_it() -> None:
    def f(x: Tensor) -> Tensor:
        y = x.sin()
        z = x.cos()
        with captured():
            x.exp()
            with pytest.raises(rematfn.ReplayError, match="before a graph's capture"):
                y + 1
        return y * z

    assert_bitwise_equal(EVERYTHING(f)(big()), big().sin() * big().cos())


def test_what_a_capture_evicted_is_refused_outside() -> None:
    loss = EVERYTHING(lambda x: chain(x).sum())
    x = big().requires_grad_()
    with captured() as replay:
        value = loss(x)
    replay()
    with pytest.raises(rematfn.ReplayError, match="only while the graph runs"):
        value.backward()


def test_what_a_capture_reads_or_made_stays_afterwards() -> None:
    """What makes room for others afterwards may not take what the graph has addresses of."""

    def run(x: Tensor, capture: Any) -> tuple[Tensor, Tensor, Tensor]:
        before = x.sin()
        with capture() as replay:
            out = before.cos() * 2
        later = [(x * k).exp() for k in range(8)]
        rest = torch.stack([y.sum() for y in later])
        replay()
        return out + 1, before + 1, rest

    @contextlib.contextmanager
    def at_once() -> Iterator[Callable[[], None]]:
        yield lambda: None

    g = rematfn.remat(lambda x: run(x, captured), 6 * ONE)
    assert_bitwise_equal(g(big()), run(big(), at_once))
    assert rematfn.stats(g).evictions > 0


def test_what_is_overwritten_between_two_captures_is_refused_in_the_second() -> None:
    """A copy of it would be what it was while the first was captured."""

    def f(x: Tensor) -> None:
        x = x.clone()
        w = (x * 0.3).detach().requires_grad_()
        with captured():
            value = chain(x * 1 + w).sum()
        x.mul_(0.5)
        with captured():
            x.exp()
            with pytest.raises(rematfn.ReplayError, match="or overwritten, is needed in it"):
                torch.autograd.grad(value, w)

    rematfn.remat(f, 12 * ONE)(big())


@pytest.mark.parametrize("way", ["it failed", "it is not replayed"])
def test_a_backward_needs_no_graph_of_another_one(way: str) -> None:
    static, w = big() + 1, big().requires_grad_()
    loss = rematfn.remat(lambda x: chain(x * w).sum(), 7 * ONE)
    with captured() as forward:
        value = loss(static)
    with contextlib.suppress(KeyError), captured():
        torch.autograd.grad(value, w, retain_graph=True)
        if way == "it failed":
            raise KeyError
    with captured() as backward:
        (grad,) = torch.autograd.grad(value, w)
    for k in range(2):
        static.copy_(big() + 3 + k)
        forward()
        backward()
        leaf = w.detach().requires_grad_()
        assert_bitwise_equal((grad,), torch.autograd.grad(chain(static * leaf).sum(), leaf))


def test_values_of_the_cpu_are_evicted_in_a_capture_as_outside() -> None:
    with torch.device("cpu"):
        c = torch.randn(64)

    def f(x: Tensor) -> tuple[Tensor, Tensor]:
        made = c.sin()
        y = x.sin()
        number = (made.cos() * made).sum().item()
        return y.exp() * y * number, made

    step = EVERYTHING(f)
    static = big()
    with captured() as replay:
        out = step(static)
    replay()
    assert_bitwise_equal(out, f(static))


@pytest.mark.parametrize("budget", [20 * ONE, 6 * ONE])
def test_what_a_capture_made_may_be_written_outside(budget: int) -> None:
    def f(x: Tensor) -> Tensor:
        with captured() as replay:
            made = rematfn.materialize(x.cos())
        replay()
        made.mul_(2)
        later = [(x * k).exp() for k in range(8)]
        return made + torch.stack([y.sum() for y in later]).sum()

    def plain(x: Tensor) -> Tensor:
        return x.cos().mul_(2) + torch.stack([(x * k).exp().sum() for k in range(8)]).sum()

    assert_bitwise_equal(rematfn.remat(f, budget)(big()), plain(big()))


def test_random_numbers_in_a_capture_are_drawn_once() -> None:
    def loss(x: Tensor) -> Tensor:
        y = nn.functional.dropout(x.sin(), 0.5) * torch.ops.tested.untagged(x.detach())
        return (y.exp() * torch.randn_like(y)).sum()

    x = torch.randn(16, 64).requires_grad_()
    with torch.library._scoped_library("tested", "FRAGMENT") as library:
        library.define("untagged(Tensor x) -> Tensor")
        library.impl("untagged", torch.rand_like, "CompositeExplicitAutograd")
        torch.manual_seed(5)
        expected = torch.autograd.grad(loss(x), x)
        for transform in (rematfn.remat, EVERYTHING):
            g = transform(loss)
            torch.manual_seed(5)
            with captured() as replay:
                found = torch.autograd.grad(g(x), x)
            replay()
            assert_bitwise_equal(found, expected)


def test_captured_and_other_calls_take_turns() -> None:
    """What runs on other streams, before and after, is neither waited for nor waits."""
    step, eager = training_step(EVERYTHING), training_step(untransformed)
    static = torch.randn(32, 64)
    side = torch.Stream(DEVICE)
    for k in range(3):
        if k == 1:
            torch.accelerator.synchronize()
            with side:
                step(static)
                side.synchronize()
        else:
            step(static)
        eager(static)
    torch.accelerator.synchronize()
    with captured() as replay:
        out = step(static)
    replay()
    assert_bitwise_equal(out, eager(static))
    for _ in range(2):
        assert_bitwise_equal(step(static), eager(static))
