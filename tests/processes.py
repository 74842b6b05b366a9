# SPDX-License-Identifier: Apache-2.0
"""Threads and processes of a test's own."""

import functools
import inspect
import json
import os
import pickle
import select
import signal
import subprocess
import sys
import tempfile
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
# What a process imports before its children are forked: torch's compiler, which the first seed or
# optimizer imports, and which would be most of the time of most children. Where it is imported an
# interrupt that nobody catches ends a process in another way: of that nothing is imported.
COMPILER = ("torch._dynamo",)


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


def _calling(function: Callable[[], object], how: str) -> str:
    """Return a script that calls a function of a test file."""
    file, here = Path(inspect.getfile(function)), Path(__file__).parent
    call = how.format(f"{file.stem}.{function.__name__}")
    folders = [str(file.parent), str(here)]
    return f"import sys\nsys.path[:0] = {folders}\nimport processes, {file.stem}\n{call}\n"


def in_a_process(
    test: Callable[[], object], modules: Sequence[str] = COMPILER
) -> Callable[[], None]:
    """Have a test run in a process of its own. A deadlock is a failure."""

    @functools.wraps(test)
    def run() -> None:
        with tempfile.TemporaryDirectory() as folder:
            jobs = {"it": (_calling(test, "{}.__wrapped__()"), "")}
            ended = forked(Path(folder), jobs, modules, seconds=360)["it"]
        assert ended.code == 0, f"exit code {ended.code}\n{ended.out}{ended.err}"

    return run


def in_ranks(function: Callable[[], object], folder: Path) -> None:
    """Call a function of a test file in two processes: a process group over gloo.

    Each ends with the group's last collective, so that neither leaves the other alone.
    """
    script = _calling(function, f"processes.as_rank({{}}, {str(folder / 'store')!r})")
    jobs = {rank: (script, rank) for rank in ("0", "1")}
    ended = forked(folder, jobs, seconds=4 * SECONDS).values()
    said = "\n---\n".join(f"exit code {one.code}\n{one.out}{one.err}" for one in ended)
    assert all(one.code == 0 for one in ended), said


def as_rank(function: Callable[[], object], store: str) -> None:
    """Call `function` in the process group whose rank is the script's argument."""
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo",
        f"file://{store}",
        rank=int(sys.argv[1]),
        world_size=2,
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


def environment() -> dict[str, str]:
    package = str(Path(rematfn.__file__).parent.parent)
    own = {"PYTHONPATH": package, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    # From 3.12 on Python warns of a fork of a process that has threads.
    own["PYTHONWARNINGS"] = "ignore:This process:DeprecationWarning"
    return os.environ | own


def python(*arguments: str, cwd: Path | None = None) -> Ended:
    """Run this interpreter, with our package."""
    found = subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env=environment(),
        timeout=SECONDS,
        capture_output=True,
        text=True,
    )
    return Ended(found.returncode, found.stdout, found.stderr)


def fresh(script: Path, argument: str) -> Ended:
    """Run a script in an interpreter of its own, again if torch aborts it."""
    for _ in range(4):
        ended = python(str(script), argument)
        if not aborted_by_torch(ended):
            break
    return ended


_ZYGOTE = """
import faulthandler, gc, json, os, signal, sys
if not sys.path[0]:
    del sys.path[0]  # the current folder may hold another build of the core than PYTHONPATH
import torch, rematfn
for module in sys.argv[1:]:
    __import__(module)
gc.collect()
gc.freeze()  # torch's own objects, or half of a child's time goes into its last collections
mine = None
for line in sys.stdin:
    jobs, codes, running = json.loads(line), {}, {}
    while mine is None and (jobs or running):
        while jobs and len(running) < 2:
            job = jobs.pop()
            child = os.fork()
            if child == 0:
                mine = job
                break
            running[child] = job
        else:
            child, status = os.wait()
            codes[running.pop(child)[0]] = os.waitstatus_to_exitcode(status)
    if mine is not None:
        break
    print(json.dumps(codes), flush=True)
else:
    sys.exit()
os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
for name, stream in (("out", 1), ("err", 2)):
    os.dup2(os.open(f"{mine[0]}.{name}", os.O_WRONLY | os.O_CREAT), stream)
faulthandler.enable()
signal.signal(signal.SIGALRM, signal.SIG_DFL)
sys.argv = mine
_source = compile(open(sys.argv[0]).read(), sys.argv[0], "exec")
del gc, json, jobs, running, codes, job, child, line, mine
exec(_source)
"""


@functools.cache
def _zygote(*modules: str) -> subprocess.Popen[str]:
    """Return a process that has imported these too. It ends with its standard input."""
    return subprocess.Popen(
        [sys.executable, "-c", _ZYGOTE, *modules],
        env=environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def forked(
    folder: Path,
    jobs: Mapping[str, tuple[str, str]],
    modules: Sequence[str] = COMPILER,
    seconds: float = 10 * SECONDS,
) -> dict[str, Ended]:
    """Run scripts, each with an argument, in children of one process; return how each ended.

    That process has imported torch, and ``modules``, and done nothing else. Its children end by the
    interpreter's usual way out, where collections do not look through what was imported there. Two
    run at a time.
    """
    scripts = {name: folder / f"{number}.py" for number, name in enumerate(jobs)}
    for name, script in scripts.items():
        script.write_text(jobs[name][0])
    listed = [[str(script), jobs[name][1]] for name, script in scripts.items()]
    zygote, codes = _zygote(*modules), {}
    assert zygote.stdin is not None
    assert zygote.stdout is not None
    try:
        zygote.stdin.write(json.dumps(listed) + "\n")
        zygote.stdin.flush()
        if select.select([zygote.stdout], [], [], seconds)[0]:
            codes = json.loads(zygote.stdout.readline())
    finally:
        if not codes:
            _zygote.cache_clear()
            os.killpg(zygote.pid, signal.SIGKILL)
            zygote.communicate()
    assert codes, f"not at an end after {seconds} seconds"
    found = {}
    for name, script in scripts.items():
        out, err = (Path(f"{script}.{end}").read_text() for end in ("out", "err"))
        ended = Ended(codes[str(script)], out, err)
        found[name] = fresh(script, jobs[name][1]) if aborted_by_torch(ended) else ended
    return found


def once(factory: pytest.TempPathFactory, name: str, work: Callable[[Path], R]) -> R:
    """Return what ``work`` returns, which one of the processes that run the tests gives a folder.

    The others wait for it: a module's fixture would do the same in each of them.
    """
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return work(factory.mktemp(name))
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
            outcome: tuple[Any, BaseException | None] = (work(factory.mktemp(name)), None)
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


# An interrupt that Python serves while it clears a weak reference, or in a callback of the garbage
# collector (hypothesis has one), is lost, and told of.
interrupted = pytest.mark.filterwarnings(
    "ignore:Exception ignored in. .function (WeakSet|gc_):pytest.PytestUnraisableExceptionWarning"
)
quiet = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")


def forking(test: Callable[..., None]) -> Callable[..., None]:
    """Mark a test that forks this process, whose threads are then gone."""
    return pytest.mark.forking(quiet(test))
