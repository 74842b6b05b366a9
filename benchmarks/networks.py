# SPDX-License-Identifier: Apache-2.0
"""The benchmark's programs: one step each of a network, at sizes for a small machine.

A network is a row of blocks, each from a tuple of tensors to the next, so that a peer that works
block by block can be put in; a program says where in the step a transform of functions goes.
Nothing here knows of rematfn.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rematfn.demo.chargpt import CharGPT, Sizes

State = tuple[Tensor, ...]
Runner = Callable[[Sequence[Callable[..., State]], State], State]
Transform = Callable[[Callable[..., Any]], Callable[..., Any]]
Step = Callable[[], Any]


def untransformed(f: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``f``."""
    return f


def in_order(blocks: Sequence[Callable[..., State]], state: State) -> State:
    """Run one block after the other."""
    for block in blocks:
        state = block(*state)
    return state


@dataclass
class Program:
    """A step, and where its transforms go.

    Attributes:
        make_step: Called with a transform and a runner of blocks; returns the step, a function
            without arguments that returns tensors in a pytree.
        buffers: What a step writes to: a batch norm's statistics.
    """

    make_step: Callable[[Transform, Runner], Step]
    buffers: list[Tensor] = field(default_factory=list)


@dataclass(frozen=True)
class Network:
    """A program by name, made anew from a fixed seed by each call of ``make``."""

    name: str
    about: str
    make: Callable[[], Program]


class Chain(nn.Module):
    """Blocks in a row, and a loss of what the last one returns."""

    def __init__(self, blocks: Iterable[nn.Module], loss: Callable[[Tensor, Tensor], Tensor]):
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self._loss = loss

    def forward(self, run: Runner, x: Tensor, y: Tensor) -> Tensor:
        """Return the loss of input ``x`` for target ``y``."""
        return self._loss(run(list(self.blocks), (x,))[0], y)


class Layers(nn.Sequential):
    """A block of one tensor."""

    def forward(self, x: Tensor) -> State:  # type: ignore[override]  # noqa: D102
        return (super().forward(x),)


# --- where the transform goes --------------------------------------------------------------------


def plain(chain: Chain, x: Tensor, y: Tensor) -> Program:
    """``torch.autograd.grad(transform(loss)(x, y), parameters)``."""
    parameters = list(chain.parameters())

    def make_step(transform: Transform, run: Runner) -> Step:
        loss_fn = transform(lambda x, y: chain(run, x, y))

        def step() -> Any:
            loss = loss_fn(x, y)
            gradients = torch.autograd.grad(loss, parameters)
            return loss.detach(), gradients

        return step

    return Program(make_step, list(chain.buffers()))


def functional(chain: Chain, x: Tensor, y: Tensor) -> Program:
    """``torch.func.grad_and_value(transform(loss))(parameters, x, y)``."""
    loss_of, parameters = _pure(chain)

    def make_step(transform: Transform, run: Runner) -> Step:
        gradient = torch.func.grad_and_value(transform(functools.partial(loss_of, run)))
        return lambda: gradient(parameters, x, y)

    return Program(make_step)


def per_sample(chain: Chain, x: Tensor, y: Tensor) -> Program:
    """``vmap(grad(transform(loss)), (None, 0, 0))(parameters, x, y)``."""
    loss_of, parameters = _pure(chain)

    def make_step(transform: Transform, run: Runner) -> Step:
        loss_fn = transform(lambda p, x, y: loss_of(run, p, x[None], y[None]))
        gradients = torch.func.vmap(torch.func.grad(loss_fn), (None, 0, 0))
        return lambda: gradients(parameters, x, y)

    return Program(make_step)


def hessian_vector_product(chain: Chain, x: Tensor, y: Tensor) -> Program:
    """``transform(lambda p, v: jvp(grad(loss), (p,), (v,))[1])(parameters, v)``."""
    loss_of, parameters = _pure(chain)
    direction = {name: torch.randn_like(p) for name, p in parameters.items()}

    def make_step(transform: Transform, run: Runner) -> Step:
        def product(parameters: dict[str, Tensor], direction: dict[str, Tensor]) -> Any:
            gradient = torch.func.grad(lambda p: loss_of(run, p, x, y))
            return torch.func.jvp(gradient, (parameters,), (direction,))[1]

        product_fn = transform(product)
        return lambda: product_fn(parameters, direction)

    return Program(make_step)


def jacobian(chain: Chain, x: Tensor, y: Tensor) -> Program:
    """``jacrev(transform(network))(parameters)``, for the mean output over the batch."""
    loss_of, parameters = _pure(chain)

    def make_step(transform: Transform, run: Runner) -> Step:
        network = transform(lambda p: loss_of(run, p, x, y))
        outputs_by_parameters = torch.func.jacrev(network)
        return lambda: outputs_by_parameters(parameters)

    return Program(make_step)


def inner_loop(chain: Chain, x: Tensor, y: Tensor, steps: int) -> Program:
    """``transform(grad(outer))(parameters)``, where ``outer`` takes ``steps`` gradient steps."""
    loss_of, parameters = _pure(chain)
    half = len(x) // 2

    def make_step(transform: Transform, run: Runner) -> Step:
        def outer(p: dict[str, Tensor]) -> Tensor:
            for _ in range(steps):
                gradient = torch.func.grad(lambda p: loss_of(run, p, x[:half], y[:half]))(p)
                p = {name: p[name] - 0.1 * gradient[name] for name in p}
            return loss_of(run, p, x[half:], y[half:])

        gradient = transform(torch.func.grad(outer))
        return lambda: gradient(parameters)

    return Program(make_step)


def _pure(chain: Chain) -> tuple[Callable[..., Tensor], dict[str, Tensor]]:
    def loss_of(run: Runner, parameters: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        loss: Tensor = torch.func.functional_call(chain, parameters, (run, x, y))
        return loss

    return loss_of, {name: p.detach() for name, p in chain.named_parameters()}


# --- networks ------------------------------------------------------------------------------------


def mlp(layers: int, width: int, batch: int) -> tuple[Chain, Tensor, Tensor]:
    """Linear and GELU, ``layers`` times."""
    blocks = [Layers(nn.Linear(width, width), nn.GELU()) for _ in range(layers)]
    return Chain(blocks, F.mse_loss), torch.randn(batch, width), torch.randn(batch, width)


def gpt(layers: int, width: int, heads: int, context: int, batch: int) -> Any:
    """The demo's GPT, with dropout."""
    vocabulary = 96
    model = CharGPT(Sizes(vocabulary, layers, width, heads, context))

    class Embed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.character, self.position = model.character, model.position
            self.dropout = model.dropout

        def forward(self, ids: Tensor) -> State:
            return (self.dropout(self.character(ids) + self.position.weight),)

    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    blocks = [Embed(), *(Layers(block) for block in model.blocks), Layers(model.norm, model.head)]
    tokens = torch.randint(vocabulary, (batch, context + 1))
    return Chain(blocks, loss), tokens[:, :-1], tokens[:, 1:]


class Residual(nn.Module):
    """Two convolutions with batch norms, added to the input."""

    def __init__(self, channels: int, outputs: int) -> None:
        super().__init__()
        stride = outputs // channels
        self.conv1 = nn.Conv2d(channels, outputs, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.short = nn.Conv2d(channels, outputs, 1, stride) if stride > 1 else nn.Identity()

    def forward(self, x: Tensor) -> State:
        """Return the sum."""
        h = F.relu(self.norm1(self.conv1(x)))
        return (F.relu(self.norm2(self.conv2(h)) + self.short(x)),)


class Pool(nn.Module):
    """The mean over space."""

    def forward(self, x: Tensor) -> Tensor:
        """Return (batch, channel)."""
        return x.mean((-2, -1))


def resnet(blocks: tuple[int, ...], channels: int, size: int, batch: int) -> Any:
    """A residual network for small images, with batch norms."""
    widths = [channels << stage for stage, n in enumerate(blocks) for _ in range(n)]
    rows = [
        Layers(nn.Conv2d(3, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels)),
        *(Residual(a, b) for a, b in zip([channels, *widths[:-1]], widths, strict=True)),
        Layers(Pool(), nn.Linear(widths[-1], 10)),
    ]
    return (
        Chain(rows, F.cross_entropy),
        torch.randn(batch, 3, size, size),
        torch.randint(10, (batch,)),
    )


def _double_conv(channels: int, outputs: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for inputs in (channels, outputs):
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)]
        layers += [nn.BatchNorm2d(outputs), nn.ReLU()]
    return nn.Sequential(*layers)


class Down(nn.Module):
    """Two convolutions, kept for the way up, and a pooled copy."""

    def __init__(self, channels: int, outputs: int) -> None:
        super().__init__()
        self.convs = _double_conv(channels, outputs)

    def forward(self, x: Tensor, *skips: Tensor) -> State:
        """Return the pooled image and the skips with one more."""
        skip = self.convs(x)
        return F.max_pool2d(skip, 2), *skips, skip


class Bottom(nn.Module):
    """Two convolutions at the lowest resolution."""

    def __init__(self, channels: int, outputs: int) -> None:
        super().__init__()
        self.convs = _double_conv(channels, outputs)

    def forward(self, x: Tensor, *skips: Tensor) -> State:
        """Return the new image and the skips."""
        return self.convs(x), *skips


class Up(nn.Module):
    """Upsample, join with the last skip, two convolutions."""

    def __init__(self, channels: int, outputs: int) -> None:
        super().__init__()
        self.up = nn.ConvTranspose2d(channels, outputs, 2, 2)
        self.convs = _double_conv(2 * outputs, outputs)

    def forward(self, x: Tensor, *skips: Tensor) -> State:
        """Return the larger image and the skips that are left."""
        return self.convs(torch.cat([self.up(x), skips[-1]], 1)), *skips[:-1]


def unet(depth: int, channels: int, size: int, batch: int) -> Any:
    """A U-Net with ``depth`` halvings and batch norms."""
    widths = [channels << i for i in range(depth + 1)]
    blocks: list[nn.Module] = [
        Down(a, b) for a, b in zip([3, *widths[:-2]], widths[:-1], strict=True)
    ]
    blocks += [Bottom(widths[-2], widths[-1])]
    blocks += [Up(a, b) for a, b in zip(widths[:0:-1], widths[-2::-1], strict=True)]
    blocks += [Layers(nn.Conv2d(channels, 2, 1))]
    x, y = torch.randn(batch, 3, size, size), torch.randint(2, (batch, size, size))
    return Chain(blocks, F.cross_entropy), x, y


class Begin(nn.Module):
    """The zeros that a recurrent network begins with."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.hidden = hidden

    def forward(self, x: Tensor) -> State:
        """Return the input (time, batch, channel), and h and c."""
        zeros = x.new_zeros(x.shape[1], self.hidden)
        return x, zeros, zeros


class CellAt(nn.Module):
    """One step of an LSTM, operator by operator."""

    def __init__(self, cell: nn.LSTMCell, time: int) -> None:
        super().__init__()
        self.cell, self.time = cell, time

    def forward(self, x: Tensor, h: Tensor, c: Tensor) -> State:
        """Return the input, and the next h and c."""
        return x, *self.cell(x[self.time], (h, c))


class ReadOut(nn.Linear):
    """A linear map of the last h."""

    def forward(self, x: Tensor, h: Tensor, c: Tensor) -> State:  # type: ignore[override]  # noqa: D102
        return (super().forward(h),)


def lstm(steps: int, hidden: int, batch: int) -> Any:
    """An LSTM written with cells, of which the last state is classified."""
    cell = nn.LSTMCell(hidden, hidden)
    blocks = [Begin(hidden), *(CellAt(cell, t) for t in range(steps)), ReadOut(hidden, 10)]
    x, y = torch.randn(steps, batch, hidden), torch.randint(10, (batch,))
    return Chain(blocks, F.cross_entropy), x, y


class Dense(nn.Module):
    """Batch norm, ReLU and convolution of all features so far, joined."""

    def __init__(self, channels: int, growth: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(channels)
        self.conv = nn.Conv2d(channels, growth, 3, padding=1, bias=False)

    def forward(self, *features: Tensor) -> State:
        """Return the features with one more."""
        return *features, self.conv(F.relu(self.norm(torch.cat(features, 1))))


class Transition(nn.Module):
    """Join the features, halve channels and resolution."""

    def __init__(self, channels: int, outputs: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(channels)
        self.conv = nn.Conv2d(channels, outputs, 1, bias=False)

    def forward(self, *features: Tensor) -> State:
        """Return one image."""
        return (F.avg_pool2d(self.conv(F.relu(self.norm(torch.cat(features, 1)))), 2),)


def densenet(layers: int, growth: int, size: int, batch: int) -> Any:
    """Three dense blocks, each followed by a transition."""
    channels = 2 * growth
    blocks: list[nn.Module] = [Layers(nn.Conv2d(3, channels, 3, padding=1, bias=False))]
    for _ in range(3):
        blocks += [Dense(channels + i * growth, growth) for i in range(layers)]
        blocks += [Transition(channels + layers * growth, channels := channels + growth)]
    blocks += [Layers(Pool(), nn.Linear(channels, 10))]
    x, y = torch.randn(batch, 3, size, size), torch.randint(10, (batch,))
    return Chain(blocks, F.cross_entropy), x, y


def cnn(
    layers: int, channels: int, size: int, batch: int, classes: int = 10, loss: Any = None
) -> Any:
    """Convolutions and tanh, without batch norms: samples stay apart, derivatives are smooth."""
    blocks = [Layers(nn.Conv2d(3, channels, 3, padding=1), nn.Tanh())]
    blocks += [
        Layers(nn.Conv2d(channels, channels, 3, padding=1), nn.Tanh()) for _ in range(layers - 1)
    ]
    blocks += [Layers(Pool(), nn.Linear(channels, classes))]
    x, y = torch.randn(batch, 3, size, size), torch.randint(classes, (batch,))
    return Chain(blocks, loss or F.cross_entropy), x, y


def _mean_output(outputs: Tensor, _: Tensor) -> Tensor:
    return outputs.mean(0)


def _network(
    name: str, about: str, form: Callable[..., Program], model: Callable[[], Any], **sizes: int
) -> Network:
    """Return the network whose ``form`` (where the transform goes) is read off its docstring."""

    def make() -> Program:
        torch.manual_seed(0)
        return form(*model(), **sizes)

    expression = (form.__doc__ or "").rstrip(".").replace("``", "`")
    return Network(name, f"{about}; {expression}", make)


NETWORKS: dict[str, Network] = {
    n.name: n
    for n in [
        _network("mlp", "MLP, 48 layers", plain, lambda: mlp(48, 256, 1024)),
        _network("gpt", "GPT, 12 layers, dropout", plain, lambda: gpt(12, 128, 4, 128, 8)),
        _network("gpt-func", "the same GPT", functional, lambda: gpt(12, 128, 4, 128, 8)),
        _network(
            "resnet", "ResNet, 20 blocks, batch norm", plain, lambda: resnet((7, 7, 6), 16, 32, 16)
        ),
        _network("unet", "U-Net, 4 halvings, batch norm", plain, lambda: unet(4, 16, 128, 4)),
        _network("lstm", "LSTM, 128 steps of a cell", plain, lambda: lstm(128, 128, 128)),
        _network(
            "densenet", "DenseNet, 3 x 8 layers, batch norm", plain, lambda: densenet(8, 12, 32, 16)
        ),
        _network(
            "maml", "MAML, 20 inner steps of an MLP", inner_loop, lambda: mlp(4, 128, 512), steps=20
        ),
        _network("per-sample", "CNN, 8 layers", per_sample, lambda: cnn(8, 16, 32, 64)),
        _network("hvp", "CNN, 12 layers", hessian_vector_product, lambda: cnn(12, 16, 32, 16)),
        _network(
            "jacobian",
            "CNN, 24 layers, 4 outputs",
            jacobian,
            lambda: cnn(24, 16, 32, 24, classes=4, loss=_mean_output),
        ),
    ]
}
TINY = _network("tiny", "MLP, 8 layers, for a quick look", plain, lambda: mlp(8, 16, 64))
