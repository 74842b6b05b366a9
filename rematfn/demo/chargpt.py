# SPDX-License-Identifier: Apache-2.0
"""A character-level GPT: pre-LN blocks, causal attention, GELU. Plain PyTorch, nothing of rematfn.

With the default sizes it has 10.7 million parameters.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Params = dict[str, Tensor]


@dataclass(frozen=True)
class Sizes:
    """The numbers that make a model."""

    vocabulary: int
    layers: int = 6
    width: int = 384
    heads: int = 6
    context: int = 256
    dropout: float = 0.1


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.heads = sizes.heads
        self.qkv = nn.Linear(sizes.width, 3 * sizes.width)
        self.out = nn.Linear(sizes.width, sizes.width)

    def forward(self, x: Tensor) -> Tensor:
        """Let each position read those before it and itself."""
        heads = self.qkv(x).unflatten(-1, (3, self.heads, -1))  # batch, time, 3, head, channel
        q, k, v = heads.movedim(2, 0).transpose(2, 3)  # each: batch, head, time, channel
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        update: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return update


class Block(nn.Module):
    """Attention, then a two-layer perceptron, each on a normalised copy, added to the stream."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(sizes.width)
        self.attention = Attention(sizes)
        self.mlp_norm = nn.LayerNorm(sizes.width)
        self.mlp = nn.Sequential(
            nn.Linear(sizes.width, 4 * sizes.width),
            nn.GELU(),
            nn.Linear(4 * sizes.width, sizes.width),
        )
        self.dropout = nn.Dropout(sizes.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Return the stream after both."""
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        x = x + self.dropout(self.mlp(self.mlp_norm(x)))
        return x


class CharGPT(nn.Module):
    """Logits of the next character at each position."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.character = nn.Embedding(sizes.vocabulary, sizes.width)
        self.position = nn.Embedding(sizes.context, sizes.width)
        self.dropout = nn.Dropout(sizes.dropout)
        self.blocks = nn.Sequential(*(Block(sizes) for _ in range(sizes.layers)))
        self.norm = nn.LayerNorm(sizes.width)
        self.head = nn.Linear(sizes.width, sizes.vocabulary, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Return logits (batch, time, vocabulary) for ids (batch, time)."""
        positions = torch.arange(ids.shape[1], device=ids.device)
        x = self.dropout(self.character(ids) + self.position(positions))
        logits: Tensor = self.head(self.norm(self.blocks(x)))
        return logits


def make_chargpt(
    sizes: Sizes, device: torch.device | str = "cpu"
) -> tuple[Callable[[Params, Tensor], Tensor], Params]:
    """Return a model as ``(loss_fn, params)``, with ``loss_fn(params, tokens)`` a pure function.

    ``tokens`` is (batch, time + 1): each character but the last is read, each but the first is
    predicted. Pure up to dropout, which draws from torch's default generator.
    """
    model = CharGPT(sizes).to(device)
    params = {name: p.detach() for name, p in model.named_parameters()}

    def loss_fn(params: Params, tokens: Tensor) -> Tensor:
        logits = torch.func.functional_call(model, params, (tokens[:, :-1],))
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    return loss_fn, params
