# SPDX-License-Identifier: Apache-2.0
"""The zoo: small deterministic programs on which `remat(f)` must equal `f`, bit for bit.

A bug becomes a new animal. `make()` builds everything anew from a fixed seed, so that the
untransformed and the transformed program start from equal, but not shared, tensors.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn


@dataclass
class Case:
    """One program with its arguments, and the tensors and generators it closes over."""

    f: Callable[..., Any]
    args: tuple[Any, ...]
    held: list[Tensor] = field(default_factory=list)
    generators: list[torch.Generator] = field(default_factory=list)

    def __post_init__(self) -> None:
        if isinstance(self.f, nn.Module):
            self.held = [*self.f.parameters(), *self.f.buffers(), *self.held]

    def leaves(self) -> list[Tensor]:
        """Return every tensor that gradients can be asked for."""
        tensors = [t for t in (*self.args, *self.held) if isinstance(t, Tensor)]
        return [t for t in tensors if t.requires_grad]


@dataclass(frozen=True)
class Program:
    """A named case maker, with what torch can do with it."""

    name: str
    build: Callable[[], Case]
    differentiable: bool = True
    not_twice: str = ""  # why torch has no second derivative of it; empty when it has one

    def make(self) -> Case:
        torch.manual_seed(20)
        return self.build()


ZOO: list[Program] = []


def animal(name: str, **flags: Any) -> Callable[[Callable[[], Case]], Callable[[], Case]]:
    """Add a case maker to the zoo."""

    def add(build: Callable[[], Case]) -> Callable[[], Case]:
        ZOO.append(Program(name, build, **flags))
        return build

    return add


def leaf(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, dtype=dtype).requires_grad_()


# --- networks ---------------------------------------------------------------------------------


@animal("mlp")
def mlp() -> Case:
    layers = [layer for _ in range(4) for layer in (nn.Linear(16, 16), nn.Tanh())]
    return Case(nn.Sequential(*layers, nn.Linear(16, 3)), (leaf(8, 16),))


class Block(nn.Module):
    """A pre-LN transformer block with dropout on the attention and on both branches."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        split = (batch, length, self.heads, width // self.heads)
        q, k, v = (t.view(split).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1))
        scores = (q @ k.transpose(-1, -2)) / (width // self.heads) ** 0.5
        mask = torch.ones(length, length, dtype=torch.bool, device=x.device).tril()
        weights = self.drop(scores.masked_fill(~mask, float("-inf")).softmax(-1))
        x = x + self.drop(self.out((weights @ v).transpose(1, 2).reshape(x.shape)))
        return x + self.drop(self.down(nn.functional.gelu(self.up(self.norm2(x)))))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(11, 8), nn.Embedding(5, 8)
        self.block = Block(8, 2)
        self.head = nn.Linear(8, 11)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(tokens) + self.place(torch.arange(tokens.shape[1], device=tokens.device))
        logits = self.head(self.block(x))
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


@animal("transformer-dropout")
def transformer() -> Case:
    tokens = torch.randint(0, 11, (2, 6))
    return Case(Transformer(), (tokens[:, :-1], tokens[:, 1:]))


@animal("attention-fused", not_twice="the CPU flash attention backward is not differentiable")
def attention_fused() -> Case:
    attend = nn.functional.scaled_dot_product_attention
    qkv = tuple(leaf(2, 2, 6, 8) for _ in range(3))
    return Case(lambda q, k, v: attend(q.sin(), k * 2, v.cos(), is_causal=True).tanh(), qkv)


@animal("cnn-batchnorm")
def cnn() -> Case:
    net = nn.Sequential(
        *(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True)),
        *(nn.MaxPool2d(2), nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6, momentum=None), nn.GELU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 3)),
    )
    return Case(net.train(), (leaf(4, 3, 8, 8),))


class UNet(nn.Module):
    """Two levels down and up; the skips are read long after they were made."""

    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2 = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 6, 3, padding=1)
        self.middle = nn.Conv2d(6, 6, 3, padding=1)
        self.up2 = nn.ConvTranspose2d(6, 6, 2, stride=2)
        self.up1 = nn.ConvTranspose2d(12, 4, 2, stride=2)
        self.last = nn.Conv2d(8, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        skip1 = self.down1(x).relu()
        skip2 = self.down2(nn.functional.max_pool2d(skip1, 2)).relu_()
        x = self.middle(nn.functional.avg_pool2d(skip2, 2)).tanh()
        x = torch.cat([skip2, self.up2(x)], 1)
        return self.last(torch.cat([skip1, self.up1(x)], 1)).sigmoid()


@animal("u-net")
def u_net() -> Case:
    return Case(UNet(), (leaf(2, 2, 8, 8),))


@animal("lstm")
def lstm() -> Case:
    return Case(nn.LSTM(5, 6, num_layers=2, batch_first=True), (leaf(2, 4, 5),))


@animal("lstm-cells")
def lstm_cells() -> Case:
    cell = nn.LSTMCell(5, 6)

    def f(sequence: Tensor) -> tuple[Tensor, Tensor]:
        h = c = sequence.new_zeros(sequence.shape[0], 6)
        for x in sequence.unbind(1):
            h, c = cell(x, (h, c))
        return h, c

    return Case(f, (leaf(2, 5, 5),), list(cell.parameters()))


# --- programs that differentiate within, or decide on data -------------------------------------


@animal("maml")
def maml() -> Case:
    """An unrolled inner loop of SGD: the step itself is a gradient, and is differentiated."""

    def f(w: Tensor, rate: Tensor, x: Tensor) -> Tensor:
        fast = w
        for _ in range(3):
            inner = (torch.tanh(x @ fast) - x).square().mean()
            (g,) = torch.autograd.grad(inner, fast, create_graph=True)
            fast = fast - rate * g
        return (torch.tanh(x @ fast) - x).square().mean()

    return Case(f, (leaf(6, 6), torch.tensor(0.3, requires_grad=True), torch.randn(4, 6)))


@animal("gradient-penalty")
def gradient_penalty() -> Case:
    net = nn.Sequential(nn.Linear(5, 7), nn.Softplus(), nn.Linear(7, 1))

    def f(x: Tensor) -> Tensor:
        y = net(x).sum()
        (g,) = torch.autograd.grad(y, x, create_graph=True)
        return y + (g.norm(dim=1) - 1).square().mean()

    return Case(f, (leaf(4, 5),), list(net.parameters()))


@animal("func-grad-inside")
def func_grad_inside() -> Case:
    w = leaf(4, 4)

    def f(x: Tensor) -> Tensor:
        inner = torch.func.grad(lambda y: (y @ w).sin().prod(-1).sum())
        return torch.func.vmap(inner)(x).cos() * x

    return Case(f, (leaf(3, 4),), [w])


@animal("data-dependent")
def data_dependent() -> Case:
    """`item`, `nonzero`, masks and a loop whose length the data decides."""

    def f(x: Tensor) -> Tensor:
        y, steps = x.sin(), 0
        while y.norm().item() > 0.5 and steps < 6:
            y = y * (0.6 if y.sum() > 0 else 0.7)
            steps += 1
        picked = y[y > 0] if bool((y > 0).any()) else y.flatten()
        rows = (y.abs() > 0.01).nonzero()[:, 0]
        return picked.square().sum() * steps + y.index_select(0, rows).exp().sum()

    return Case(f, (leaf(5, 4),))


@animal("shared-subexpressions")
def shared() -> Case:
    def f(x: Tensor) -> Tensor:
        y = x.sin()
        for _ in range(5):
            y = y * y.cos() + y
        return y + y.t() @ y

    return Case(f, (leaf(4, 4),))
