# SPDX-License-Identifier: Apache-2.0
"""What the demo measured, as a table and a picture, and which of rematfn's promises that breaks."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles

from rematfn._inspection.stats import Stats, bytes_or
from rematfn._inspection.tables import new_figure
from rematfn.demo.task import Count

MIB = 2**20


@dataclass(frozen=True)
class Report:
    """The figures of one run; bytes are of intermediates (neither parameters nor results)."""

    device: str
    parameters: int  # how many numbers
    stats: Stats  # of the last call
    own_peak: int  # rematfn's table, over all steps
    counted_peak: int  # the allocator's events, over one step under remat
    eager_peak: int  # the same counter, over an eager step
    # What the resident set of the host rose by in a step under remat, gradients included; None if
    # the system does not tell.
    resident: int | None
    eager_resident: int | None  # in an eager step
    time_ratios: Sequence[float]  # remat / eager, pairs of steps side by side
    eager_seconds: float  # median
    unequal: Sequence[str]  # what differed from eager: "call 1: head.weight"
    compared: int  # tensors compared
    losses: Sequence[float]

    @property
    def last_loss(self) -> float:
        """The mean over the last tenth of the steps: one batch's loss is noisy."""
        tail = self.losses[-max(1, len(self.losses) // 10) :]
        return sum(tail) / len(tail)

    def broken_promises(self) -> list[str]:
        """Return a sentence for each promise that the figures break."""
        broken = []
        if self.unequal:
            names = ", ".join(self.unequal[:3]) + (", ..." if len(self.unequal) > 3 else "")
            broken.append(
                f"bitwise equality: {len(self.unequal)} of {self.compared} compared tensors are"
                f" not eager's ({names})"
            )
        budget = self.stats.budget
        if budget is not None:
            peaks = {"the allocator": self.counted_peak, "rematfn itself": self.own_peak}
            broken += [
                f"budget: {source} counts a peak of {peak:,} bytes, {peak - budget:,} above"
                f" the budget of {budget:,}"
                for source, peak in peaks.items()
                if peak > budget
            ]
        if not self.last_loss < 0.8 * self.losses[0]:  # "not <": a loss of NaN is no success
            broken.append(
                f"training: the loss went from {self.losses[0]:.3f} to {self.last_loss:.3f} in"
                f" {len(self.losses)} steps; it should fall below {0.8 * self.losses[0]:.3f}"
            )
        return broken

    def __str__(self) -> str:
        stats = self.stats
        of_eager = against = ""
        if stats.budget is not None:
            of_eager = f"{stats.budget / self.eager_peak:.3f} of eager's peak"
            against = f"{self.counted_peak / stats.budget:.3f} of the budget"
        rows = [
            ("parameters", f"{self.parameters:,} on {self.device}", ""),
            ("budget", bytes_or(stats.budget, "none"), of_eager),
            ("peak, remat, allocator", bytes_or(self.counted_peak), against),
            ("peak, remat, own count", bytes_or(self.own_peak), "largest over all steps"),
            ("peak, eager, allocator", bytes_or(self.eager_peak), ""),
            ("resident set, remat", bytes_or(self.resident), "VmHWM rose by, with the gradients"),
            ("resident set, eager", bytes_or(self.eager_resident), "the same"),
            ("peak, remat / eager", f"{self.counted_peak / self.eager_peak:.3f}", ""),
            ("replayed cost", f"{stats.replayed_cost or 0:.1%}", "of the cost of one eager step"),
            ("step, eager", f"{self.eager_seconds:.3f} s", f"median of {len(self.time_ratios)}"),
            ("step, remat / eager", f"{median(self.time_ratios):.3f}", _of_pairs(self.time_ratios)),
            ("bitwise eager's", "no" if self.unequal else "yes", f"{self.compared} tensors"),
            ("loss", f"{self.losses[0]:.3f} -> {self.last_loss:.3f}", f"{len(self.losses)} steps"),
        ]
        lines = [f"{name:<26} {value:>20}  {note}".rstrip() for name, value, note in rows]
        if stats.moves or stats.reserved_bytes is not None:
            lines += ["", "the last step", str(stats)]
        return "\n".join(lines)


def _of_pairs(ratios: Sequence[float]) -> str:
    pairs = f"median of {len(ratios)} pairs"
    if len(ratios) < 4:
        return pairs
    low, _, high = quantiles(ratios, n=4, method="inclusive")
    return f"{pairs}, the middle half {low:.3f} to {high:.3f}"


def plot_step(path: Path, eager: Count, bounded: Count, budget: int | None) -> None:
    """Save a PNG of both curves and the budget line at ``path``."""
    figure = new_figure(9, 4.5)
    axes = figure.add_subplot()
    curves = [(eager, "eager", "#8c8c8c"), (bounded, "remat", "#1f6fb4")]
    for curve, name, colour in curves:
        seconds, mib = [0.0, *curve.seconds], [0.0, *(b / MIB for b in curve.bytes)]
        label = f"{name}, peak {curve.peak / MIB:.0f} MiB"
        axes.fill_between(seconds, mib, step="post", color=colour, alpha=0.2, linewidth=0)
        axes.step(seconds, mib, where="post", color=colour, linewidth=1.2, label=label)
    if budget is not None:
        label = f"budget, {budget / MIB:.0f} MiB"
        axes.axhline(budget / MIB, color="#c43c39", linestyle="--", linewidth=1.2, label=label)
    axes.set_title("Memory of intermediates over one step (loss and gradients)")
    axes.set_xlabel("seconds since the step began")
    axes.set_ylabel("MiB live, parameters and results aside")
    axes.set_xlim(left=0)
    highest = max(budget or 0, 1, *(curve.peak for curve, _, _ in curves))
    axes.set_ylim(bottom=0, top=1.12 * highest / MIB)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#dddddd", linewidth=0.6)
    axes.legend(frameon=False, loc="upper left")
    figure.savefig(path)
