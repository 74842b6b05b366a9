# SPDX-License-Identifier: Apache-2.0
"""An `nn.Module` under `remat` is the same module, whose forward runs in a level."""

import copy
import gc
import pickle
import weakref
from typing import Any

import pytest
import torch
from helpers import Transform, assert_bitwise_equal, same_as_eager
from torch import Tensor, nn

import rematfn
from rematfn import _C

remat = rematfn.remat


def test_a_module_becomes_a_module_of_the_same_parameters() -> None:
    net = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Dropout(0.3))
    g = remat(net, budget="1MiB")
    assert isinstance(g, nn.Module)
    assert isinstance(g, nn.Sequential)
    assert list(g.state_dict()) == list(net.state_dict())
    assert [id(p) for p in g.parameters()] == [id(p) for p in net.parameters()]
    assert [id(b) for b in g.buffers()] == [id(b) for b in net.buffers()]
    assert dict(g.named_modules()).keys() == dict(net.named_modules()).keys()
    assert g[0] is net[0]
    assert len(g) == 3
    g.eval()
    assert not net.training
    assert not net[2].training
    net.train()
    assert g.training
    g.load_state_dict({k: v * 0 + 2 for k, v in net.state_dict().items()})
    assert net[0].weight.unique().tolist() == [2.0]


@same_as_eager
def test_a_module_runs_and_trains_like_the_one_it_was_made_of(transform: Transform) -> Any:
    torch.manual_seed(3)
    block = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Dropout(0.3), nn.Linear(5, 4))
    calls: list[int] = []
    block.register_forward_hook(lambda module, args, out: calls.append(1))
    net = nn.Sequential(nn.Linear(3, 4), transform(block), nn.Linear(4, 1))
    sgd = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for _ in range(3):
        sgd.zero_grad()
        loss = net(torch.randn(8, 3)).square().mean()
        loss.backward()
        sgd.step()
        losses.append(loss.detach())
    swapped = {k: v * 0.5 for k, v in block.state_dict().items()}
    called = torch.func.functional_call(transform(block), swapped, (torch.randn(8, 4),))
    return losses, net.state_dict(), called.detach(), len(calls)


def test_a_transformed_module_can_be_copied_and_saved() -> None:
    net = remat(nn.Linear(4, 4), budget=1024)
    twin = copy.deepcopy(net)
    assert twin.weight is not net.weight
    x = torch.randn(2, 4)
    assert_bitwise_equal(twin(x), net(x))
    restored = pickle.loads(pickle.dumps(net.state_dict()))
    assert_bitwise_equal(restored, net.state_dict())


# --- See Note [What the module would run] ---------------------------------------------------------


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))


LAYERS = 3  # operators in a forward of it
BATCH = torch.linspace(-1, 1, 8).view(2, 4)


def operators(net: Any) -> int | None:
    net(BATCH)
    return rematfn.stats(net).operators


def waving(forward: Any) -> Any:
    return lambda x: forward(x).sin()


@pytest.mark.parametrize("on_twin", [False, True])
def test_a_forward_set_afterwards_put_back_and_deleted(on_twin: bool) -> None:
    net = network()
    g = remat(net, "1MiB")
    assert operators(g) == LAYERS
    expected = net(BATCH).sin().detach()
    patched = g if on_twin else net
    before = patched.forward
    patched.forward = waving(before)
    assert operators(g) == LAYERS + 1
    assert_bitwise_equal(g(BATCH).detach(), expected)
    assert_bitwise_equal(net(BATCH).detach(), expected)
    patched.forward = before
    assert operators(g) == LAYERS
    assert rematfn.stats(g.forward) == rematfn.stats(g)
    del patched.forward
    assert operators(g) == LAYERS
    with pytest.raises(AttributeError):
        del patched.forward


# --- what tells modules by their class ------------------------------------------------------------


@pytest.mark.parametrize("called", [False, True])
def test_a_twin_frees_its_parameters_at_once(called: bool) -> None:
    """Nothing leads from them back to it, and its class has nothing of it."""
    gc.disable()
    try:
        net = nn.Linear(4, 4)
        g = remat(net, "1MiB")
        if called:
            g(BATCH).sum().backward()
        weight = weakref.ref(net.weight)
        kept = type(g)  # as fully_shard does
        del net, g
        assert weight() is None
        assert kept.forward is nn.Linear.forward
    finally:
        gc.enable()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = network()

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).sin()


@pytest.mark.filterwarnings("ignore")  # torch's compiler warns about torch
def test_compiled_modules_never_run_unseen() -> None:
    """Compiled as a whole it is refused; compiled around the twin, it enters the level."""
    torch._dynamo.reset()
    whole = Net()
    whole.compile(backend="eager")
    for net in (torch.compile(Net(), backend="eager"), whole):
        with pytest.raises(Exception, match=r"rematfn\.opaque\(torch\.compile"):
            remat(net, "1MiB")(BATCH)
        assert _C.stack_depth() == 0
    warm = torch.compile(Net(), backend="eager")
    warm(BATCH)
    with pytest.raises(Exception, match=r"rematfn\.opaque\(torch\.compile"):
        remat(warm, "1MiB")(BATCH)
    inside = remat(Net(), "1MiB")
    inside.compile(backend="eager")
    for net in (torch.compile(remat(Net(), "1MiB"), backend="eager"), inside):
        assert operators(net) == LAYERS + 1
    torch._dynamo.reset()
