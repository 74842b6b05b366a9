# SPDX-License-Identifier: Apache-2.0
"""Each module of this folder runs in a process of its own, which has the fake device."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import fake_device
import pytest
import torch

ON_DEVICE = "REMATFN_FAKE_DEVICE"  # set it to choose single tests from the command line


if ON_DEVICE in os.environ:
    fake_device.load()

    @pytest.fixture(autouse=True)
    def the_device_is_empty_again() -> Iterator[None]:
        """Check that a test leaves no bytes on the device, and that no kernel of it has failed."""
        torch.accelerator.synchronize()
        before = torch.accelerator.memory_allocated()
        yield
        torch.accelerator.synchronize()
        # Threads of autograd let go of what they ran at some time after its end.
        until = time.monotonic() + 30
        while torch.accelerator.memory_allocated() > before and time.monotonic() < until:
            gc.collect()
            time.sleep(0.001)
        assert torch.accelerator.memory_allocated() <= before

else:

    def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> Module:
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
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(self.path)]
        environment = {**os.environ, ON_DEVICE: "1", "OMP_NUM_THREADS": "1"}
        for name in [n for n in environment if n.startswith("PYTEST_")]:
            del environment[name]  # of the session around
        found = subprocess.run(
            command,
            cwd=self.config.rootpath,
            env=environment,
            capture_output=True,
            text=True,
            timeout=1800,
        )
        if found.returncode:
            pytest.fail(found.stdout + found.stderr, pytrace=False)
