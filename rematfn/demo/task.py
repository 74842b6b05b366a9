# SPDX-License-Identifier: Apache-2.0
"""What the demo and the benchmarks run: a model with its data, timed and counted step by step."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import optree
import torch
from torch import Tensor

from rematfn import Disk
from rematfn.demo.chargpt import Params, Sizes, make_chargpt
from rematfn.demo.text import Corpus
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
        cls,
        *,
        layers: int = 6,
        width: int = 384,
        heads: int = 6,
        context: int = 256,
        batch: int = 8,
        device: torch.device | str = "cpu",
        seed: int = 0,
    ) -> Task:
        """Return the task of learning to write Python's reference manual."""
        corpus = Corpus.of_python_manual()
        torch.manual_seed(seed)
        sizes = Sizes(len(corpus.vocabulary), layers, width, heads, context)
        loss_fn, params = make_chargpt(sizes, device)
        batches = (tokens.to(device) for tokens in corpus.batches(batch, context, seed))
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
        """Run training step ``number``; return how far the resident set of the process rose.

        On an accelerator: what its allocator has reserved, which is what the driver sees.
        """
        if self.device.type != "cpu":
            return self._count_reserved(step, tokens, number)
        give_back()  # what steps before have left does not hide what this one takes
        with ResidentPeak() as peak:
            self.run(step, tokens, number)
        return peak.added

    def _count_reserved(self, step: Step, tokens: Tensor, number: int) -> int | None:
        self._finish_queued_work()
        try:
            torch.accelerator.empty_cache()
            torch.accelerator.reset_peak_memory_stats(self.device)
            before = torch.accelerator.memory_reserved(self.device)
        except RuntimeError:  # its allocator does not tell
            return None
        self.run(step, tokens, number)
        return torch.accelerator.max_memory_reserved(self.device) - before

    def _finish_queued_work(self) -> None:
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)


class Held:
    """What a disk holds, over time, while a ``with`` block runs; nothing if there is no disk.

    Attributes:
        seconds: When it was looked at, since entry.
        bytes: What it held then.
    """

    _EVERY = 0.002  # seconds

    def __init__(self, disk: Disk | None) -> None:
        self.seconds: list[float] = []
        self.bytes: list[int] = []
        self._disk = disk
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    @property
    def peak(self) -> int:
        """The most that was seen."""
        return max(self.bytes, default=0)

    def __enter__(self) -> Held:
        self._start = time.perf_counter()
        if self._disk is not None:
            self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._done.set()
        if self._disk is not None:
            self._thread.join()

    def _look(self) -> None:
        assert self._disk is not None
        while True:
            self.seconds.append(time.perf_counter() - self._start)
            self.bytes.append(self._disk.held_bytes)
            if self._done.wait(self._EVERY):
                return


@dataclass(frozen=True)
class Count:
    """The memory of one step's intermediates, over time."""

    seconds: list[float]
    bytes: list[int]
    peak: int

    @classmethod
    def of(cls, timeline: MemoryTimeline, results: object) -> Count:
        """Tell intermediates from results: results are what is left at the end, and no more.

        Blocks that outlive the step without belonging to a result are something that leaked, or
        is kept for later. They count as intermediates all along, so that keeping memory does not
        look like saving it.

        Args:
            timeline: What was counted.
            results: A pytree of tensors.
        """
        tensors: list[Tensor] = optree.tree_leaves(results)  # type: ignore[arg-type]
        storages = [t.untyped_storage() for t in tensors]
        handed_over = sum({s.data_ptr(): s.nbytes() for s in storages}.values())
        kept = max(0, timeline.survivors - handed_over)
        over_time = [nbytes + kept for nbytes in timeline.bytes_excluding_survivors]
        return cls(timeline.times, over_time, max(over_time, default=0))
