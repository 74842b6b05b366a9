# SPDX-License-Identifier: Apache-2.0
"""``python -m rematfn info``: what a bug report needs."""

import argparse
import os
import platform
import sys
from importlib import metadata
from typing import Any

import torch

from rematfn import _C
from rematfn._interop.compat import cores

_BESIDE = ("optree", "numpy", "functorch", "matplotlib")


def add(commands: Any) -> None:
    info = commands.add_parser(
        "info",
        help="versions and devices: for a bug report",
        description="Print versions, how the extension was built, devices and memory.",
    )
    info.set_defaults(command=_info)


def _info(options: argparse.Namespace) -> int:
    rows = [
        ("rematfn", _version("rematfn")),
        *_cores(),
        ("torch", torch.__version__),
        ("python", f"{platform.python_version()} at {sys.executable}"),
        ("system", platform.platform()),
        ("processor", f"{os.cpu_count()} cores, {torch.get_num_threads()} threads"),
        ("memory", f"{_C.format_bytes(_C.memory_left())} free"),
        *((name, _version(name)) for name in _BESIDE),
        ("accelerator", _accelerator()),
    ]
    width = max(len(name) for name, _ in rows)
    for name, text in rows:
        print(f"{name:<{width}}  {text}")
    return 0


def _accelerator() -> str:
    device = torch.accelerator.current_accelerator()
    count = torch.accelerator.device_count()
    if device is None or not count:
        return "none"
    torch.empty(0, device=device)  # its allocator is there from the first tensor on
    asks = "asks" if _C.asks_for_room(device) else "does not ask"
    return f"{count} of {device.type}, whose allocator {asks} levels for room"


def _cores() -> list[tuple[str, str]]:
    built = f"built with torch {_C.built_torch_version}; dispatch key {_C.dispatch_key}"
    others = [f"torch {minor}" for minor, path in cores().items() if str(path) != _C.__file__]
    return [("core", f"{_C.__file__}, {built}"), ("other cores", ", ".join(others) or "none")]


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"
