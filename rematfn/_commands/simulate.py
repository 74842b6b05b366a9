# SPDX-License-Identifier: Apache-2.0
"""``python -m rematfn simulate``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import rematfn

from .arguments import CommandError, budget

_POLICIES = {
    "guided": rematfn.policies.Guided(),
    "on": rematfn.policies.ON(),
    "sqrt": rematfn.policies.Sqrt(),
    "memory": rematfn.policies.Memory(),
    "dtr": rematfn.policies.reference.DTR(),
    "lru": rematfn.policies.reference.LRU(),
}


def add(commands: Any) -> None:
    """Add the command to the parser's."""
    simulate = commands.add_parser(
        "simulate",
        help="what a budget would make of a trace",
        description="Run a trace in the format of the DTR simulator, as Trace.save() writes it,"
        " within a budget: what would be evicted and replayed.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    simulate.set_defaults(command=_simulate)
    simulate.add_argument("trace", type=Path, help="a file, .gz or not")
    simulate.add_argument("--budget", type=budget, default=0.5, help="bytes, or a fraction (0.3)")
    simulate.add_argument("--policy", choices=_POLICIES, default="guided", help="what goes first")


def _simulate(options: argparse.Namespace) -> int:
    try:
        trace = rematfn.Trace.load(options.trace)
    except (OSError, ValueError) as error:
        raise CommandError(str(error)) from None
    found = rematfn.simulate(trace, options.budget, _POLICIES[options.policy])
    print(trace)
    print(found)
    return 0
