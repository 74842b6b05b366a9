# SPDX-License-Identifier: Apache-2.0
"""What arguments of the command line mean."""

import argparse
import re
from collections.abc import Callable
from pathlib import Path

import torch

from rematfn._transform.budget import parse_budget


class CommandError(Exception):
    """A command cannot do what it was asked for; the message says why."""


def budget(text: str) -> str | float | None:
    """Return the budget that a command line names; ``"none"`` is none."""
    # A shell hands over text only, so here, other than in remat(), "0.3" is a fraction.
    decimal = re.fullmatch(r"[-+]?(\d+\.\d*|\.\d+)(e[-+]?\d+)?", text.strip(), re.IGNORECASE)
    budget = None if text.strip().lower() == "none" else float(text) if decimal else text
    try:
        parse_budget(1 if text.strip() == "1" else budget, "{}")  # hardly one byte, as in remat()
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error) + _order(text)) from None
    return budget


def _order(text: str) -> str:
    """Return what to say where an option has taken the script for its own argument."""
    return f"\nWrite {text} before the options." if ".py" in text else ""


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"it must be a whole number above 0, got {text!r}")
    return int(text)


def device(text: str) -> torch.device:
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


def add_offload(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--offload",
        nargs="?",
        const=True,
        default=False,
        type=_folder,
        metavar="FOLDER",
        help="values may be moved to a tier: to a file in FOLDER, or to where they go by default",
    )


def _folder(text: str) -> Path:
    path = Path(text)
    if not path.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {text!r}.{_order(text)}")
    return path


def writable(*endings: str) -> Callable[[str], Path]:
    """Return what reads a path in a folder that exists, with one of the endings if any."""

    def read(text: str) -> Path:
        if endings and not text.endswith(endings):
            raise argparse.ArgumentTypeError(f"it must end in {', '.join(endings)}, got {text!r}")
        if Path(text).is_dir():
            raise argparse.ArgumentTypeError(f"{text!r} is a folder: name a file")
        return _folder(str(Path(text).parent)) / Path(text).name

    return read
