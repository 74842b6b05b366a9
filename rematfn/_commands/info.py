# SPDX-License-Identifier: Apache-2.0
"""``python -m rematfn info``: what a bug report needs."""

import argparse
import os
import platform
import shutil
import sys
from importlib import metadata
from typing import Any

import torch

import rematfn
from rematfn import _C
from rematfn._interop.compat import cores
from rematfn._transform.budget import format_bytes
from rematfn.errors import RematError

_BESIDE = ("optree", "numpy", "functorch", "matplotlib", "plotly")


def add(commands: Any) -> None:
    """Add the command to the parser's."""
    info = commands.add_parser(
        "info",
        help="versions, devices, and what the tiers carry: for a bug report",
        description="Print versions, how the extension was built, devices, memory, and bandwidths"
        " of the disk tier, measured now with a few megabytes.",
    )
    info.set_defaults(command=_info)


def _info(options: argparse.Namespace) -> int:
    accelerator = torch.accelerator.current_accelerator()
    count = torch.accelerator.device_count()
    rows = [
        ("rematfn", _version("rematfn")),
        *_cores(),
        ("torch", torch.__version__),
        ("python", f"{platform.python_version()} at {sys.executable}"),
        ("system", platform.platform()),
        ("processor", f"{_processor()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads"),
        ("memory", f"{format_bytes(_C.memory_left())} free"),
        *((name, _version(name)) for name in _BESIDE),
        ("accelerator", f"{count} of {accelerator.type}" if accelerator and count else "none"),
        *_disk(),
    ]
    width = max(len(name) for name, _ in rows)
    for name, text in rows:
        print(f"{name:<{width}}  {text}")
    return 0


def _cores() -> list[tuple[str, str]]:
    built = f"built with torch {_C.built_torch_version}; dispatch key {_C.dispatch_key}"
    others = [f"torch {minor}" for minor, path in cores().items() if str(path) != _C.__file__]
    return [("core", f"{_C.__file__}, {built}"), ("other cores", ", ".join(others) or "none")]


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            named = [line.partition(":")[2].strip() for line in file if "model name" in line]
        return named[0] if named else platform.processor()
    except OSError:
        return platform.processor() or platform.machine()


def _disk() -> list[tuple[str, str]]:
    try:
        disk = rematfn.Disk()
        x = torch.ones(1 << 22)
        g = rematfn.offload(_needs_four, 3 * x.nbytes + 1024, to=disk)
        for _ in range(2):
            g(x)
    except (RematError, OSError) as error:
        return [("disk tier", f"cannot be used: {str(error).partition(chr(10))[0]}")]
    carried = [
        "unknown" if rate is None else f"{rate / 1e6:,.0f} MB/s"
        for rate in (disk.bandwidth_out, disk.bandwidth_in)
    ]
    assert disk.folder is not None, "it has moved values"
    return [
        ("disk tier", f"{carried[0]} out, {carried[1]} in, in {disk.folder}"),
        ("free there", format_bytes(shutil.disk_usage(disk.folder).free)),
    ]


def _needs_four(x: torch.Tensor) -> torch.Tensor:
    a = x.sin()
    b = a.cos()
    c = b.exp()
    return a + b + c + c.sin()
