# SPDX-License-Identifier: Apache-2.0
"""Where the sweep expects something else than bitwise equality, and why."""

from typing import Any

# Operators that give what happens to be in uninitialised memory, or read it, and why. They are
# compared with torch filling such memory, as it does when deterministic algorithms are asked for.
UNINITIALISED = {
    "empty": "its contents are undefined",
    "empty_like": "its contents are undefined",
    "empty_permuted": "its contents are undefined",
    "empty_strided": "its contents are undefined",
    "new_empty": "its contents are undefined",
    "new_empty_strided": "its contents are undefined",
    "resize_": "the contents it adds are undefined",
    "resize_as_": "the contents it adds are undefined",
    "linalg.lstsq": "LAPACK's gelsy is given an uninitialised vector of pivots, and reads it",
    "linalg.lstsq.grad_oriented": "LAPACK's gelsy is given an uninitialised vector of pivots",
}

# (operator, kind, dtype) -> reason. Each is expected to fail, and the sweep fails if it does not.
EXCEPTIONS: dict[tuple[str, str, str], str] = {}


def disagreements(rows: list[Any], complete: bool) -> list[str]:
    """Return what failed and is not listed, and what is listed and did not fail."""
    wrong = [
        f"{row.operator}, {row.kind}, {row.dtype}: {row.failure}"
        for row in rows
        if row.failed and (row.operator, row.kind, row.dtype) not in EXCEPTIONS
    ]
    failed = {(row.operator, row.kind, row.dtype) for row in rows if row.failed}
    swept = {(row.operator, row.kind, row.dtype) for row in rows}
    wrong += [
        f"{', '.join(entry)}: listed as an exception, and passed"
        for entry in EXCEPTIONS
        if entry not in failed and (complete or entry in swept)
    ]
    return wrong
