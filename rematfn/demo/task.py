# SPDX-License-Identifier: Apache-2.0
"""What the demo and the benchmarks run: a model with its data, timed and counted step by step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pydoc_data.topics import topics

import optree
import torch
from torch import Tensor

from rematfn.demo.chargpt import Params, Sizes, make_chargpt
from rematfn.testing import MemoryTimeline, ResidentPeak
from rematfn.testing._resident import give_back

Gradients = tuple[Params, Tensor]  # gradients, loss
Step = Callable[[Params, Tensor], Gradients]


@dataclass
class Task:
    """A model, its data, and steps that start from the same random numbers as often as wanted."""

    loss_fn: Callable[[Params, Tensor], Tensor]
    params: Params
    batches: Iterator[Tensor]
    device: torch.device
    seed: int

    @classmethod
    def of_python_manual(
        cls, *, batch: int = 8, device: torch.device | str = "cpu", seed: int = 0, **sizes: int
    ) -> Task:
        """Return the task of learning to write Python's reference manual, which CPython has.

        The seed is that of weights, batches and dropout.
        """
        text = "\n\n".join(topics[name] for name in sorted(topics))
        characters = sorted(set(text))
        number = {character: i for i, character in enumerate(characters)}
        ids = torch.tensor([number[character] for character in text])
        torch.manual_seed(seed)
        model = Sizes(len(characters), **sizes)
        loss_fn, params = make_chargpt(model, device)
        batches = (tokens.to(device) for tokens in _excerpts(ids, batch, model.context, seed))
        return cls(loss_fn, params, batches, torch.device(device), seed)

    def run(self, step: Step, tokens: Tensor, number: int) -> tuple[Gradients, float]:
        """Run training step ``number``; return its results and the seconds it took.

        Dropout draws the same numbers for the same ``number``, whichever step runs.
        """
        torch.manual_seed(self.seed + number)
        self._finish_queued_work()
        start = time.perf_counter()
        results = step(self.params, tokens)
        self._finish_queued_work()
        return results, time.perf_counter() - start

    def count(self, step: Step, tokens: Tensor, number: int) -> tuple[Gradients, Count]:
        """Run training step ``number``; return its results and its memory at the allocator."""
        with MemoryTimeline(self.device) as timeline:
            results, _ = self.run(step, tokens, number)
        return results, Count.of(timeline, results)

    def count_resident(self, step: Step, tokens: Tensor, number: int) -> int | None:
        """Run training step ``number``; return how far the resident set of the process rose."""
        give_back()  # what steps before have left does not hide what this one takes
        with ResidentPeak() as peak:
            self.run(step, tokens, number)
        return peak.added

    def _finish_queued_work(self) -> None:
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)


def _excerpts(ids: Tensor, size: int, length: int, seed: int) -> Iterator[Tensor]:
    """Yield batches for ever, each ``size`` random excerpts of ``length + 1`` characters.

    One more than a model reads: the last character is only predicted. The same seed gives the same
    batches, whatever else draws random numbers meanwhile.
    """
    generator = torch.Generator().manual_seed(seed)
    offsets = torch.arange(length + 1)
    while True:
        starts = torch.randint(len(ids) - length, (size, 1), generator=generator)
        yield ids[starts + offsets]


@dataclass(frozen=True)
class Count:
    """The memory of one step's intermediates, over time in seconds."""

    seconds: list[float]
    bytes: list[int]
    peak: int

    @classmethod
    def of(cls, timeline: MemoryTimeline, results: object) -> Count:
        """Tell intermediates from results: results are what is left at the end, and no more.

        Blocks that outlive the step without belonging to a result are something that leaked, or
        is kept for later. They count as intermediates all along, so that keeping memory does not
        look like saving it.
        """
        tensors: list[Tensor] = optree.tree_leaves(results)  # type: ignore[arg-type]
        storages = [t.untyped_storage() for t in tensors]
        handed_over = sum({s.data_ptr(): s.nbytes() for s in storages}.values())
        kept = max(0, timeline.survivors - handed_over)
        over_time = [nbytes + kept for nbytes in timeline.bytes_excluding_survivors]
        return cls(timeline.times, over_time, max(over_time, default=0))
