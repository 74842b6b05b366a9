# SPDX-License-Identifier: Apache-2.0
"""Public traces in our simulator, beside what the DTR simulator makes of them.

The logs are those of Kirisame et al., *Dynamic Tensor Rematerialization* (ICLR 2021), published as
`simrd/logs.zip` in github.com/uwsampl/dtr-prototype. They are not part of this project: name a
folder with `densenet121.jsonl.gz`, `lstm.jsonl.gz`, `transformer.jsonl.gz` and `unet.jsonl.gz`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import rematfn

FRACTIONS = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2)
OOM, THRASH = "out of memory", "thrashes"

# Total cost / cost without a budget, by fraction of the peak as in FRACTIONS, from that paper's
# simulator at commit eff53cc4 (`RuntimeV2EagerOptimized`; stopped where replays cost more than the
# program). None: not computed.
REFERENCE: dict[str, dict[str, tuple[float | str | None, ...]]] = {
    "densenet121": {
        "h_DTR": (1.026, 1.064, 1.104, 1.141, 1.176, 1.271, 1.446, 1.679),
        "h_eq": (1.026, 1.064, 1.104, 1.141, 1.176, 1.293, 1.426, 1.616),
    },
    "transformer": {
        "h_DTR": (1.009, 1.020, 1.031, 1.044, 1.058, 1.083, 1.123, 1.352),
        "h_eq": (1.009, 1.020, 1.031, 1.044, 1.058, 1.091, 1.124, 1.545),
    },
    "unet": {
        "h_DTR": (1.033, 1.058, 1.085, 1.131, 1.159, OOM, OOM, OOM),
        "h_eq": (1.033, 1.058, 1.085, 1.149, 1.159, OOM, OOM, OOM),
    },
    "lstm": {
        "h_DTR": (1.017, None, 1.032, None, 1.065, None, 1.301, None),
        "h_eq": (1.017, 1.027, 1.031, 1.042, 1.071, 1.159, 1.365, 1.550),
    },
}
# Constants, and the largest operator, as fractions of the peak: nothing fits in less.
FLOORS = {"densenet121": 0.081, "transformer": 0.095, "unet": 0.242, "lstm": 0.047}

_POLICIES: dict[str, rematfn.policies.Policy] = {
    "online": rematfn.policies.ON(),
    "guided": rematfn.policies.Guided(),
    "h_DTR, our engine": rematfn.policies.reference.DTR(),
}


def rows(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield a row for each trace and budget."""
    for name, reference in REFERENCE.items():
        path = folder / f"{name}.jsonl.gz"
        if not path.exists():
            yield {"trace": name, "budget": f"skipped: there is no {path}"}
            continue
        trace = rematfn.Trace.load(path)
        for i, fraction in enumerate(FRACTIONS):
            yield _row(trace, name, fraction, {h: values[i] for h, values in reference.items()})


def _row(
    trace: rematfn.Trace, name: str, fraction: float, reference: dict[str, float | str | None]
) -> dict[str, Any]:
    # The DTR simulator's peak, and so its budget, has the constants in it.
    whole = trace.peak_bytes + trace.constant_bytes
    budget = max(2, int(fraction * whole) - trace.constant_bytes)
    row: dict[str, Any] = {"trace": name, "budget": fraction}
    for policy_name, policy in _POLICIES.items():
        row[policy_name] = _overhead(trace, budget, policy)
    row |= {f"{h}, reference": value for h, value in reference.items()}
    known = [value for value in reference.values() if isinstance(value, float)]
    online = row["online"]
    if fraction <= FLOORS[name]:
        row["online at most the better reference"] = "below the floor"
    elif known:
        row["online at most the better reference"] = isinstance(online, float) and round(
            online, 3
        ) <= min(known)
    else:
        row["online at most the better reference"] = isinstance(online, float)
    return row


def _overhead(trace: rematfn.Trace, budget: int, policy: rematfn.policies.Policy) -> float | str:
    try:
        return 1 + rematfn.simulate(trace, budget, policy).replayed_cost
    except rematfn.BudgetError as error:
        return THRASH if "evict each other" in str(error) else OOM
