# SPDX-License-Identifier: Apache-2.0
"""docs/operators.md, from the rows of a sweep."""

import platform
from collections import Counter

import torch

from .kinds import KINDS
from .run import Row
from .samples import DTYPES, UNINITIALISED, dtypes_of, operators

PAGE = """\
# Operators

This page is generated, by `make sweep`, which took {minutes} minutes with {jobs} process{es}.

Every sample that torch's own tests have of an operator (`op_db` and the `_foreach_` databases of
`torch.testing._internal.common_methods_invocations`: {operators} entries) is run untransformed
and under `remat` with everything evicted after every operator. Results, arguments, gradients and
the random stream afterwards have to be bitwise the same, and so does what aliases what. Each
operator is called on arguments and on tensors made inside. Python {python}, torch {torch}, CPU,
one thread.

| kind | {dtypes} |
|---|{rules}
{counts}

A number counts programs, one for each sample. In parentheses: programs that torch refuses
untransformed, and then so, with the same exception, under `remat`.

| kind | is |
|---|---|
{kinds}

## Failures

{failures}

## Not on a CPU

{elsewhere}

## Uninitialised memory

Some operators give, or read, what happens to be in uninitialised memory, and differ from one run to
the next by themselves. They are compared while torch fills such memory, under
`torch.use_deterministic_algorithms`:

{uninitialised}
"""

MEANINGS = {
    "forward": "`remat(f)`",
    "in-place": "`remat(f)` with the operator's in-place variant",
    "out=": "`remat(f)` with the operator's `out=` variant",
    "backward": "`torch.autograd.grad` of `remat(f)`",
    "double backward": "the same, and of that again, with `create_graph`",
    "offload forward": "`offload(f)`, with all values moved to a disk",
    "offload backward": "`torch.autograd.grad` of that",
}


def meaning(kind: str) -> str:
    if kind in MEANINGS:
        return MEANINGS[kind]
    outer, inner = kind.rstrip(")").split("(")
    return f"`{outer}({inner}(f))`"


def page(rows: list[Row], seconds: float, jobs: int) -> str:
    """Return the page."""
    passed: Counter[tuple[str, str]] = Counter()
    refused: Counter[tuple[str, str]] = Counter()
    for row in rows:
        for key in ((row.kind, row.dtype), (row.kind, "all")):
            passed[key] += row.passed
            refused[key] += row.refused
    columns = [*DTYPES, "all"]

    def cell(kind: str, dtype: str) -> str:
        if not passed[kind, dtype] + refused[kind, dtype]:
            return ""
        refusals = f" ({refused[kind, dtype]:,})" if refused[kind, dtype] else ""
        return f"{passed[kind, dtype]:,}{refusals}"

    failed = sorted((row for row in rows if row.failed), key=lambda row: row.operator)
    return PAGE.format(
        minutes=round(seconds / 60),
        jobs=jobs,
        es="" if jobs == 1 else "es",
        operators=len({row.operator for row in rows}),
        python=platform.python_version(),
        torch=torch.__version__,
        dtypes=" | ".join(columns),
        rules="--:|" * len(columns),
        counts="\n".join(
            f"| {kind} | {' | '.join(cell(kind, dtype) for dtype in columns)} |" for kind in KINDS
        ),
        kinds="\n".join(f"| {kind} | {meaning(kind)} |" for kind in KINDS),
        failures="\n".join(
            f"- `{row.operator}`, {row.kind}, {row.dtype}: {row.failure} "
            f"({row.failed} of {row.failed + row.passed + row.refused})"
            for row in failed
        )
        or "None.",
        elsewhere="\n".join(f"- `{n}`" for n, info in operators().items() if not dtypes_of(info)),
        uninitialised="\n".join(f"- `{name}`: {why}." for name, why in UNINITIALISED.items()),
    )
