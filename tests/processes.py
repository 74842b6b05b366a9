# SPDX-License-Identifier: Apache-2.0
"""Threads and processes of a test's own."""

from __future__ import annotations

import inspect
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from torch import distributed

import rematfn

R = TypeVar("R")
SECONDS = 300  # that a script may take, on a busy machine


def together(*works: Callable[[], Any]) -> list[Any]:
    """Run all at once, each on a thread of its own; return what they return."""
    start = threading.Barrier(len(works), timeout=60)

    def run(work: Callable[[], Any]) -> Any:
        start.wait()
        return work()

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(len(works)) as pool:
            return [future.result(360) for future in [pool.submit(run, w) for w in works]]
    finally:
        sys.setswitchinterval(before)


def in_a_process(function: Callable[[], object], timeout: float = 360) -> None:
    """Call a function of a test file in an interpreter of its own. A deadlock is a failure."""
    file, here = Path(inspect.getfile(function)), Path(__file__).parent
    folders = [file.parent, here, Path(rematfn.__file__).parent.parent]
    found = subprocess.run(
        [sys.executable, "-c", f"import {file.stem}; {file.stem}.{function.__name__}()"],
        cwd=here,  # not where another build of the package may lie
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, folders))},
        timeout=timeout,
        capture_output=True,
        text=True,
    )
    assert found.returncode == 0, found.stdout + found.stderr


def in_ranks(function: Callable[[], object], folder: Path, ranks: int = 2) -> None:
    """Call a function of a test file in so many interpreters: a process group over gloo.

    Each ends with the group's last collective, so that none leaves the others alone.
    """
    file, here = Path(inspect.getfile(function)), Path(__file__).parent
    folders = [file.parent, here, Path(rematfn.__file__).parent.parent]
    script = f"import processes, {file.stem} as tests; processes.as_rank(tests.{function.__name__})"
    started = [
        subprocess.Popen(
            [sys.executable, "-c", script],
            cwd=here,
            env={
                **environment(),
                "PYTHONPATH": os.pathsep.join(map(str, folders)),
                "RANK": str(rank),
                "WORLD_SIZE": str(ranks),
                "STORE": str(folder / "store"),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(ranks)
    ]
    ended = await_all(started, 2 * SECONDS)
    assert all(one.code == 0 for one in ended), "\n---\n".join(one.out for one in ended)


def as_rank(function: Callable[[], object]) -> None:
    """Call `function` in the process group that the environment tells of."""
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo",
        f"file://{os.environ['STORE']}",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=SECONDS),
    )
    function()
    rematfn.testing.check()
    distributed.destroy_process_group()


@dataclass(frozen=True)
class Ended:
    """How a script ended."""

    code: int
    out: str
    err: str


def await_all(started: Sequence[subprocess.Popen[str]], seconds: float) -> list[Ended]:
    """Return how all of them ended. None goes on when they have taken ``seconds`` together."""
    deadline = time.monotonic() + seconds
    try:
        said = [one.communicate(timeout=max(0, deadline - time.monotonic())) for one in started]
    finally:
        for one in started:
            one.kill()
    return [
        Ended(one.returncode, out or "", err or "")
        for one, (out, err) in zip(started, said, strict=True)
    ]


def environment() -> dict[str, str]:
    package = str(Path(rematfn.__file__).parent.parent)
    return {**os.environ, "PYTHONPATH": package, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


def fresh(script: Path, argument: str) -> Ended:
    """Run a script in an interpreter of its own, again if torch aborts it."""
    command = [sys.executable, str(script), argument]
    for _ in range(4):
        found = subprocess.run(
            command, env=environment(), timeout=SECONDS, capture_output=True, text=True
        )
        ended = Ended(found.returncode, found.stdout, found.stderr)
        if not aborted_by_torch(ended):
            break
    return ended


_ZYGOTE = """
import json, os, signal, sys
import torch, rematfn
jobs, mine, codes, running = json.load(open(sys.argv[1])), None, {}, {}
while jobs or running:
    while jobs and len(running) < 2:
        job = jobs.pop()
        child = os.fork()
        if child == 0:
            mine = job
            break
        running[child] = job
    if mine is not None:
        break
    child, status = os.wait()
    codes[running.pop(child)[0]] = os.waitstatus_to_exitcode(status)
if mine is None:
    json.dump(codes, open(sys.argv[2], "w"))
    sys.exit()
for name, stream in (("out", 1), ("err", 2)):
    os.dup2(os.open(f"{mine[0]}.{name}", os.O_WRONLY | os.O_CREAT), stream)
signal.signal(signal.SIGALRM, signal.SIG_DFL)
sys.argv = mine[1:]
_source = compile(open(sys.argv[0]).read(), sys.argv[0], "exec")
del json, jobs, running, codes, job, child
exec(_source)
"""


def forked(
    folder: Path, jobs: Mapping[str, tuple[str, str]], variables: Mapping[str, str] | None = None
) -> dict[str, Ended]:
    """Run scripts, each with an argument, in children of one process; return how each ended.

    That process has imported torch and done nothing else; its children end by the interpreter's
    usual way out.
    """
    scripts = {name: folder / f"{number}.py" for number, name in enumerate(jobs)}
    for name, script in scripts.items():
        script.write_text(jobs[name][0])
    listed = [[str(script), str(script), jobs[name][1]] for name, script in scripts.items()]
    (folder / "jobs").write_text(json.dumps(listed))
    subprocess.run(
        [sys.executable, "-c", _ZYGOTE, str(folder / "jobs"), str(folder / "codes")],
        env=variables or environment(),
        timeout=10 * SECONDS,
        check=True,
    )
    codes = json.loads((folder / "codes").read_text())
    found = {}
    for name, script in scripts.items():
        out, err = (Path(f"{script}.{end}").read_text() for end in ("out", "err"))
        ended = Ended(codes[str(script)], out, err)
        found[name] = fresh(script, jobs[name][1]) if aborted_by_torch(ended) else ended
    return found


def once(factory: pytest.TempPathFactory, name: str, work: Callable[[], R]) -> R:
    """Return what ``work()`` returns, which one of the processes that run the tests calls.

    The others wait for it: a module's fixture would do the same in each of them.
    """
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return work()
    folder = factory.getbasetemp().parent / f"once-{name}"
    done = folder / "done"
    try:
        folder.mkdir()
    except FileExistsError:
        deadline = time.monotonic() + 10 * SECONDS
        while not done.exists():
            assert time.monotonic() < deadline, f"nobody has come to the end of {name}"
            time.sleep(0.1)
    else:
        try:
            outcome: tuple[Any, BaseException | None] = (work(), None)
        except BaseException as error:
            outcome = (None, error)
        (folder / "being written").write_bytes(pickle.dumps(outcome))
        (folder / "being written").rename(done)
    result, error = pickle.loads(done.read_bytes())
    if error is not None:
        raise error
    return result  # type: ignore[no-any-return]


def aborted_by_torch(ended: Ended) -> bool:
    """Return whether a script ended as torch 2.12 without rematfn lets some end.

    A program of torch alone aborts in 1 of 20 runs if other threads than main ran its backwards.
    2.13 does not.
    """
    said = "terminate called without an active exception"
    return torch.__version__ < "2.13" and ended.code == -signal.SIGABRT and said in ended.err


def in_a_child(work: Callable[[], None]) -> int:
    """Fork, run `work`, and return the child's exit status."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            work()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


quiet = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")


def forking(test: Callable[..., None]) -> Callable[..., None]:
    """Mark a test that forks this process, whose threads are then gone."""
    return pytest.mark.forking(quiet(test))
