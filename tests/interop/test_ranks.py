# SPDX-License-Identifier: Apache-2.0
"""Training in two processes, each under budgets of its own: bit for bit what it is without."""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import (
    EVERYTHING,
    EXHAUSTIVE,
    Transform,
    assert_bitwise_equal,
    assert_nothing_keyed,
    assert_nothing_left,
    kept,
    remains,
    untransformed,
)
from processes import in_ranks
from torch import Tensor, distributed, nn
from torch.distributed import _functional_collectives as collectives
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import rematfn
from rematfn.testing import MemoryTimeline

WIDTH, ROWS, BLOCKS = 16, 256, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(nn.functional.gelu(self.up(self.norm(x))))
        return y


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(BLOCKS)))


def batch(k: int) -> Tensor:
    torch.manual_seed(100 * k + distributed.get_rank())
    return torch.randn(ROWS, WIDTH)


def whole(t: Tensor) -> Tensor:
    full = t.detach().full_tensor() if hasattr(t, "full_tensor") else t.detach()
    return full.clone()


def trained(
    model: nn.Module,
    around_step: Transform = untransformed,
    alone: Callable[[int], Any] | None = None,
) -> Any:
    """Return the losses, parameters and gradients of three steps; some communicate not."""
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=0.01)

    def step(x: Tensor, k: int) -> Tensor:
        if k != 1:
            optimizer.zero_grad()
        with alone(k) if alone else contextlib.nullcontext():
            loss = model(x).square().mean()
            loss.backward()
        optimizer.step()
        return loss.detach()

    step = around_step(step)
    losses = [step(batch(k), k) for k in range(3)]
    gradients = [whole(p.grad) for p in parameters if p.grad is not None]
    return losses, [whole(p) for p in parameters], gradients


# --- what is run ----------------------------------------------------------------------------------


def around_ddp(transform: Transform) -> Any:
    return trained(transform(DistributedDataParallel(network())))


def around_step_of_ddp(transform: Transform, **options: Any) -> Any:
    return trained(DistributedDataParallel(network(), bucket_cap_mb=0.01, **options), transform)


def no_sync(transform: Transform) -> Any:
    model = DistributedDataParallel(network())

    def alone(k: int) -> Any:
        return model.no_sync() if k == 0 else contextlib.nullcontext()

    return trained(model, transform, alone)


def communication_hook(transform: Transform) -> Any:
    model = DistributedDataParallel(network())

    def average(bucket: distributed.GradBucket) -> Any:
        scaled = bucket.buffer().div_(distributed.get_world_size())
        work = distributed.all_reduce(scaled, async_op=True)
        return work.get_future().then(lambda future: future.value()[0])

    model.register_comm_hook(None, lambda state, bucket: average(bucket))
    return trained(model, transform)


def sharded(transform: Transform, at: str, units: Iterable[int] = range(BLOCKS)) -> Any:
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    model = network()
    for k in range(BLOCKS):
        if at == "blocks":
            model[k] = transform(model[k])
        if k in units:
            fully_shard(model[k], mesh=mesh)
    fully_shard(model, mesh=mesh)
    return trained(
        transform(model) if at == "model" else model, transform if at == "step" else untransformed
    )


def units_of_two(transform: Transform) -> Any:
    """The first module of a unit has a result that is read when the parameters have gone."""

    class Skipping(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            aside = self[0](x)
            y: Tensor = self[3](self[2](self[1](aside))) + aside.sin()
            return y

    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    model = Skipping(*network())
    fully_shard([model[0], model[1]], mesh=mesh)
    fully_shard([model[2], model[3]], mesh=mesh)
    fully_shard(model, mesh=mesh)
    return trained(model, transform)


def fsdp1(transform: Transform, at: str) -> Any:
    """The version before; it runs on a CPU if it is told so."""
    shard = functools.partial(FullyShardedDataParallel, device_id=torch.device("cpu"))
    model: Any = network()
    if at == "blocks":
        model = nn.Sequential(*map(transform, model))
    model = shard(nn.Sequential(*map(shard, model)))
    return trained(
        transform(model) if at == "model" else model,
        transform if at == "step" else untransformed,
    )


def joined(transform: Transform) -> Any:
    """One rank has a batch more than the other."""
    model = DistributedDataParallel(network(), bucket_cap_mb=0.01)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    step = transform(step)
    with model.join():
        losses = [step(batch(k)) for k in range(2 + distributed.get_rank())]
    return losses, [whole(p) for p in model.parameters()]


def tensor_parallel(transform: Transform) -> Any:
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    model: nn.Module = network()
    for block in model.children():
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return trained(model, transform)


def asynchronous(transform: Transform) -> Any:
    def f(x: Tensor) -> Tensor:
        y = x.sin()
        work = distributed.all_reduce(y, async_op=True)
        z = x.cos().exp()
        work.wait()
        parts = [torch.empty_like(x) for _ in range(distributed.get_world_size())]
        distributed.all_gather(parts, z)
        distributed.reduce_scatter(parts[0], [z.sin() for _ in parts])
        given = [z.cos() for _ in parts] if distributed.get_rank() == 0 else None
        distributed.scatter(parts[1], given, 0)
        distributed.all_reduce(z.detach())  # and z with it, of which no schema speaks
        whole = torch.empty(len(parts) * len(x), WIDTH)
        distributed.all_gather_into_tensor(whole, (z * w).detach())
        return (y.cos() + torch.stack(parts).sin().sum(0) + whole.sum() * z).tanh()

    # What is broadcast between forward and backward has been read in the forward.
    w, x = torch.full((WIDTH,), 1.0 + distributed.get_rank()), batch(0).requires_grad_()
    loss = transform(lambda x: ((x + w).sin() * 2).exp().sum())(x)
    y = transform(f)(batch(0))
    distributed.broadcast(w, 1)
    loss.backward()
    return y, x.grad


def differentiable(transform: Transform) -> Any:
    def f(x: Tensor) -> Tensor:
        y = collectives.all_gather_tensor_autograd(x.cos(), 0, distributed.group.WORLD)
        z = collectives.reduce_scatter_tensor_autograd(y.exp(), "sum", 0, distributed.group.WORLD)
        w = collectives.all_reduce(x.detach().sin(), "sum", distributed.group.WORLD)
        return ((z.sin() + w.cos()) * y.sum()).tanh()

    x = batch(0).requires_grad_()
    y = transform(f)(x)
    y.square().sum().backward()
    return y.detach(), x.grad


# --- what is asked of it --------------------------------------------------------------------------


def in_any_rank(condition: bool) -> bool:
    """Return whether `condition` holds in one of the ranks, to each of them."""
    ranks = torch.tensor(int(condition))
    distributed.all_reduce(ranks)
    return bool(ranks)


def assert_same_and_bounded(
    run: Callable[[Transform], Any], everything: bool, fraction: float | None
) -> None:
    """Assert that `run` gives what it gives untransformed, with all evicted, and in two budgets.

    The last two are done if they are asked for. Each rank has a fraction of its own of the peak, so
    that the two evict differently.

    A thread of gloo's frees a collective's tensors at some time after its `wait`. That adds to
    some runs' peaks, and to eager's, so that a peak above eager's is measured again.
    """
    with MemoryTimeline() as timeline:
        expected = run(untransformed)
    eager = timeline.peak

    def made_by(how: Transform) -> list[Any]:
        transform, made = kept(how)
        found = run(transform)
        assert_nothing_keyed(found)
        assert_bitwise_equal(found, expected)
        return made

    peak = max(rematfn.stats(g).peak_bytes for g in made_by(rematfn.remat))
    if everything:
        assert all(rematfn.stats(g).replays > 0 for g in made_by(EVERYTHING))
    if fraction is None:
        return
    budget = int((fraction + 0.02 * distributed.get_rank()) * peak)
    for _ in range(30):
        with MemoryTimeline() as timeline:
            made = made_by(functools.partial(rematfn.remat, budget=budget))
        assert all(rematfn.stats(g).peak_bytes <= budget for g in made)
        assert any(rematfn.stats(g).evictions > 0 for g in made)
        if not in_any_rank(timeline.peak > eager):
            return
    assert timeline.peak <= eager


# With a fraction of the peak that is enough for it, if any is.
PROGRAMS = {
    around_ddp: 0.7,
    functools.partial(around_step_of_ddp, gradient_as_bucket_view=True): 0.7,
    functools.partial(around_step_of_ddp, static_graph=True): 0.7,
    no_sync: 0.7,
    communication_hook: 0.7,
    joined: 0.7,
    functools.partial(sharded, at="blocks"): 0.92,
    functools.partial(sharded, at="step"): 0.7,
    functools.partial(sharded, at="model", units=()): 0.7,  # the root alone
    units_of_two: 0.7,
    functools.partial(fsdp1, at="step"): 0.7,
    functools.partial(fsdp1, at="blocks"): 0.92,
    tensor_parallel: 0.7,
    asynchronous: None,  # a thread of gloo's decides what its peak is
    differentiable: None,  # a collective is its peak
    # The first unit's input needs no gradient, and what comes after it is the root's.
    functools.partial(sharded, at="step", units=(0,)): None,
}


def programs() -> None:
    """In `make test` every other one with all evicted, and the rest in budgets."""
    for k, (run, fraction) in enumerate(PROGRAMS.items()):
        bounded = fraction is not None and (EXHAUSTIVE or k % 2 == 1)
        everything = EXHAUSTIVE or not bounded
        assert_same_and_bounded(run, everything, fraction if bounded else None)


def freed_or_refused() -> None:
    freed()
    with pytest.raises(rematfn.ReplayError, match="after it was read"):
        fsdp1(EVERYTHING, at="model")


def one_evicts() -> None:
    """Whatever communicated again would wait for a rank that does not."""
    for run in (asynchronous, differentiable, tensor_parallel):
        expected = run(untransformed)
        for rank in range(distributed.get_world_size()):
            evicts = functools.partial(EVERYTHING, budget="1GiB")
            mine = evicts if distributed.get_rank() == rank else untransformed
            assert_bitwise_equal(run(mine), expected)


def threads_wait_for_ranks() -> None:
    """Each rank's first thread waits for the other's second one, whose operators ask all levels."""
    rank, x, ended = distributed.get_rank(), torch.linspace(0, 1, 4096).view(64, 64), []
    groups = [distributed.new_group([0, 1]) for _ in range(2)]
    first_waits = threading.Event()

    def f(x: Tensor, thread: int) -> Tensor:
        if thread != rank:
            first_waits.wait(60)
        y = nn.functional.batch_norm(x.sin(), torch.zeros(64), torch.ones(64), training=True)
        y = torch.ops._c10d_functional.all_reduce(y, "sum", groups[thread].group_name)
        if thread == rank:
            threading.Timer(0.5, first_waits.set).start()
        distributed.monitored_barrier(groups[thread])
        return torch.ops._c10d_functional.wait_tensor(y)

    def run(thread: int) -> None:
        ended.append(rematfn.remat(f, "10MiB")(x, thread))

    threads = [threading.Thread(target=run, args=(k,), daemon=True) for k in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(ended) == 2, "a deadlock"


def one_fails() -> None:
    before = remains()
    model = DistributedDataParallel(network())
    last = distributed.get_rank() == 1

    def step(x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        if last:
            raise ValueError("this rank fails")
        loss.backward()
        return loss.detach()

    # The other one is told when the group is gone.
    with pytest.raises(ValueError if last else RuntimeError):
        EVERYTHING(step)(batch(0))
    assert_nothing_left(before)


def freed() -> None:
    """What a unit stores away beside its result is replayed from parameters that are not there."""
    before = remains()
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    aside: list[Tensor] = []

    class Storing(Block):
        def forward(self, x: Tensor) -> Tensor:
            aside.append(self.up(x))
            return super().forward(x)

    def loss_of(transform: Transform, **options: Any) -> Tensor:
        torch.manual_seed(0)
        model = nn.Sequential(Storing(), *(Block() for _ in range(BLOCKS - 1)))
        for block in model:
            fully_shard(block, mesh=mesh, **options)
        fully_shard(model, mesh=mesh, **options)

        def f(x: Tensor) -> Tensor:
            y: Tensor = model(x).square().mean() + aside.pop().sin().mean()
            return y

        y = transform(f)(batch(0))
        y.backward()
        return y.detach()

    error = r"was resized .* reshard_after_forward=False"
    with pytest.raises(rematfn.ReplayError, match=error):
        loss_of(EVERYTHING)
    assert_nothing_left(before)
    kept = {"reshard_after_forward": False}
    assert_bitwise_equal(loss_of(EVERYTHING, **kept), loss_of(untransformed, **kept))


def all_of_it() -> None:
    for work in (programs, freed_or_refused, one_evicts, threads_wait_for_ranks, one_fails):
        work()


# One test, so that what it takes to begin is not done for each.
def test_in_two_processes(tmp_path: Path) -> None:
    in_ranks(all_of_it, tmp_path)
