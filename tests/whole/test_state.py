# SPDX-License-Identifier: Apache-2.0
"""State that modules keep: statistics, noise, power iterations, counters; written once a call."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import Transform, assert_same_as_eager
from torch import Tensor, nn

Old = nn.utils
New = nn.utils.parametrizations


class Averages(nn.Module):
    """Keeps a moving average, a counter and the last input's norm; the first by rebinding."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(5))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("norm", torch.zeros(()), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        self.count += 1
        torch.linalg.vector_norm(x.detach(), out=self.norm)
        return (x - self.mean) / (self.norm + self.count)


class Telling(nn.BatchNorm1d):
    """Reads its statistics before it moves them, and after."""

    def forward(self, x: Tensor) -> Tensor:
        before = self.running_mean * 2
        return super().forward(x) * before.cos() + self.running_var.sqrt()


class ScaledByStatistics(nn.BatchNorm1d):
    """Is given one of its statistics as its weight, too."""

    def forward(self, x: Tensor) -> Tensor:
        mean, var = self.running_mean, self.running_var
        return nn.functional.batch_norm(x, mean, var, var, None, self.training)


MODULES: dict[str, Callable[[], nn.Module]] = {
    "batch norm": lambda: nn.BatchNorm1d(5),
    "batch norm, momentum None": lambda: nn.BatchNorm1d(5, momentum=None),
    "batch norm, no statistics": lambda: nn.BatchNorm1d(5, track_running_stats=False),
    "batch norm, not affine": lambda: nn.BatchNorm1d(5, affine=False),
    "batch norm, momentum 1": lambda: nn.BatchNorm1d(5, momentum=1.0),
    "batch norm, statistics read": lambda: Telling(5),
    "batch norm, scaled by statistics": lambda: ScaledByStatistics(5, affine=False),
    "rrelu": lambda: nn.RReLU(0.1, 0.9),
    "rrelu in place": lambda: nn.Sequential(nn.Linear(5, 5), nn.RReLU(inplace=True)),
    "dropouts": lambda: nn.Sequential(nn.Dropout(0.3), nn.AlphaDropout(0.3)),
    "spectral norm": lambda: New.spectral_norm(nn.Linear(5, 5)),
    "spectral norm, as a hook": lambda: Old.spectral_norm(nn.Linear(5, 5)),
    "weight norm": lambda: New.weight_norm(nn.Linear(5, 5)),
    "orthogonal": lambda: New.orthogonal(nn.Linear(5, 5)),
    "averages and counters": Averages,
}


def call_and_train(build: Callable[[], nn.Module], transform: Transform, training: bool) -> Any:
    """Call a network around the module thrice with a backward each, and return all of its state."""
    torch.manual_seed(3)
    module = build()
    if not training:
        module(torch.randn(6, 5))  # statistics to use
    module.train(training)
    g = transform(lambda x: module(module(x.sin()).exp()).square().sum())
    sgd = torch.optim.SGD([*module.parameters(), torch.zeros(1, requires_grad=True)], lr=0.1)
    x = torch.randn(6, 5, requires_grad=True)
    seen = []
    for _ in range(3):
        loss = g(x)
        seen.append([b.detach().clone() for b in module.buffers()])  # at the right time
        loss.backward()
        seen.append([b.detach().clone() for b in module.buffers()])
        sgd.step()
    buffers = [b * 1 for b in module.buffers()]
    return seen, buffers, list(module.parameters()), x.grad, torch.rand(2)


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("build", MODULES.values(), ids=MODULES.keys())
def test_a_module_with_state(build: Callable[[], nn.Module], training: bool) -> None:
    assert_same_as_eager(lambda transform: call_and_train(build, transform, training))
