# SPDX-License-Identifier: Apache-2.0
"""Counting tensor bytes at the allocator, without asking rematfn.

A budget that is checked with the table that enforces it proves little. The counter here reads the
memory events of torch's profiler, or on CUDA the history of its allocator: one for each block that
the tensor allocator hands out or takes back, scratch inside kernels included, with its address and
size.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable
from itertools import accumulate
from typing import NamedTuple

import torch
from torch._C._profiler import _EventType, _ProfilerEvent
from torch.profiler import ProfilerActivity, profile


class AllocatorEvent(NamedTuple):
    """A block handed out (``nbytes > 0``) or taken back (``nbytes < 0``)."""

    time: int  # nanoseconds
    address: int
    nbytes: int


class MemoryTimeline:
    """Record how many bytes of tensors are live, relative to entry, while a ``with`` block runs.

    Only memory that is allocated inside the ``with`` block counts: see Note [Blocks born outside].
    The figures are there once the block is left; `times`, `bytes` and `bytes_excluding_survivors`
    have one entry for each event.

    There are two totals. `bytes` counts everything. `bytes_excluding_survivors` never counts memory
    that is still live at exit: what remains is the intermediates, if the survivors are the results.
    To check that, compare `survivors` with the bytes of the results.

    The profiler slows the block down (roughly by 1.4 for small operators), and its figures for one
    thread include the threads that autograd starts on that thread's behalf, but no others. The
    history of CUDA's allocator is of all threads.

    Args:
        device: The device whose allocator is read, ``"cpu"`` or an accelerator such as ``"cuda"``.

    Raises:
        RuntimeError: On entry, if a profiler runs already, or CUDA's history is recorded; on exit,
            if torch has recorded nothing.

    Example:
        >>> x = torch.ones(1000, 1000)
        >>> with MemoryTimeline() as timeline:
        ...     y = x.sin().cos()
        >>> timeline.peak, timeline.final, timeline.peak_excluding_survivors
        (8000000, 4000000, 4000000)
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        # Events name an accelerator with its index, which "cuda" lacks; an empty tensor has it.
        self.device = torch.empty(0, device=device).device
        self.times: list[float] = []  # seconds since entry
        self.bytes: list[int] = []
        self.bytes_excluding_survivors: list[int] = []
        self.survivors = 0  # bytes handed out inside the block and still live at its end
        self.device_peak: int | None = None  # the accelerator's own count, if it has one
        self._device_bytes_at_entry = 0
        self._device_counts = False
        accelerator = torch.accelerator.current_accelerator()
        with contextlib.suppress(RuntimeError):  # an allocator that does not tell
            if accelerator is not None and accelerator.type == self.device.type:
                torch.accelerator.memory_allocated(self.device)
                self._device_counts = True
        self._profile: profile | None = None
        # Of what CUDA's allocator takes back, the profiler does not see all.
        self._by_history = (
            self.device.type == "cuda" and torch.cuda.get_allocator_backend() == "native"
        )
        self._start = 0  # nanoseconds

    @property
    def peak(self) -> int:
        """The most bytes live at once, above what was live at entry.

        As the accelerator itself counts, if it does: of what is freed there the profiler does not
        show all.
        """
        return max(self.bytes, default=0) if self.device_peak is None else self.device_peak

    @property
    def final(self) -> int:
        """The bytes still live at exit, above what was live at entry."""
        return self.bytes[-1] if self.bytes else 0

    @property
    def peak_excluding_survivors(self) -> int:
        """The most bytes live at once of blocks that were given back before exit."""
        return max(self.bytes_excluding_survivors, default=0)

    def __enter__(self) -> MemoryTimeline:
        if self._by_history and torch._C._cuda_isHistoryEnabled():
            raise RuntimeError(
                "MemoryTimeline: the history of CUDA's memory is being recorded already, and torch "
                "has one. Call torch.cuda.memory._record_memory_history(enabled=None) first."
            )
        if not self._by_history and torch._C._autograd._profiler_enabled():
            raise RuntimeError(
                "MemoryTimeline: a profiler runs already, and torch has one at a time. Leave the "
                "other MemoryTimeline or torch.profiler first, or read torch.cuda's own counts."
            )
        if self._device_counts:
            finish_on(self.device)
            torch.accelerator.reset_peak_memory_stats(self.device)
            self._device_bytes_at_entry = torch.accelerator.memory_allocated(self.device)
        if self._by_history:
            self._start = time.time_ns()
            _record_history("all")
            return self
        # Without `acc_events` torch 2.12 warns of a second cycle, and there is none.
        self._profile = profile(
            activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True
        )
        self._profile.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._device_counts:
            finish_on(self.device)
            most = torch.accelerator.max_memory_allocated(self.device)
            self.device_peak = most - self._device_bytes_at_entry
        if self._by_history:
            events = list(_history_of(self.device))
            _record_history(None)
            self._count(events, self._start)
            return
        running, self._profile = self._profile, None
        assert running is not None, "MemoryTimeline left without having been entered"
        inner = running.profiler
        if inner is not None:
            inner.acc_events = False  # or its end makes an object of each event: most of the time
        running.stop()
        if inner is None or inner.kineto_results is None:
            raise RuntimeError("MemoryTimeline: torch's profiler has recorded nothing.")
        results = inner.kineto_results
        events = sorted(_allocator_events(results.experimental_event_tree(), self.device))
        self._count(events, start=results.trace_start_ns())

    def _count(self, events: Iterable[AllocatorEvent], start: int) -> None:
        # Note [Blocks born outside]
        # ~~~~~~~~~~~~~~~~~~~~~~~~~~
        # A block may be given back whose allocation we did not see. Torch's CPU allocator then
        # knows no size and reports nothing, or, if the address was profiled in an earlier block,
        # reports the size of that time. Neither can be trusted, so such events are left out: the
        # figures never come out too low because something older was freed meanwhile. The reverse,
        # an address handed out twice, means that a block was given back on a thread we do not
        # see; the first one ends there.
        live: dict[int, tuple[int, int]] = {}  # address -> (bytes, index of its event)
        changes: list[int] = []
        self.times.clear()
        for event in events:
            known = live.pop(event.address, None)
            if event.nbytes > 0:
                live[event.address] = (event.nbytes, len(changes))
                changes.append(event.nbytes - (known[0] if known else 0))
            elif known:
                changes.append(-known[0])
            else:
                continue
            self.times.append((event.time - start) * 1e-9)
        self.bytes = list(accumulate(changes))
        for nbytes, index in live.values():
            changes[index] -= nbytes
        self.bytes_excluding_survivors = list(accumulate(changes))
        self.survivors = sum(nbytes for nbytes, _ in live.values())


def finish_on(device: torch.device) -> None:
    """Wait for the device, and until autograd's thread for it has freed what it has run.

    A backward returns before that. The thread runs the next one, which has no bytes, after it.
    """
    with torch.enable_grad():
        x = torch.empty(0, device=device, requires_grad=True)
        torch.autograd.grad(x * 1, x, x.detach())
    torch.accelerator.synchronize(device)


def _record_history(enabled: str | None) -> None:
    torch.cuda.memory._record_memory_history(enabled, context=None, clear_history=True)  # type: ignore[arg-type]


def _history_of(device: torch.device) -> Iterable[AllocatorEvent]:
    """Yield the events of CUDA's allocator since its history has been recorded, in their order."""
    for event in torch.cuda.memory._snapshot()["device_traces"][device.index]:
        if event["action"] in ("alloc", "free_requested"):
            nbytes = event["size"] if event["action"] == "alloc" else -event["size"]
            yield AllocatorEvent(event["time_us"] * 1000, event["addr"], nbytes)


def _allocator_events(
    roots: Iterable[_ProfilerEvent], device: torch.device
) -> Iterable[AllocatorEvent]:
    """Yield the allocator events of one device, in any order."""
    # The flat list of profiler events has no addresses; the tree, in which an allocation hangs
    # below the operator that made it, does.
    stack = list(roots)
    while stack:
        event = stack.pop()
        stack.extend(event.children)
        if event.tag == _EventType.Allocation:
            fields = event.extra_fields
            if fields.device == device:  # type: ignore[union-attr]
                yield AllocatorEvent(event.start_time_ns, fields.ptr, fields.alloc_size)  # type: ignore[union-attr]
