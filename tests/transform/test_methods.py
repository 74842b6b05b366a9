# SPDX-License-Identifier: Apache-2.0
"""Methods of a module by name, and results that compute later."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import assert_bitwise_equal, assert_nothing_keyed
from torch import Tensor, nn
from torch.distributions import Normal, TransformedDistribution
from torch.distributions.transforms import AffineTransform

import rematfn

WIDTH, ROWS = 64, 256
UNIT = 4 * WIDTH * ROWS


class Density:
    """What a flow returns: nothing has been computed yet."""

    def __init__(self, meta: Callable[[Tensor], Tensor]) -> None:
        self.meta = meta

    def log_prob(self, x: Tensor) -> Tensor:
        return -self.meta(x).square().sum(-1)


class Flow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = [m for _ in range(6) for m in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
        self.net = nn.Sequential(*layers)
        self.calls = 0

    def shifted(self, c: Tensor, x: Tensor) -> Tensor:
        return self.net(x + c)

    def forward(self, c: Tensor) -> Density:
        return Density(functools.partial(self.shifted, c))

    def log_prob(self, c: Tensor, x: Tensor) -> Tensor:
        self.calls += 1
        return self(c).log_prob(x)

    def sample(self, c: Tensor, *, scale: float = 1.0) -> Tensor:
        return self.net(c + scale * torch.randn(ROWS, WIDTH))

    def batches(self, c: Tensor) -> Any:
        yield self.net(c)


def inputs() -> tuple[Tensor, Tensor]:
    c = torch.linspace(-1, 1, WIDTH, requires_grad=True)
    return c, torch.linspace(-2, 2, ROWS * WIDTH).view(ROWS, WIDTH)


# --- methods by name ------------------------------------------------------------------------------
TIGHT = 7 * UNIT
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tight": {"budget": TIGHT},
    "everything": {"policy": rematfn.testing.EvictEverything(), "verify": True},
}


def trained(log_prob: Callable[[Tensor, Tensor], Tensor], flow: Flow) -> Any:
    c, x = inputs()
    losses = []
    for _ in range(2):
        losses.append(log_prob(c, x).mean())
        losses[-1].backward()
    return losses, c.grad, [p.grad for p in flow.parameters()], flow.calls


@pytest.mark.parametrize("way", WAYS)
def test_methods_compute_what_they_compute(way: str) -> None:
    flow, other = Flow(), Flow()
    g = rematfn.remat(flow, methods=["log_prob"], **WAYS[way])
    found = trained(g.log_prob, flow)
    assert_nothing_keyed(found)
    assert_bitwise_equal(found, trained(other.log_prob, other))


WRONG = {
    "unknown": (["log_probs"], ValueError, "it has no such method. What can be named: forward,"),
    "of every module": (["state_dict"], ValueError, "every nn.Module has that"),
    "a submodule": (["net"], TypeError, "that is a submodule"),
    "a number": (["calls"], ValueError, "it has no such method"),
    "a generator": (["batches"], TypeError, "is a generator function"),
    "a string": ("log_prob", TypeError, "a list of names"),
    "nothing": ([], TypeError, "a list of names"),
    "no names": ([len], TypeError, "a list of names"),
}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("transform", [rematfn.remat, rematfn.offload])
def test_what_cannot_be_named_is_refused(name: str, transform: Any) -> None:
    methods, kind, message = WRONG[name]
    with pytest.raises(kind, match=message) as caught:
        transform(Flow(), "1MiB", methods=methods)
    assert str(caught.value).startswith(f"{transform.__name__}(")


# --- results that compute later -------------------------------------------------------------------


def warned(g: Callable[..., Any], *args: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            g(*args)
    found = [w for w in caught if w.category is rematfn.errors.DeferredWarning]
    assert {w.filename for w in found} <= {__file__, nn.modules.module.__file__}
    return [str(w.message) for w in found]


class Slotted:
    __slots__ = ("net",)

    def __init__(self, net: nn.Module) -> None:
        self.net = net


@dataclasses.dataclass
class Lazy:
    parts: dict[str, Any]


class Composed(AffineTransform):
    def __init__(self, net: nn.Module) -> None:
        super().__init__(0.0, 1.0)
        self.net = net


def closing_over(c: Tensor) -> Any:
    net = FLOW.net
    return lambda x: net(x + c)


FLOW = Flow()
LATER: dict[str, Callable[[Tensor], Any]] = {
    "closure": closing_over,
    "bound method": lambda c: FLOW.log_prob,
    "partial": lambda c: functools.partial(FLOW.net, c),
    "object": lambda c: Density(FLOW.net),
    "in containers": lambda c: (c.sin(), {"density": [Density(FLOW.net)]}),
    "slots": lambda c: Slotted(FLOW.net),
    "dataclass": lambda c: Lazy({"net": FLOW.net}),
    "distribution": lambda c: TransformedDistribution(
        Normal(c.sin(), c.exp()), [Composed(FLOW.net)]
    ),
    "no operator": lambda c: object(),
    "nothing": lambda c: None,
}


@pytest.mark.parametrize("kind", LATER)
def test_a_result_that_computes_later_is_told_once(kind: str) -> None:
    c, _ = inputs()
    (message,) = warned(rematfn.remat(LATER[kind], "1MiB"), c.detach())
    assert message.startswith("remat(")
    assert "log_prob(x), budget)" in message
    expected = "has run no operator" if kind in ("no operator", "nothing") else "outside of the bud"
    assert expected in message
    assert warned(rematfn.remat(LATER[kind]), c.detach()) == [], "there is no budget"
    assert len(warned(rematfn.offload(LATER[kind]), c.detach())) == 1
