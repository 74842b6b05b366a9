# SPDX-License-Identifier: Apache-2.0
"""The command line: ``python -m rematfn demo``."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from rematfn._errors import RematError
from rematfn._transform.budget import parse_budget


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a subcommand; return the exit status: 0, or 1 if a promise was broken."""
    options = _parser().parse_args(arguments)
    command: Callable[[argparse.Namespace], int] = options.command
    return command(options)


def _demo(options: argparse.Namespace) -> int:
    if options.offload and options.device.type != "cpu":
        options.fail("--offload moves values on the CPU to a disk; it needs --device cpu")
    if options.width % options.heads:
        options.fail(f"--width {options.width} is not a multiple of --heads {options.heads}")
    # The profiler that counts memory announces itself on stderr; 6 is above all its log levels.
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    try:
        from rematfn.demo.train import Options, run_demo
    except ModuleNotFoundError as error:
        print(
            f"python -m rematfn demo: it needs {error.name}, which is not installed."
            " Install it with: pip install tqdm matplotlib",
            file=sys.stderr,
        )
        return 1
    if options.device.type == "cuda":
        # Without these, two eager runs need not agree bitwise either.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        report = run_demo(
            Options(
                budget=options.budget,
                steps=options.steps,
                layers=options.layers,
                batch=options.batch,
                width=options.width,
                heads=options.heads,
                context=options.context,
                device=str(options.device),
                seed=options.seed,
                png=options.png,
                offload=options.offload,
            )
        )
    except RematError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    print(report)
    print(f"picture: {options.png}")
    broken = report.broken_promises()
    for promise in broken:
        print(f"broken promise: {promise}", file=sys.stderr)
    return 1 if broken else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m rematfn", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
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
        help="move values to a disk where that is cheaper than to compute them again: to a file in"
        " FOLDER, or in the folder for temporary files",
    )
    demo.add_argument("--steps", type=_positive, default=60, help="training steps")
    demo.add_argument("--batch", type=_positive, default=8, help="excerpts in a batch")
    demo.add_argument("--layers", type=_positive, default=6, help="transformer blocks")
    demo.add_argument("--width", type=_positive, default=384, help="channels of the model")
    demo.add_argument("--heads", type=_positive, default=6, help="attention heads, dividing width")
    demo.add_argument("--context", type=_positive, default=256, help="characters in an excerpt")
    demo.add_argument("--device", type=_device, default="cpu", help="cpu, or cuda if there is one")
    demo.add_argument("--seed", type=int, default=0, help="of weights, batches and dropout")
    demo.add_argument(
        "--png", type=_writable, default="rematfn-demo.png", help="where to save the picture"
    )
    return parser


def _budget(text: str) -> str | float | None:
    # A shell hands over text only, so here, other than in remat(), "0.3" is a fraction.
    decimal = re.fullmatch(r"[-+]?(\d+\.\d*|\.\d+)(e[-+]?\d+)?", text.strip(), re.IGNORECASE)
    budget = None if text.strip().lower() == "none" else float(text) if decimal else text
    try:
        parse_budget(budget)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return budget


def _positive(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"it must be a whole number above 0, got {text!r}")
    return number


def _device(text: str) -> torch.device:
    try:
        device = torch.device(text)
    except RuntimeError:
        device = None
    accelerator = torch.accelerator.current_accelerator()
    name = "cuda" if accelerator is None else accelerator.type
    if device is None or device.type not in ("cpu", name):
        raise argparse.ArgumentTypeError(f"it must be cpu or {name}, got {text!r}")
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
        raise argparse.ArgumentTypeError(f"there is no folder {text!r}")
    return path


def _writable(text: str) -> Path:
    path = Path(text)
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {str(path.parent)!r}")
    return path


if __name__ == "__main__":
    sys.exit(main())
