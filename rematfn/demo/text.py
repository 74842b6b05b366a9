# SPDX-License-Identifier: Apache-2.0
"""The demo's data: the English text of Python's own reference manual, which every CPython has."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pydoc_data.topics import topics

import torch
from torch import Tensor


@dataclass(frozen=True)
class Corpus:
    """A text as a vector of character ids, and the characters they stand for."""

    ids: Tensor
    vocabulary: str

    @classmethod
    def of_python_manual(cls) -> Corpus:
        """Return the topics of ``help()``, joined in alphabetical order."""
        return cls.of("\n\n".join(topics[name] for name in sorted(topics)))

    @classmethod
    def of(cls, text: str) -> Corpus:
        """Return a corpus of ``text`` over exactly the characters that occur in it."""
        vocabulary = "".join(sorted(set(text)))
        number = {character: i for i, character in enumerate(vocabulary)}
        return cls(torch.tensor([number[character] for character in text]), vocabulary)

    def text(self, ids: Tensor) -> str:
        """Return the characters that a vector of ids stands for."""
        return "".join(self.vocabulary[i] for i in ids.tolist())

    def batches(self, size: int, length: int, seed: int) -> Iterator[Tensor]:
        """Yield batches for ever, each ``size`` random excerpts of ``length + 1`` characters.

        One more than a model reads: the last character is only predicted. The same seed gives the
        same batches, whatever else draws random numbers meanwhile.
        """
        if len(self.ids) < length + 1:
            raise ValueError(f"excerpts of {length + 1} from a text of {len(self.ids)} characters")
        generator = torch.Generator().manual_seed(seed)
        offsets = torch.arange(length + 1)
        while True:
            starts = torch.randint(len(self.ids) - length, (size, 1), generator=generator)
            yield self.ids[starts + offsets]
