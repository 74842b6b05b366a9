# SPDX-License-Identifier: Apache-2.0
"""Measuring on shapes alone: even a first call keeps to its fraction."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import assert_bitwise_equal
from programs_traced import waves
from torch import Tensor, nn

import rematfn
from rematfn.policies import Guided
from rematfn.testing import MemoryTimeline

AT_ONCE = Guided(search=0)
X = torch.linspace(-1, 1, 4096)


class Loss(nn.Module):
    """A network and the mean of its squares."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, *args: Tensor) -> Tensor:
        return self.net(*args).square().mean()


class Cells(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(16, 32)

    def forward(self, sequence: Tensor) -> Tensor:
        h = c = sequence.new_zeros(sequence.shape[0], 32)
        for x in sequence.unbind(1):
            h, c = self.cell(x, (h, c))
        return h


def transformer() -> tuple[nn.Module, Tensor]:
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True, dropout=0.1)
    return nn.TransformerEncoder(layer, 3), torch.randn(4, 32, 64)


def residual() -> tuple[nn.Module, Tensor]:
    def block() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True)
        )

    blocks = [block() for _ in range(5)]
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), *blocks, nn.Flatten()), torch.randn(
        4, 3, 16, 16
    )


NETWORKS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "transformer": transformer,
    "residual": residual,
    "lstm-cells": lambda: (Cells(), torch.randn(4, 20, 16)),
}


def step(g: Any, x: Tensor) -> list[Tensor | None]:
    g.zero_grad()
    torch.manual_seed(3)
    g(x).backward()
    return [p.grad for p in g.parameters()]


@pytest.mark.parametrize("network", NETWORKS)
def test_a_first_call_that_was_warmed_up_is_capped(network: str) -> None:
    torch.manual_seed(0)
    net, x = NETWORKS[network]()
    loss = Loss(net)
    state = {n: b.clone() for n, b in loss.named_buffers()}
    expected = [None if t is None else t.clone() for t in step(loss, x)]
    for n, b in loss.named_buffers():
        b.data.copy_(state[n])
    loss.zero_grad()
    g = rematfn.remat(loss, 0.6, policy=AT_ONCE)
    rematfn.warmup(g, x)
    with MemoryTimeline() as timeline:
        found = step(g, x)
    assert_bitwise_equal(found, expected)
    assert rematfn.stats(g).call == "guided"
    assert rematfn.stats(g).why.endswith("its peak was measured on shapes alone")
    assert rematfn.stats(g).evictions > 0
    assert timeline.peak_excluding_survivors <= rematfn.stats(g).budget
    assert rematfn.stats(g).budget <= 0.61 * rematfn.stats(g).unconstrained_bytes
    step(g, x)
    assert rematfn.stats(g).call == "guided"


@pytest.mark.parametrize("network", NETWORKS)
def test_the_operators_on_shapes_are_those_of_the_call(network: str) -> None:
    """But that gradients of a storage's only holder are added up in place."""
    torch.manual_seed(0)
    net, x = NETWORKS[network]()
    names = list(dict(net.named_parameters()))

    def loss(x: Tensor, *parameters: Tensor) -> Tensor:
        given = dict(zip(names, parameters, strict=True))
        return torch.func.functional_call(net, given, (x,)).square().mean()

    def gradients(x: Tensor, *parameters: Tensor) -> Any:
        inside = [p.detach().requires_grad_() for p in parameters]
        return torch.autograd.grad(loss(x, *inside), inside)

    given = [p.detach() for p in net.parameters()]
    real = rematfn.record(gradients, x, *given)
    shapes = rematfn.warmup(rematfn.remat(gradients), x, *given)
    theirs, ours = calls_in(real), calls_in(shapes)
    assert [name.removesuffix("_") for name, *_ in ours] == [
        name.removesuffix("_") for name, *_ in theirs
    ]
    assert shapes.flops == pytest.approx(real.flops)
    assert shapes.cost == pytest.approx(real.cost, rel=0.02)


def calls_in(trace: rematfn.Trace) -> list[Any]:
    return [call for kind, call in trace._core.events() if kind == "call"]


def test_a_first_call_that_was_warmed_up_has_a_plan() -> None:
    """`grad` keeps all that a second derivative would need: next uses tell that none is taken."""
    torch.manual_seed(0)
    x, v = torch.randn(2, 64, 64)

    def product(x: Tensor, v: Tensor) -> Tensor:
        return torch.func.jvp(torch.func.grad(waves), (x,), (v,))[1]

    expected = product(x, v)
    free = rematfn.remat(product, 2**40)
    free(x, v)
    replayed = []
    for is_warm in (False, True):
        g = rematfn.remat(product, int(0.4 * rematfn.stats(free).peak_bytes), policy=AT_ONCE)
        if is_warm:
            rematfn.warmup(g, x, v)
        assert_bitwise_equal(g(x, v), expected)
        replayed.append(rematfn.stats(g).replayed_cost)
        g(x, v)
        assert rematfn.stats(g).why != "no record is at hand", "the first call was written down"
    assert replayed[1] < 0.5 * replayed[0]


def test_what_was_warmed_up_guides_first_calls_of_other_sizes() -> None:
    torch.manual_seed(0)
    net, x = transformer()
    loss = Loss(net)
    g = rematfn.remat(loss, 0.6, policy=AT_ONCE)
    rematfn.warmup(g, x)
    longer = torch.cat([x, x], dim=1)
    expected = [None if t is None else t.clone() for t in step(loss, longer)]
    loss.zero_grad()
    assert_bitwise_equal(step(g, longer), expected)
    assert rematfn.stats(g).call == "guided"


def test_warming_up_leaves_no_trace_in_the_program() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(), nn.Flatten())
    x = torch.randn(8, 3, 32, 32, requires_grad=True)
    loss = Loss(net)
    before = {n: t.clone() for n, t in loss.state_dict().items()}
    random = torch.get_rng_state()
    with MemoryTimeline() as timeline:
        rematfn.warmup(rematfn.remat(loss, 0.5), x)
    assert_bitwise_equal(dict(loss.state_dict()), before)
    assert torch.equal(torch.get_rng_state(), random)
    assert all(p.grad is None and p.grad_fn is None for p in [x, *loss.parameters()])
    assert not any(p._backward_hooks for p in loss.parameters())
    assert timeline.peak < 8192 < x.nbytes, "nothing was computed; the generator was saved"


class Masked(nn.Module):
    """Makes its mask in its first call."""

    mask: torch.Tensor | None = None

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.mask is None:
            self.mask = torch.ones(8, 8).tril()
        return (x @ (self.weight * self.mask)).tanh()


@pytest.mark.parametrize("make_optimizer", [
    None,
    lambda params: torch.optim.SGD(params, 0.1, momentum=0.9),
    lambda params: torch.optim.Adam(params, fused=True),
    torch.optim.Adam,  # asks for the contents of its counter
], ids=["none", "momentum", "fused", "asks"])  # fmt: skip
def test_a_step_is_warmed_up_and_finds_its_state_as_it_was(make_optimizer: Any) -> None:
    def train(warms_up: bool) -> list[Any]:
        torch.manual_seed(0)
        net = Masked()
        optimizer = make_optimizer(net.parameters()) if make_optimizer else None

        def step(x: torch.Tensor) -> torch.Tensor:  # gradients add up
            loss = net(x).square().mean()
            loss.backward()
            if optimizer is not None:
                optimizer.step()
            return loss  # whose graph is freed

        g = rematfn.remat(step, 0.9)
        found: list[Any] = []
        for x in torch.randn(3, 4, 8):
            if warms_up and make_optimizer is torch.optim.Adam:
                with pytest.raises(RuntimeError, match="contents of a tensor"):
                    rematfn.warmup(g, x)
            elif warms_up:
                rematfn.warmup(g, x)
            found += [g(x), net.weight.clone(), net.weight.grad.clone()]
        return found

    assert_bitwise_equal(train(warms_up=True), train(warms_up=False))


def test_a_graph_that_was_used_and_kept_is_run_backward_again() -> None:
    def loss(x: torch.Tensor) -> torch.Tensor:
        y = x.sin().cos().sum()
        (g,) = torch.autograd.grad(y, x, create_graph=True)
        return y + g.square().sum()

    x = torch.randn(1024, requires_grad=True)
    trace = rematfn.warmup(rematfn.remat(loss, 0.9), x)
    assert abs(trace.peak_bytes - rematfn.record(lambda: loss(x).backward()).peak_bytes) <= 4096


def test_what_shapes_cannot_tell_is_said() -> None:
    g = rematfn.remat(lambda x: x * (1 if x.sum().item() > 0 else 2), 0.5)
    with pytest.raises(RuntimeError, match="contents of a tensor"):
        rematfn.warmup(g, X)
    assert_bitwise_equal(g(X), X * 2 if X.sum() <= 0 else X)


def test_a_lazy_module_is_not_warmed_up() -> None:
    net = torch.nn.Sequential(torch.nn.LazyLinear(3))
    with pytest.raises(RuntimeError, match=r"LazyLinear is lazy: `weight` has no\s+shape yet"):
        rematfn.warmup(rematfn.remat(net, 0.9), torch.ones(2, 5))
    net(torch.ones(2, 5))
    rematfn.warmup(rematfn.remat(net, 0.9), torch.ones(2, 5))
