# SPDX-License-Identifier: Apache-2.0
"""Networks that are small enough to be recorded, and simulated many times."""

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import rematfn
from rematfn import _C, Trace, keep

Build = Callable[[], tuple[Callable[..., Any], tuple[Any, ...]]]


def deep_mlp() -> tuple[Callable[..., Any], tuple[Any, ...]]:
    weights = [torch.randn(16, 16) / 4 for _ in range(12)]

    def loss(weights: list[Tensor], x: Tensor) -> Tensor:
        for w in weights:
            x = rematfn.keep(torch.relu(rematfn.keep(x @ w, "half")))
        return x.square().mean()

    return torch.func.grad(loss), (weights, torch.randn(32, 16))


def step_of(net: nn.Module, x: Tensor) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    def step(x: Tensor) -> Any:
        loss = net(x).square().mean()
        return torch.autograd.grad(loss, list(net.parameters()))

    return step, (x,)


def convolutions() -> tuple[Callable[..., Any], tuple[Any, ...]]:
    blocks: list[nn.Module] = []
    for _ in range(3):
        blocks += [nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True)]
    return step_of(nn.Sequential(*blocks, nn.Dropout(0.2)), torch.randn(4, 4, 8, 8))


def attention() -> tuple[Callable[..., Any], tuple[Any, ...]]:
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
    return step_of(nn.Sequential(layer, nn.LayerNorm(16)), torch.randn(2, 6, 16))


def unrolled() -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Gradients of gradients, and writes in place."""

    def outer(w: Tensor, x: Tensor) -> Tensor:
        def inner(w: Tensor, x: Tensor) -> Tensor:
            return (x @ w).tanh().square().sum()

        for _ in range(4):
            w = w - 0.1 * torch.func.grad(inner)(w, x)
            x = x.clone().mul_(0.9).add_(0.01)
        return (x @ w).square().sum()

    return torch.func.grad(outer), (torch.randn(8, 8), torch.randn(16, 8))


def waves(x: Tensor, steps: int = 12) -> Tensor:
    for _ in range(steps):
        x = (x.sin() * x).exp().tanh()
    return x.square().sum()


def forces() -> Callable[[Tensor], Any]:
    """A loss of gradients, whose backward needs the values of both passes before it.

    Near its floor a little memory more or less decides.
    """
    torch.manual_seed(0)
    sizes = [16, *[64] * 6, 1]
    layers = [m for a, b in itertools.pairwise(sizes) for m in (nn.Linear(a, b), nn.Tanh())]
    net = nn.Sequential(*layers[:-1])
    weights = [p for p in net.parameters() if p.dim() == 2]

    def step(x: Tensor) -> Any:
        x = x.detach().requires_grad_()
        (force,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)
        return torch.autograd.grad(force.square().mean(), weights)

    return step


NETWORKS: dict[str, Build] = {
    "mlp": deep_mlp,
    "convolutions": convolutions,
    "attention": attention,
    "unrolled": unrolled,
}


def build(name: str) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    torch.manual_seed(0)
    return NETWORKS[name]()


# --- blocks of equal sizes, with marks ------------------------------------------------------------

SIDE = 32
UNIT = 4 * SIDE * SIDE


def block(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    """As in a transformer: a product, a few cheap operators, a product."""
    h = keep(keep(x @ w, "up").tanh().sin().exp(), "act")
    return keep(h @ v, "down") + x


def weights(blocks: int = 6) -> list[Tensor]:
    torch.manual_seed(0)
    return [(torch.randn(SIDE, SIDE) / SIDE).requires_grad_() for _ in range(2 * blocks)]


def loss(ws: list[Tensor], x: Tensor) -> Tensor:
    for w, v in zip(ws[::2], ws[1::2], strict=True):
        x = block(x, w, v)
    return x.square().sum()


def step(ws: list[Tensor], x: Tensor) -> Any:
    return torch.autograd.grad(loss(ws, x), ws)


X = torch.linspace(-1, 1, SIDE * SIDE).view(SIDE, SIDE)


def rebuilt(
    trace: Trace, cost: Callable[[str, list[int]], float] | None = None, *, marks: bool = True
) -> Trace:
    """Return the same program, with a cost by name and results of each call, or without marks."""
    core = _C.Trace()
    for nbytes, counted in trace._core.values():
        core.add_value(nbytes, counted)
    for kind, data in trace._core.events():
        if kind == "call":
            name, known, *rest, makes = data
            made = [value for value, _ in makes]
            core.add_call(name, known if cost is None else cost(name, made), *rest, makes)
        elif kind != "mark":
            getattr(core, f"add_{kind}")(data)
        elif marks:
            core.add_mark(*data)
    return Trace(core)
