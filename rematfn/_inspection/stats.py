# SPDX-License-Identifier: Apache-2.0
"""What the last call of a transformed function did."""

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from .. import _C
from .._transform.transformed import transformed_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stats:
    """What a call did, its backward included as far as it has run.

    What is not known is None: everything, before the first call.

    Attributes:
        budget: Bytes the call may hold resident, or None. That of a fraction can rise while the
            call runs, with ``unconstrained_bytes``.
        peak_bytes: The most bytes that were resident at once, those a running operator was about
            to allocate included.
        unconstrained_bytes: What ``peak_bytes`` would have been without a budget: what fractions
            are of.
        resident_bytes: Bytes resident when the statistics were taken.
        operators: Operators the program ran, each counted once.
        evictions: How often a version's bytes were given up.
        replays: Recorded operations run again.
        replayed_cost: Their cost, as a fraction of the program's own.
        replayed_flops: Their FLOPs, as a fraction of the program's own. Matrix products,
            convolutions and attention have some.
        min_budget: The largest need of a single operator, in bytes: no smaller budget can do, and
            with one as small replays may need more. Known only for calls with a budget.
        moves: How often a version has begun to move to a tier, among the evictions;
            ``moved_bytes``, its bytes in all.
        returns: How often one came back, with ``returned_bytes``.
        late_returns: How many of them an operator waited for.
        turned_back: How many began too early: their room was wanted for something else.
        waited: Seconds that operators waited for values to go or to come; known to the outermost
            level.
        reserved_bytes: The most that the current accelerator's allocator had reserved when the
            statistics were taken, which is what its driver sees: all that the process holds there,
            and freed blocks that the allocator keeps. Counted since the last
            ``torch.accelerator.reset_peak_memory_stats()``. None without an accelerator, or where
            its allocator does not tell.
        workspace_bytes: What cuBLAS has taken on CUDA for the threads that run levels, and keeps
            for the process: it comes on top of every budget. Elsewhere as ``reserved_bytes``.
        call: What the call was: ``"first"``, of which nothing was known; ``"estimated"``, whose
            peak was estimated from other calls; ``"guided"`` by a recorded one; else ``"online"``.
        why: Why it was that, in words.
        settled: Whether the search for a better plan than the one that it followed is over. None
            if it followed none.
    """

    budget: int | None = None
    peak_bytes: int | None = None
    unconstrained_bytes: int | None = None
    resident_bytes: int | None = None
    operators: int | None = None
    evictions: int | None = None
    replays: int | None = None
    replayed_cost: float | None = None
    replayed_flops: float | None = None
    min_budget: int | None = None
    moves: int | None = None
    moved_bytes: int | None = None
    returns: int | None = None
    returned_bytes: int | None = None
    late_returns: int | None = None
    turned_back: int | None = None
    waited: float | None = None
    reserved_bytes: int | None = None
    workspace_bytes: int | None = None
    call: str | None = None
    why: str | None = None
    settled: bool | None = None

    def flat(self, prefix: str = "") -> dict[str, float]:
        """Return the figures that are known, which are numbers, by name: what loggers take.

        Example:
            >>> import torch, rematfn
            >>> g = rematfn.remat(lambda x: x.sin().sum(), "1MiB")
            >>> _ = g(torch.ones(4))
            >>> rematfn.stats(g).flat("remat/")["remat/peak_bytes"]
            20
        """
        figures = dataclasses.asdict(self).items()
        return {prefix + name: x for name, x in figures if isinstance(x, int | float)}

    def __str__(self) -> str:
        if self.operators is None:
            return "not called yet"
        moved = reserved = ""
        if self.moves:
            moved = (
                f"moved      {self.moves} out ({bytes_or(self.moved_bytes)}), "
                f"{self.returns} back ({bytes_or(self.returned_bytes)}, {self.late_returns} late)\n"
                f"waited     {self.waited:.3f} s for them\n"
            )
        if self.reserved_bytes is not None:
            reserved = f"reserved   {bytes_or(self.reserved_bytes)} by the process, at the driver\n"
        if self.workspace_bytes:
            reserved += (
                f"workspaces {bytes_or(self.workspace_bytes)} of libraries, beside the budget\n"
            )
        return (
            f"budget     {bytes_or(self.budget, 'none')}\n"
            f"peak       {bytes_or(self.peak_bytes)}\n"
            f"resident   {bytes_or(self.resident_bytes)}\n"
            f"operators  {self.operators}\n"
            f"evictions  {self.evictions}\n"
            f"replays    {self.replays} ({self.replayed_cost:.1%} of the cost)\n"
            f"min budget {bytes_or(self.min_budget)}\n"
            f"{moved}{reserved}"
            f"call       {self.call}: {self.why}"
        )


def bytes_or(nbytes: int | None, unknown: str = "unknown") -> str:
    """Return a count of bytes as text, or what stands for one that there is not."""
    return unknown if nbytes is None else _C.format_bytes(nbytes)


def stats(g: Callable[..., Any]) -> Stats:
    """Return what the last call of ``g`` did, its backward included as far as it has run.

    The statistics are those of this moment. Asked again after the backward, they are the newer.

    Args:
        g: What :func:`remat` returned: a function, a method, whose statistics are its function's
            whatever it is bound to, or a module. Or what wraps such a function and says so, as
            ``torch.func.grad(g)``, ``functools.partial(g)`` and decorators that use
            :func:`functools.wraps` do.

    Raises:
        TypeError: There is no such function in ``g``.

    Example:
        >>> import torch, rematfn
        >>> g = rematfn.remat(lambda x: x.sin().cos().sum(), budget="1MiB")
        >>> rematfn.stats(g).operators is None
        True
        >>> _ = torch.func.grad(g)(torch.ones(4))
        >>> rematfn.stats(g).replays
        0
    """
    ran = transformed_of(g, "stats")[0].last_call
    if ran is None:
        return Stats()
    reserved = workspaces = None
    with contextlib.suppress(RuntimeError):  # an allocator that does not tell
        if torch.accelerator.is_available():
            reserved = torch.accelerator.max_memory_reserved()
            workspaces = _C.workspace_bytes()
    return Stats(**ran.read(), reserved_bytes=reserved, workspace_bytes=workspaces)
