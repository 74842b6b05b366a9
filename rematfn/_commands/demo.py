# SPDX-License-Identifier: Apache-2.0
"""``python -m rematfn demo``."""

import argparse
import os
import re
import sys
from pathlib import Path
from typing import Any

import torch

from rematfn._transform.budget import parse_budget
from rematfn.demo.chargpt import Sizes


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
        type=_budget,
        default=0.3,
        help='bytes ("200MB", 4096), a fraction of the unconstrained peak (0.3), or "none"',
    )
    demo.add_argument(
        "--offload",
        nargs="?",
        const=True,
        default=False,
        type=_folder,
        metavar="FOLDER",
        help="values may be moved to a tier: to a file in FOLDER, or to where they go by default",
    )
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
        demo.add_argument(f"--{name}", type=_positive, default=default, help=meaning)
    demo.add_argument("--device", type=_device, default="cpu", help="cpu, or cuda if there is one")
    demo.add_argument("--seed", type=int, default=0, help="of weights, batches and dropout")
    demo.add_argument(
        "--png", type=_writable, default="rematfn-demo.png", help="where to save the picture"
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


def _budget(text: str) -> str | float | None:
    """Return the budget that a command line names; ``"none"`` is none."""
    # A shell hands over text only, so here, other than in remat(), "0.3" is a fraction.
    decimal = re.fullmatch(r"[-+]?(\d+\.\d*|\.\d+)(e[-+]?\d+)?", text.strip(), re.IGNORECASE)
    budget = None if text.strip().lower() == "none" else float(text) if decimal else text
    try:
        parse_budget(1 if text.strip() == "1" else budget, "{}")  # hardly one byte, as in remat()
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return budget


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"it must be a whole number above 0, got {text!r}")
    return int(text)


def _device(text: str) -> torch.device:
    """Return the CPU or the accelerator, if there is one."""
    accelerator = torch.accelerator.current_accelerator()
    name = "cuda" if accelerator is None else accelerator.type
    if not re.fullmatch(rf"(cpu|{name})(:[1-9]?\d)?", text):
        raise argparse.ArgumentTypeError(f"it must be cpu or {name}, got {text!r}")
    device = torch.device(text)
    count = torch.accelerator.device_count()
    if device.type != "cpu" and (device.index or 0) >= count:
        raise argparse.ArgumentTypeError(
            f"there is no {text}: torch {torch.__version__} sees {count} {name} devices;"
            " use --device cpu"
        )
    return device


def _folder(text: str) -> Path:
    path = Path(text)
    if not path.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {text!r}.")
    return path


def _writable(text: str) -> Path:
    """Return a path in a folder that exists."""
    if Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is a folder: name a file")
    return _folder(str(Path(text).parent)) / Path(text).name
