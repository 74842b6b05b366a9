# SPDX-License-Identifier: Apache-2.0
"""``python -m rematfn demo``."""

import argparse
import os
import sys
from typing import Any

import torch

from rematfn.demo.chargpt import Sizes

from .arguments import add_offload, budget, device, positive, writable


def add(commands: Any) -> None:
    demo = commands.add_parser(
        "demo",
        help="train a GPT inside a memory budget and check every promise",
        description="Train a character-level GPT on Python's reference manual, with its"
        " intermediates inside a budget; compare gradients, memory and time with eager. Exits"
        " with status 1, and says why, if rematfn breaks a promise.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    demo.set_defaults(command=_demo, fail=demo.error)
    demo.add_argument(
        "--budget",
        type=budget,
        default=0.3,
        help='bytes ("200MB", 4096), a fraction of the unconstrained peak (0.3), or "none"',
    )
    add_offload(demo)
    numbers = {
        "steps": (60, "training steps"),
        "pairs": (20, "about so many of them are timed beside eager, and compared"),
        "batch": (8, "excerpts in a batch"),
        "layers": (Sizes.layers, "transformer blocks"),
        "width": (Sizes.width, "channels of the model"),
        "heads": (Sizes.heads, "attention heads, dividing width"),
        "context": (Sizes.context, "characters in an excerpt"),
    }
    for name, (default, meaning) in numbers.items():
        demo.add_argument(f"--{name}", type=positive, default=default, help=meaning)
    demo.add_argument("--device", type=device, default="cpu", help="cpu, or cuda if there is one")
    demo.add_argument("--seed", type=int, default=0, help="of weights, batches and dropout")
    demo.add_argument(
        "--png", type=writable(), default="rematfn-demo.png", help="where to save the picture"
    )


def _demo(options: argparse.Namespace) -> int:
    if options.width % options.heads:
        options.fail(f"--width {options.width} is not a multiple of --heads {options.heads}")
    # The profiler that counts memory announces itself on stderr; 6 is above all its log levels.
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    from rematfn.demo.train import run_demo  # which needs libraries that the other commands do not

    if options.device.type == "cuda":
        # Without these, two eager runs need not agree bitwise either.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)
    asked = vars(options).items()
    report = run_demo(**{name: x for name, x in asked if name not in ("command", "fail")})
    print(report)
    print(f"picture: {options.png}")
    broken = report.broken_promises()
    for promise in broken:
        print(f"broken promise: {promise}", file=sys.stderr)
    return 1 if broken else 0
