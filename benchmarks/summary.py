# SPDX-License-Identifier: Apache-2.0
"""Every peer in one table and one picture, from what the other benchmarks have recorded.

Reads the records of `make bench` and `make bench-models`. Peers that do not run here are compared
by the figures that they have published: MONeT's, with the schedules of the same networks on shapes.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from library_models import without_torchvision_operators
from measure import RESULTS, place, table, write_document
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import cross_entropy

import rematfn

ABOUT = """\
A step of each program with one tool that saves memory, and with rematfn in the peak that the tool
comes to, from the second call on. *Peak*: at the allocator, over the plain step's. *Time*: over the
plain step's, medians of rounds that take turns in one process; of the libraries' models, processor
time. *Recomputed*: by the cost model, over the step's own cost; not counted in what is compiled.
*Exact*: every result is the plain step's, bit for bit; rematfn's all are. Tools that refuse a
program, or save nothing in it, are left out here. They are on the pages that this table is made
from: [networks](bench.md), and [models of libraries](library_models.md)."""
ALTERNATIVE = "Time over peak: each tool's, and below most of them rematfn's in the same peak"

ABOUT_PUBLISHED = """\
[MONeT](https://arxiv.org/abs/2010.14501) chooses by an integer program what to recompute, and with
which kernels. It needs torch 1.5 and a commercial solver. So its figures here are those of its
[README](https://github.com/utsaslab/MONeT), measured on a GPU. *Memory* is the budget over what
training takes, weights and gradients included. rematfn's figures are simulated on shapes, from
timm's networks in the same batches: what schedules recompute, by the cost model of a CPU. A cost by
a model is not a time, so the last two columns can be compared only roughly.

[HiRemate](https://proceedings.mlr.press/v267/gusak25a.html) reports that it saves up to 50 to 70 %
for 10 to 15 % of time. [Checkmate](https://arxiv.org/abs/1910.02653) rounds the relaxation of its
integer program. What no schedule of our networks can go below, by the same relaxation, is in
[lower bounds](bound.md)."""

# What MONeT's README has for these: batch, GB without it, and overhead in percent by GB.
_MONET: dict[str, tuple[str, int, float, dict[float, float]]] = {
    "ResNet-50": ("resnet50", 184, 15.06, {10: 3.2, 9: 4.7, 8: 5.6, 7: 7.3, 6: 9.3, 5: 12.0}),
    "MobileNet-V2": ("mobilenetv2_100", 272, 14.46, {10: 2.4, 5: 8.7}),
    "VGG-16": ("vgg16", 176, 14.12, {5.5: 9.1}),
}


def peers(records: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the rows of `make bench`."""
    for network, record in records.items():
        for peer in record["peers"]:
            ours = peer.get("ours", {}).get("guided", {})
            if "refused" in peer or peer["peak"] >= record["eager"]["peak"]:
                continue
            yield {
                "program": network,
                "tool": peer["peer"],
                "exact": peer["exact"],
                "peak": peer["of eager's"],
                "recomputed, tool": peer.get("replayed cost"),
                "recomputed, rematfn": ours.get("replayed cost"),
                "time, tool": peer.get("time ratio"),
                "time, rematfn": ours.get("time ratio", "does not fit"),
            }


def libraries(rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the rows of `make bench-models`."""
    for row in rows:
        yield {
            "program": row["model"],
            "tool": f"{row['library']}'s own",
            "exact": row["library's exact"],
            "peak": row["of plain's"],
            "recomputed, rematfn": row["replayed cost"],
            "time, tool": row["library / plain"],
            "time, rematfn": row["ours / plain"],
        }


def published() -> Iterator[dict[str, Any]]:
    """Yield a row for each of MONeT's figures."""
    without_torchvision_operators()
    import timm

    for network, (name, batch, plain, overheads) in _MONET.items():
        with FakeTensorMode():
            module = timm.create_model(name)
            x, y = torch.empty(batch, 3, 224, 224), torch.zeros(batch, dtype=torch.int64)
            trace = rematfn.record(lambda m=module, x=x, y=y: cross_entropy(m(x), y).backward())
        weights = sum(p.nbytes for p in module.parameters())
        fixed = 2 * weights + x.nbytes
        for gigabytes, overhead in overheads.items():
            share = gigabytes / plain
            budget = int(share * (trace.peak_bytes + fixed)) - fixed
            try:
                replayed: float | str = rematfn.simulate(trace, budget).replayed_cost
            except rematfn.BudgetError:
                replayed = "does not fit"
            yield {
                "network": network,
                "batch": batch,
                "memory": share,
                "MONeT, time": overhead / 100,
                "rematfn, recomputed": replayed,
            }


def main() -> None:
    """Write the table and the picture."""
    from picture import draw_summary, kind  # loads matplotlib

    bench = json.loads((RESULTS / "bench.json").read_text())["networks"]
    models = json.loads((RESULTS / "library_models.json").read_text())
    rows = [*peers(bench), *libraries(models["rows"])]
    timed = [r for r in rows if isinstance(r["time, rematfn"], float) and r["time, tool"]]
    draw_summary(RESULTS / "summary.png", timed)
    behind = Counter(kind(r["tool"]) for r in timed if r["time, rematfn"] >= r["time, tool"])
    others = ", ".join(f"{tool} ({count})" for tool, count in behind.items())
    places = dict.fromkeys(place(record["machine"]) for record in [*bench.values(), models])
    paragraphs = [
        "# Beside other tools (`make bench-summary`)",
        ABOUT,
        f"rematfn takes less time in {len(timed) - behind.total()} of {len(timed)} rows. Ahead in "
        f"the others: {others}.",
        f"![{ALTERNATIVE}](summary.png)",
        table(rows),
        "\n".join(f"- {where}" for where in places),
        "## Figures that others have published",
        ABOUT_PUBLISHED,
        table(list(published())),
    ]
    print(write_document(RESULTS / "summary.md", paragraphs))


if __name__ == "__main__":
    main()
