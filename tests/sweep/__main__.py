# SPDX-License-Identifier: Apache-2.0
"""`make sweep`: sweep the operator database, and write docs/operators.md from what was found."""

import argparse
import re
import sys
import time
from pathlib import Path

from tqdm import tqdm

from .kinds import KINDS
from .page import page
from .run import Row, sweep_all
from .samples import DTYPES, operators

PAGE = Path(__file__).parent.parent.parent / "docs" / "operators.md"


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make sweep", description=__doc__)
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--only", default="", metavar="REGEX", help="operators to sweep")
    for option, table in (("--kinds", KINDS), ("--dtypes", DTYPES)):
        parser.add_argument(
            option,
            type=lambda text: text.split(","),
            default=list(table),
            metavar="A,B",
            help=f"of {', '.join(table)}".replace("%", "%%"),
        )
    options = parser.parse_args(arguments)
    for name in (*options.kinds, *options.dtypes):
        if name not in {**KINDS, **DTYPES}:
            parser.error(f"{name} is neither a kind nor a dtype")
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parsed(arguments)
    names = [name for name in operators() if re.search(options.only, name)]
    everything = (
        len(names) == len(operators())
        and options.kinds == list(KINDS)
        and options.dtypes == list(DTYPES)
    )
    rows: list[Row] = []
    began = time.monotonic()
    with tqdm(total=len(names), unit="operator") as bar:
        for found in sweep_all(names, options.kinds, options.dtypes, options.jobs):
            rows += found
            for row in found:
                if row.failed:
                    bar.write(f"{row.operator}, {row.kind}, {row.dtype}: {row.failure}")
            bar.set_postfix(passed=sum(r.passed for r in rows), failed=sum(r.failed for r in rows))
            bar.update()
    failed = any(row.failed for row in rows)
    if everything:
        PAGE.write_text(page(rows, time.monotonic() - began, options.jobs))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
