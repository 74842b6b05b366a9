# SPDX-License-Identifier: Apache-2.0
"""Collectives, and the wrappers that replicate a module, in a single process."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from helpers import assert_bitwise_equal
from torch import Tensor, distributed, nn
from torch.distributed import _functional_collectives as collectives

import rematfn


@pytest.fixture
def _alone(tmp_path: Any) -> Iterator[None]:
    distributed.init_process_group("gloo", f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.usefixtures("_alone")
def test_what_a_collective_gave_moves_once_it_has_been_waited_for() -> None:
    """It is never replayed, so that a budget without a tier does not hold it."""
    nbytes = 1 << 16

    def f(x: Tensor) -> Tensor:
        kept = []
        for _ in range(4):
            y = collectives.all_reduce(x.sin(), "sum", distributed.group.WORLD)
            kept.append(collectives.wait_tensor(y))
            x = kept[-1] * 1.1
        return torch.stack([y.sum() for y in kept])

    x = torch.linspace(0, 1, nbytes // 4)
    with pytest.raises(rematfn.BudgetError, match="not replayable"):
        rematfn.remat(f, budget=4 * nbytes)(x)
    g = rematfn.offload(f, budget=4 * nbytes)
    for _ in range(3):
        assert_bitwise_equal(g(x), f(x))
        assert rematfn.stats(g).moves > 0
        assert rematfn.stats(g).replays == 0


@pytest.mark.usefixtures("_alone")
@pytest.mark.parametrize("policy", [None, rematfn.testing.EvictEverything()])
@pytest.mark.parametrize("functional", [True, False])
def test_what_a_collective_is_at_work_on_does_not_move(functional: bool, policy: Any) -> None:
    """Its thread reads and writes by address until somebody waits for it."""
    nbytes = 1 << 21
    moved: list[int] = []

    def others(x: Tensor) -> Tensor:
        before = rematfn.stats(g).moved_bytes if called else 0
        made = [x[: nbytes // 128].sin()]
        for _ in range(6):
            made.append(made[-1].sin())
        if called:
            moved.append(rematfn.stats(g).moved_bytes - before)
        return torch.stack(made).sum()

    def f(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x.sin()
        if functional:
            y = collectives.all_reduce(y, "sum", distributed.group.WORLD)
            z = others(x)
            return collectives.wait_tensor(y), z
        work = distributed.all_reduce(y, async_op=True)
        z = others(x)
        work.wait()
        return y, z

    x = torch.linspace(0, 1, nbytes // 4)
    g = rematfn.offload(f) if policy is None else rematfn.offload(f, policy=policy)
    called = False
    expected = f(x)
    called = True
    for _ in range(2):
        assert_bitwise_equal(g(x), expected)
    assert moved[0] > 0
    assert all(m < nbytes for m in moved)


def test_a_replica_of_data_parallel_is_refused() -> None:
    """It has tensors of its own, and would run those of the module that it was made of."""
    with pytest.raises(TypeError, match="DistributedDataParallel"):
        rematfn.remat(nn.Linear(4, 4), "1MiB")._replicate_for_data_parallel()
    own = rematfn.remat(nn.Linear(4, 4), "1MiB")
    own.__dict__ = dict(own.__dict__)
    with pytest.raises(TypeError, match=r"a `__dict__` of its own"):
        own(torch.ones(2, 4))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.usefixtures("_alone")
def test_compiled_blocks_inside_of_a_wrapper() -> None:
    """Dynamo compiles them for a backend of the wrapper's, which cuts graphs up for ours."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layers = [nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4)]
            self.layers = nn.ModuleList(layers)

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = torch.compile(layer, backend="rematfn", options={"inner": "aot_eager"})(x)
            return x

    def gradients(transform: Any) -> list[Tensor | None]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        net = nn.parallel.DistributedDataParallel(Net())
        transform(net)(torch.linspace(0, 1, 512 * 64).view(512, 64)).sum().backward()
        return [p.grad for p in net.parameters()]

    expected = gradients(lambda f: f)
    for policy in (rematfn.policies.Guided(), rematfn.testing.EvictEverything()):
        found = gradients(lambda f, policy=policy: rematfn.remat(f, "16MiB", policy=policy))
        assert_bitwise_equal(found, expected)
    torch._dynamo.reset()
