# SPDX-License-Identifier: Apache-2.0
"""Going through the operators in worker processes: a crash or a hang costs one operator."""

import dataclasses
import json
import os
import queue
import select
import subprocess
import sys
import threading
from collections.abc import Iterator

TIMEOUT = 7200.0  # seconds for one operator; the largest take minutes on a core of their own


@dataclasses.dataclass(frozen=True)
class Row:
    """What became of one operator under one kind and dtype."""

    operator: str
    kind: str
    dtype: str
    passed: int = 0
    refused: int = 0
    failed: int = 0
    failure: str = ""


class Worker:
    """A worker process, started anew after it has died."""

    def __init__(self, kinds: list[str], dtypes: list[str]) -> None:
        self._command = [sys.executable, "-m", "sweep.worker", ",".join(kinds), ",".join(dtypes)]
        self._process: subprocess.Popen[str] | None = None

    def sweep(self, operator: str) -> list[Row]:
        """Return the rows of an operator; a single one, if the process did not survive it."""
        process = self._running()
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(operator + "\n")
        process.stdin.flush()
        ready, _, _ = select.select([process.stdout], [], [], TIMEOUT)
        line = process.stdout.readline() if ready else ""
        if line:
            return [
                Row(operator, row["kind"], row["dtype"], **row["counts"], failure=row["failure"])
                for row in json.loads(line)
            ]
        if ready:  # the end of its output: it is dead, or about to be
            process.wait()
        self.stop()
        why = f"died with status {process.returncode}" if ready else f"took over {TIMEOUT:.0f} s"
        return [Row(operator, "every", "every", failed=1, failure=f"the process {why}")]

    def _running(self) -> subprocess.Popen[str]:
        if self._process is None:
            self._process = subprocess.Popen(
                self._command,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
        return self._process

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()  # closes its pipes, and waits
            self._process = None


def sweep_all(
    names: list[str], kinds: list[str], dtypes: list[str], jobs: int
) -> Iterator[list[Row]]:
    """Yield the rows of each operator, in the order in which they are done."""
    left: queue.SimpleQueue[str] = queue.SimpleQueue()
    done: queue.SimpleQueue[list[Row]] = queue.SimpleQueue()
    for name in names:
        left.put(name)

    def work() -> None:
        worker = Worker(kinds, dtypes)
        try:
            while True:
                done.put(worker.sweep(left.get_nowait()))
        except queue.Empty:
            worker.stop()

    for _ in range(jobs):
        threading.Thread(target=work, daemon=True).start()
    for _ in names:
        yield done.get()
