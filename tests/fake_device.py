# SPDX-License-Identifier: Apache-2.0
"""A device without hardware, for what needs one: `tests/device/README.md` says what it is.

Once loaded, it is there for the rest of the process, and is torch's accelerator: pinned memory is
the device's, autograd has a thread for it, dropout takes another way. So only processes that are
there for it load it.
"""

import ctypes
import functools
import gc
import os
import shlex
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from models import ENVIRONMENT, SANITIZE, TORCH, built_once

from rematfn import _C

SOURCES = Path(__file__).with_name("device")

DEVICE = "fake"  # what the tests of devices run on: `--device` names another
_library: Any = None


def compiler() -> str | None:
    """Return the C++ compiler's path, if there is one."""
    return shutil.which(os.environ.get("CXX", "c++"))


def built() -> Path:
    """Compile the device, unless that has been done; return the library.

    As one unit: most of the time goes into torch's headers.
    """
    abi = int(torch.compiled_with_cxx11_abi())
    options = ["-std=c++20", "-O1", "-fPIC", "-shared", "-Wall", "-Wextra", "-Wno-unused-parameter"]
    options += [f"-D_GLIBCXX_USE_CXX11_ABI={abi}", f"-isystem{TORCH / 'include'}", f"-I{SOURCES}"]
    options += [f"-L{TORCH / 'lib'}", f"-Wl,-rpath,{TORCH / 'lib'}"]
    options += SANITIZE
    libraries = ["-ltorch_cpu", "-lc10", "-pthread"]

    def make(library: Path) -> None:
        unit = "".join(f'#include "{path}"\n' for path in sorted(SOURCES.glob("*.cpp")))
        command = [*shlex.split(os.environ.get("CXX", "c++")), *options, "-x", "c++", "-"]
        command += ["-x", "none", *libraries, "-o", str(library)]
        subprocess.run(command, input=unit, text=True, check=True, env=ENVIRONMENT)

    return built_once("fake_device", options, sorted(SOURCES.glob("*.[ch]*")), make)


def load(device: str = "fake") -> None:
    """Make the device known to torch in this process, as ``"fake"``; or take a real one for it.

    As ``"silent"`` it is a fake one whose allocator does not ask levels for room.
    """
    global _library, DEVICE
    asks = device != "silent"
    DEVICE = device if asks else "fake"
    if _library is not None or DEVICE != "fake":
        return
    _library = ctypes.CDLL(str(built()))
    if asks:
        _library.fake_tell_freed(ctypes.c_void_p(_C.testing.have_asked()))
    _library.fake_begin_capture.restype = ctypes.c_void_p
    _library.fake_close_gate.restype = ctypes.c_void_p
    _library.fake_pinned_bytes.restype = ctypes.c_size_t
    torch.utils.rename_privateuse1_backend("fake")
    torch._register_device_module("fake", _Module("torch.fake"))


class _Module(ModuleType):
    """What torch looks for under ``torch.fake``."""

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def is_initialized() -> bool:
        return True

    @staticmethod
    def _lazy_init() -> None:
        """Tell torch 2.11 that there is something for `torch.accelerator.synchronize` to wait for.

        It waits for no device that was not initialised, and has a device without this function for
        one.
        """

    @staticmethod
    def device_count() -> int:
        return 1

    @staticmethod
    def current_device() -> int:
        return 0

    @staticmethod
    def get_amp_supported_dtype() -> list[torch.dtype]:
        return [torch.bfloat16]

    @staticmethod
    def _is_in_bad_fork() -> bool:
        return False

    @staticmethod
    def manual_seed_all(seed: int) -> None:
        generator().manual_seed(seed)

    manual_seed = manual_seed_all

    @staticmethod
    def get_rng_state(device: Any = None) -> torch.Tensor:
        return generator().get_state()

    @staticmethod
    def set_rng_state(state: torch.Tensor, device: Any = None) -> None:
        generator().set_state(state)


def generator() -> torch.Generator:
    """Return the device's default generator."""
    return torch.ops.fake_device.default_generator()


def assert_comes_empty(host: Any) -> None:
    """Threads of autograd free what they ran at some time after its end."""
    until = time.monotonic() + 30
    gc.collect()
    while host.held_bytes > 0 and time.monotonic() < until:
        time.sleep(0.001)
        gc.collect()
    assert host.held_bytes == 0


# --- values of one size ---------------------------------------------------------------------------

ONE = 1 << 20  # bytes of each value


def chain(x: torch.Tensor) -> torch.Tensor:
    """Eight values that are read again at the end."""
    kept = []
    for _ in range(8):
        x = (x * 1.5).sin()
        kept.append(x)
    return torch.stack([y.sum() for y in kept])


def big() -> torch.Tensor:
    return torch.linspace(0, 1, ONE // 4)


# --- what only a fake device can do ---------------------------------------------------------------


def _only_fake(what: str) -> None:
    if DEVICE != "fake":
        import pytest

        pytest.skip(f"only the fake device {what}")


@contextmanager
def delays(seed: int, most: int = 500) -> Iterator[None]:
    """Have one job in four, on each stream, begin up to `most` us late; not on a real device."""
    if DEVICE != "fake":
        yield
        return
    _library.fake_delay(ctypes.c_uint64(seed), most)
    try:
        yield
    finally:
        _library.fake_delay(ctypes.c_uint64(0), 0)


_LONG = 20_000_000  # cycles, some hundredths of a second


@contextmanager
def stopped(stream: torch.Stream | None = None) -> Iterator[None]:
    """Stop a stream (the current one) where its queue ends now, until the block is left.

    Whoever waits for the stream within the block waits for ever. Before it goes on, others get the
    time to overtake it, if they can. One of a real device has a long kernel to run.
    """
    stream = stream or torch.accelerator.current_stream()
    if DEVICE != "fake":
        with stream:
            torch.get_device_module(DEVICE)._sleep(_LONG)
        yield
        return
    gate = _library.fake_close_gate(ctypes.c_int64(stream.stream_id))
    try:
        yield
        time.sleep(0.02)
    finally:
        _library.fake_open_gate(ctypes.c_void_p(gate))


@contextmanager
def memory_limit(nbytes: int) -> Iterator[None]:
    """Let the device have only so many bytes for the while."""
    _only_fake("has less memory when told")
    before = torch.accelerator.get_memory_info()[1]
    _library.fake_limit_memory(ctypes.c_size_t(nbytes))
    try:
        yield
    finally:
        _library.fake_limit_memory(ctypes.c_size_t(before))


@contextmanager
def room_for(values: int) -> Iterator[None]:
    torch.accelerator.synchronize()
    with memory_limit(torch.accelerator.memory_allocated() + values * ONE + 4096):
        yield


@contextmanager
def failed() -> Iterator[None]:
    """Have the device refuse all that concerns events for the while, as after a kernel's assert."""
    _only_fake("fails when told")
    _library.fake_fail(True)
    try:
        yield
    finally:
        _library.fake_fail(False)


@contextmanager
def captured() -> Iterator[Callable[[], None]]:
    """Capture what runs in a graph for the while; what is yielded replays it."""
    torch.accelerator.synchronize()
    if DEVICE != "fake":
        real = torch.cuda.CUDAGraph()
        with torch.cuda.graph(real):
            yield real.replay
        return
    stream = _stream_of_captures()
    graph = ctypes.c_void_p(_library.fake_begin_capture(ctypes.c_int64(stream.stream_id)))
    try:
        with stream:
            yield lambda: _library.fake_replay(
                graph, ctypes.c_int64(torch.accelerator.current_stream().stream_id)
            )
    finally:
        _library.fake_end_capture()


@functools.cache
def _stream_of_captures() -> torch.Stream:
    return torch.Stream(DEVICE)


def pinned_bytes() -> int:
    """Return how much memory of the host is pinned and in use."""
    _only_fake("tells how much is pinned")
    return int(_library.fake_pinned_bytes())


@contextmanager
def pinned_limit(nbytes: int) -> Iterator[None]:
    """Let only so many bytes more be pinned for the while."""
    _library.fake_limit_pinned(ctypes.c_size_t(pinned_bytes() + nbytes))
    try:
        yield
    finally:
        _library.fake_limit_pinned(ctypes.c_size_t(1 << 33))
