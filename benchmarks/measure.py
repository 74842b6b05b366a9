# SPDX-License-Identifier: Apache-2.0
"""What the benchmarks share: fair timing in one process, and tables that say where they ran."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any, ParamSpec, TypeVar

import torch
from tqdm import tqdm

RESULTS = Path(__file__).parent / "results"
P = ParamSpec("P")
R = TypeVar("R")


def interleaved(
    candidates: Mapping[str, Callable[[], float]], repeats: int
) -> dict[str, list[float]]:
    """Run the candidates in turn, ``repeats`` times; return the seconds that each call reports.

    Every round starts with another candidate, so that a machine that warms up, slows down or is
    shared treats all alike. Compare entries of one round with each other, then take the median.

    A candidate runs twice in its turn, and the second time counts: as in training, a step then
    finds the memory that one of its own kind has left. After another kind's it would first have to
    ask the system for pages.
    """
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    names = list(candidates)
    for round_ in tqdm(range(repeats), desc=" / ".join(names), leave=False):
        start = round_ % len(names)
        for name in names[start:] + names[:start]:
            candidates[name]()
            seconds[name].append(candidates[name]())
    return seconds


def compared(seconds: Sequence[float], eager: Sequence[float]) -> dict[str, float]:
    """Return the ratios of the rounds: their median, the least and the most."""
    ratios = [a / b for a, b in zip(seconds, eager, strict=True)]
    return {"time / eager": median(ratios), "least": min(ratios), "most": max(ratios)}


class OthersLoad:
    """How many cores others kept busy while a ``with`` block ran: what a timing shared them with.

    Attributes:
        cores: The figure, when the block is over; None where the system does not tell. The
            system's own threads count, those that serve a disk among them.
    """

    cores: float | None = None

    def __enter__(self) -> OthersLoad:
        self._start = self._now()
        return self

    def __exit__(self, *exception: object) -> None:
        start, end = self._start, self._now()
        if start is not None and end is not None and end[0] > start[0]:
            self.cores = max(0.0, (end[1] - start[1]) / (end[0] - start[0]))

    @staticmethod
    def _now() -> tuple[float, float] | None:
        """Return the time, and the seconds of processors that were not ours."""
        try:
            line = Path("/proc/stat").read_text().splitlines()[0]
        except OSError:
            return None
        user, nice, system, _, _, irq, soft, steal = (int(x) for x in line.split()[1:9])
        busy = (user + nice + system + irq + soft + steal) / os.sysconf("SC_CLK_TCK")
        return time.perf_counter(), busy - time.process_time()


def measured_parts(
    script: str, parts: Sequence[str], arguments: Sequence[str], path: Path
) -> dict[str, Any]:
    """Measure each part in a process of its own; return the records, by part.

    They are in ``path`` after each row; what is not measured stays as it was there.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    for part in parts:
        for record in in_a_process(script, part, arguments):
            results[part] = record
            path.write_text(json.dumps(results, indent=1) + "\n")
            print(part, record["rows"][-1], flush=True)
    return results


def in_a_process(script: str, part: str, arguments: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield what a fresh process of ``script`` finds out about a part, as far as it has come.

    It is run with ``--part``, and prints a line of JSON for the head of the record, and one for
    each of its rows.
    """
    command = [sys.executable, script, *arguments, "--part", part]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        record = {**json.loads(process.stdout.readline()), "rows": []}
        for line in process.stdout:
            record["rows"].append(json.loads(line))
            yield record
    if process.returncode:
        raise RuntimeError(f"{command} ended with status {process.returncode}")


def in_fresh_process(f: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Return what ``f`` does in a process of its own, which nothing before has touched."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(f, *args, **kwargs).result()


def print_found(found: Iterable[Mapping[str, Any]]) -> None:
    """Print the head of a record and its rows, for :func:`in_a_process`."""
    for line in found:
        print(json.dumps(line), flush=True)


def section(name: str, record: Mapping[str, Any]) -> list[str]:
    """Return what a document says of a part."""
    return [f"## {name}", record["about"], table(record["rows"]), place(record["machine"])]


def write_document(path: Path, paragraphs: Sequence[str]) -> str:
    """Write the paragraphs to ``path``; return the document."""
    text = "\n\n".join(paragraphs) + "\n"
    path.write_text(text)
    return text


def machine() -> dict[str, object]:
    """Return what a reader has to know to judge a figure."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "load_average": round(os.getloadavg()[0], 2),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def table(rows: Sequence[Mapping[str, object]]) -> str:
    """Return the rows as a table in Markdown, with every column that some row has."""
    fullest_first = sorted(rows, key=len, reverse=True)
    columns = list(dict.fromkeys(column for row in fullest_first for column in row))
    lines = [columns, ["---"] * len(columns)]
    lines += [[_cell(row.get(column)) for column in columns] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def place(where: Mapping[str, object]) -> str:
    """Return what :func:`machine` found as a line of text."""
    return ", ".join(f"{key.replace('_', ' ')}: {value}" for key, value in where.items())


def save(
    name: str,
    title: str,
    rows: Sequence[Mapping[str, object]],
    folder: Path = RESULTS,
    *,
    about: str,
) -> None:
    """Print the rows as a table; write them to ``folder`` as Markdown and as JSON.

    ``about`` says what the columns are.
    """
    where = machine()
    text = f"# {title}\n\n{about.strip()}\n\n{table(rows)}\n\n{place(where)}\n"
    print(text)
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.md").write_text(text)
    record = {"title": title, "machine": where, "rows": list(rows)}
    (folder / f"{name}.json").write_text(json.dumps(record, indent=2) + "\n")


def _cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _cpu_model() -> str:
    try:
        found = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    except OSError:
        found = None
    return found.group(1) if found else platform.processor() or "unknown"
