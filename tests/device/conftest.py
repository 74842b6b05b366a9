# SPDX-License-Identifier: Apache-2.0
"""Each module of this folder runs in a process of its own, which has the fake device.

With `--device` all run in this one, on that device: `pytest tests/device --device cuda`.
"""

from __future__ import annotations

import gc
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import fake_device
import pytest
import torch
from processes import forked

from rematfn import _C


def pytest_addoption(parser: pytest.Parser) -> None:
    help = "run tests/device on it in this process: fake, silent (does not ask for room), cuda"
    parser.addoption("--device", help=help)


def pytest_configure(config: pytest.Config) -> None:
    if device := config.getoption("--device", None):
        fake_device.load(device)


@pytest.fixture(autouse=True)
def the_device_is_empty_again() -> Iterator[None]:
    """Check that a test leaves no bytes on the device, and that no kernel of it has failed."""
    before = allocated()
    yield
    # Threads of autograd free what they ran at some time after its end.
    until = time.monotonic() + 30
    while allocated() > before and time.monotonic() < until:
        gc.collect()
        time.sleep(0.001)
    assert allocated() <= before


def allocated() -> int:
    torch.accelerator.synchronize()
    if fake_device.DEVICE == "cuda":
        torch._C._cuda_clearCublasWorkspaces()  # kept for each stream; cuBLASLt's stay
    return torch.accelerator.memory_allocated() - _C.workspace_bytes()


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> Module | None:
    if parent.config.getoption("--device", None):
        return None  # as anywhere else
    return Module.from_parent(parent, path=module_path)


class Module(pytest.File):
    """A module whose tests are one item here."""

    def collect(self) -> list[pytest.Item]:
        return [InItsOwnProcess.from_parent(self, name="on_the_fake_device")]


class InItsOwnProcess(pytest.Item):
    def runtest(self) -> None:
        if fake_device.compiler() is None:
            pytest.skip("needs a C++ compiler")
        fake_device.built()
        device = "silent" if "silent" in self.path.stem else "fake"
        command = ["-q", "-p", "no:cacheprovider", "--device", device, str(self.path)]
        script = f"""
import os, pytest, sys
for name in [n for n in os.environ if n.startswith("PYTEST_")]:
    del os.environ[name]  # of the session around
os.chdir({str(self.config.rootpath)!r})
sys.exit(pytest.main({command}))
"""
        with tempfile.TemporaryDirectory() as folder:
            found = forked(Path(folder), {"it": (script, "")})["it"]
        if found.code:
            pytest.fail(found.out + found.err, pytrace=False)
