# SPDX-License-Identifier: Apache-2.0
"""Levels and their tensors on several threads at once, and in forked children."""

import copy
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from helpers import (
    EVERYTHING,
    UNIT,
    Transform,
    assert_bitwise_equal,
    doubling,
    inner,
    leaf,
    same_as_untransformed,
)
from processes import forking, in_a_child, in_a_process, together
from torch import Tensor, nn

import rematfn
from rematfn import _C

remat = rematfn.remat


# What two threads hold at once depends on who comes first, so no smallest budget is asked for.
ROOMY = partial(remat, budget=16 * UNIT)
parallel = pytest.mark.parametrize(
    "transform", [remat, ROOMY, EVERYTHING], ids=["plain", "bounded", "everything"]
)


# --- backward -------------------------------------------------------------------------------------


@pytest.mark.parametrize("levels", [1, 2], ids=["one-level", "two-levels"])
@parallel
@same_as_untransformed
def test_two_backwards_at_once(levels: int, transform: Transform) -> Any:
    """Graphs that share what one level saved, or of a level each."""

    x, y = leaf(), leaf()

    def f(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        shared = x.detach().sin().exp()
        return inner(x * shared), inner(y * shared)

    if levels == 1:
        outs = transform(f)(x, y)
    else:
        outs = [transform(lambda t: inner(t * t.sin()))(t) for t in (x, y)]
    losses = [out.sum() for out in outs]
    together(*(partial(loss.backward, retain_graph=True) for loss in losses))
    together(*(loss.backward for loss in losses))
    return losses, x.grad, y.grad


@pytest.mark.parametrize("nested", [False, True], ids=["one level", "two levels"])
def test_a_graph_that_a_thread_makes_of_tensors_of_a_level_is_the_levels(nested: bool) -> None:
    """From its first node on, even if that is the first of all that the thread makes."""
    seen: list[tuple[bool, bool]] = []

    def see(gradient: Tensor, doubled: Tensor) -> None:
        seen.append((_C.has_key(gradient), _C.has_key(doubled)))

    def work(y: Tensor) -> Tensor:
        assert y.detach().dim() == 1  # has no node, though its argument has one
        return doubling(see)(y.cos())

    def inner(x: Tensor) -> Tensor:
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(work, x.sin()).result()

    def outer(x: Tensor) -> Tensor:
        return (rematfn.remat(inner) if nested else inner)(x).sin().sum()

    rematfn.remat(outer)(torch.linspace(0, 1, 100).requires_grad_()).backward()
    assert seen == [(True, True)]


# --- levels at once -------------------------------------------------------------------------------


def test_levels_of_many_threads_keep_to_their_budgets() -> None:
    net = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 64), nn.Tanh())
    inputs = [torch.rand(16, 32, generator=torch.Generator().manual_seed(k)) for k in range(4)]
    budgets = [26_000, 30_000, 40_000, None]

    def loss_fn(params: dict[str, Tensor], x: Tensor) -> Tensor:
        # A copy of its own: functional_call swaps the module's parameters, for all threads.
        y = torch.func.functional_call(copy.deepcopy(net), params, (x,))
        return (y.sin() * y).exp().sum()

    params = {k: v.detach() for k, v in net.named_parameters()}
    functions = [remat(loss_fn, budget=b) for b in budgets]

    def work(k: int) -> list[Any]:
        return [torch.func.grad(functions[k])(params, inputs[k]) for _ in range(10)]

    found = together(*(partial(work, k) for k in range(4)))
    for k in range(4):
        expected = torch.func.grad(loss_fn)(params, inputs[k])
        for grads in found[k]:
            assert_bitwise_equal(grads, expected)
        stats, budget = rematfn.stats(functions[k]), budgets[k]
        assert budget is None or stats.peak_bytes <= budget
        assert budget is None or budget > 30_000 or stats.replays > 0


# --- one level's tensors elsewhere ----------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 2], ids=["in-one-level", "in-two"])
@parallel
@same_as_untransformed
def test_tensors_of_a_level_are_read_in_levels_of_other_threads(
    depth: int, transform: Transform
) -> Any:
    """A tensor belongs to one tree of levels: it leaves all of its own, one after the other."""

    def f(x: Tensor) -> Tensor:
        h = x.sin() * 2
        g = transform(lambda t: (t * h).exp() * h)
        with ThreadPoolExecutor(4) as pool:
            made = list(pool.map(g, [x * k for k in range(4)]))
        return torch.stack(made).sum(0) * h

    for _ in range(depth):
        f = transform(f)
    return f(leaf().detach())


def test_a_tensor_that_escaped_is_used_by_many_threads_at_once() -> None:
    """The first use of it seals it; whoever comes second finds it sealed."""
    x = leaf().detach()
    for _ in range(20):
        kept: list[Tensor] = []

        def f(x: Tensor, kept: list[Tensor] = kept) -> None:
            kept.append((x.sin() * x).exp())

        EVERYTHING(f)(x)
        found = together(*[lambda kept=kept: kept[0].cos()] * 4)
        expected = (x.sin() * x).exp()
        assert_bitwise_equal(kept[0], expected)
        for y in found:
            assert_bitwise_equal(y, expected.cos())


def test_a_reader_that_outlives_the_function() -> None:
    for _ in range(20):
        x = leaf().detach()
        read: list[Tensor] = []

        def f(x: Tensor, read: list[Tensor] = read) -> tuple[Tensor, threading.Thread]:
            y = x.sin() * x
            thread = threading.Thread(target=lambda: read.extend(y.cos() for _ in range(20)))
            thread.start()
            return y, thread

        y, thread = EVERYTHING(f)(x)
        thread.join()
        assert_bitwise_equal(y, x.sin() * x)
        for z in read:
            assert_bitwise_equal(z, (x.sin() * x).cos())


# --- the two locks --------------------------------------------------------------------------------


@in_a_process
def test_kernels_in_python_do_not_deadlock_with_bindings_that_hold_its_lock() -> None:
    """One thread holds the level's lock and wants Python's, the other the reverse."""

    @torch.library.custom_op("rematfn_tests::slow_twice", mutates_args=())
    def twice(x: Tensor) -> Tensor:
        return x * 2

    twice.register_fake(torch.empty_like)
    done = threading.Event()

    def read(h: Tensor) -> None:
        while not done.is_set():
            h[0].sum(), h.T  # bindings that keep Python's lock

    def f(x: Tensor) -> Tensor:
        h = x.sin().view(4, 4)
        thread = threading.Thread(target=read, args=(h,))
        thread.start()
        for _ in range(500):
            y = twice(h)
        done.set()
        thread.join()
        return y

    sys.setswitchinterval(1e-5)
    x = torch.linspace(-1, 1, 16)
    assert_bitwise_equal(EVERYTHING(f)(x), x.sin().view(4, 4) * 2)


# --- processes ------------------------------------------------------------------------------------


@forking
@pytest.mark.parametrize("transform", [remat, EVERYTHING], ids=["plain", "everything"])
def test_a_fork_inside_a_level(transform: Transform) -> None:
    """The child goes on inside the level, alone."""

    def f(x: Tensor) -> Tensor:
        y = x.sin()
        z = y * y

        def child() -> None:
            assert torch.equal(z + y, x.sin() * x.sin() + x.sin())
            assert torch.equal(transform(inner)(x), inner(x))
            rematfn.testing.check()

        assert in_a_child(child) == 0
        return z.exp()

    x = leaf().detach()
    assert_bitwise_equal(transform(f)(x), (x.sin() * x.sin()).exp())


@forking
@in_a_process
def test_a_child_replays_on_as_many_threads_as_the_first_run() -> None:
    """OpenMP would wait there for those of the parent."""
    torch.set_num_threads(2)
    x = torch.randn(1 << 18)

    def f(x: Tensor) -> Tensor:
        y = x.sin()
        total = y.sum()

        def child() -> None:
            torch.set_num_threads(1)
            assert torch.equal(y * total, expected)

        assert in_a_child(child) == 0
        return total

    expected = x.sin() * x.sin().sum()
    EVERYTHING(f)(x)


def test_a_call_does_not_wait_for_the_backward_of_another() -> None:
    """Who plans a call asks whether those before are over. One that computes now is not."""
    entered, leave = threading.Event(), threading.Event()
    overtaken: list[bool] = []

    @torch.library.custom_op("rematfn_tests::overtaken", mutates_args=())
    def wait(x: Tensor) -> Tensor:
        entered.set()
        overtaken.append(leave.wait(20))
        return x.clone()

    twice = doubling(lambda gradient, doubled: wait(gradient))
    g = remat(lambda x: twice(x.sin()).sum(), 0.9)
    out = g(leaf())
    thread = threading.Thread(target=out.backward)
    thread.start()
    assert entered.wait(60)
    g(leaf())
    leave.set()
    thread.join()
    assert overtaken == [True]


@forking
@in_a_process
def test_a_fork_while_another_thread_runs_an_operator() -> None:
    """The other thread's domain is lost to the child; nothing else is."""
    entered, leave = threading.Event(), threading.Event()

    @torch.library.custom_op("rematfn_tests::waiting", mutates_args=())
    def waiting(x: Tensor) -> Tensor:
        entered.set()
        leave.wait(60)
        return x + torch.rand(())

    shared: list[Tensor] = []

    def busy(x: Tensor) -> Tensor:
        shared.append(x.sin())
        return waiting(x) * 2

    thread = threading.Thread(target=lambda: remat(busy)(leaf().detach()))
    thread.start()
    entered.wait(60)

    def child() -> None:
        rematfn.testing.check()
        dropout = partial(nn.functional.dropout, p=0.5)
        assert EVERYTHING(lambda x: dropout(x.sin()).sum() * 2)(leaf()).isfinite()
        with pytest.raises(RuntimeError, match="is lost to the child"):
            shared[0].add(1)
        shared.clear()

    assert in_a_child(child) == 0
    leave.set()
    thread.join()
