# SPDX-License-Identifier: Apache-2.0
"""Trace files, in the format of the DTR simulator: one JSON object a line.

`Trace.load` and `Trace.save` tell what is read and written.
"""

import gzip
import json
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from .. import _C

_NANOSECOND = 1e-9
_Line: TypeAlias = dict[str, Any]


def read(path: str | Path) -> _C.Trace:
    core = _C.Trace()
    with _open(path, "rt") as lines:
        _Reader(core, str(path)).read(lines)
    return core


def write(core: _C.Trace, path: str | Path) -> None:
    with _open(path, "wt") as file:
        for line in _lines(core):
            file.write(json.dumps(line) + "\n")


def _open(path: str | Path, mode: str) -> Any:
    return (gzip.open if str(path).endswith(".gz") else open)(path, mode)


@dataclass
class _Storage:
    """One storage of the file being read: its contents now, and how many names stand on it."""

    value: int
    nbytes: int
    names: int = 1


class _Reader:
    def __init__(self, core: _C.Trace, path: str) -> None:
        self._core = core
        self._path = path
        self._storages: dict[str, _Storage] = {}
        self._backward = False
        self._number = 0  # of the line

    def read(self, lines: Iterable[str]) -> None:
        rest = self._records(lines)
        try:
            for line in rest:
                self._obey(line, rest)
        except (EOFError, StopIteration) as error:
            raise self._broken("it ends too early") from error
        except (gzip.BadGzipFile, zlib.error) as error:
            raise self._broken(f"it cannot be unpacked: {error}") from error
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise self._broken(repr(error)) from error
        if self._number == 0:
            raise self._broken("it has no line")

    def _broken(self, why: str) -> ValueError:
        where = f"{self._path}, line {self._number}"
        return ValueError(f"{where}: not a trace in the DTR simulator's format: {why}")

    def _records(self, lines: Iterable[str]) -> Iterator[_Line]:
        for line in lines:
            self._number += 1
            yield json.loads(line)

    def _obey(self, line: _Line, rest: Iterator[_Line]) -> None:
        kind = line["INSTRUCTION"]
        if kind == "CONSTANT":
            nbytes = int(next(rest)["MEMORY"])
            self._storages[line["NAME"]] = _Storage(self._core.add_value(nbytes, False), nbytes)
        elif kind == "CALL":
            self._call(line, rest)
        elif kind == "MUTATE":
            self._mutate(line)
        elif kind == "COPY":
            self._name(line["DST"], line["SRC"])
        elif kind == "COPY_FROM":
            self._release(line["DST"])
            self._name(line["DST"], line["SRC"])
        elif kind == "RELEASE":
            self._release(line["NAME"])
        elif kind == "ANNOTATE":
            what = line["ANNOTATION"]
            if what in ("SEAL", "STORED", "FILLED", "ADDRESSED", "READ"):
                add = getattr(self._core, f"add_{what.lower()}")
                add(self._storages[line["NAME"]].value)
            elif what == "BACKWARD":
                self._backward = True
            elif what == "MARK":
                self._core.add_mark(self._storages[line["NAME"]].value, line["MARK"])
            elif what == "UNRECORDED":
                self._core.add_unrecorded(int(line["MEMORY"]))
        else:
            raise ValueError(f"unknown instruction {kind!r}")

    def _call(self, line: _Line, rest: Iterator[_Line]) -> None:
        arguments = [self._storages[name] for name in line["ARGS"]]
        fresh: list[_Storage] = []
        for name in line["RESULT"]:
            nbytes, alias = int(next(rest)["MEMORY"]), int(next(rest)["ALIAS"])
            if alias >= 0:
                self._name(name, line["ARGS"][alias])
            else:
                self._storages[name] = _Storage(self._core.add_value(nbytes, True), nbytes)
                fresh.append(self._storages[name])
        if not fresh and line["RESULT"]:
            return
        written = line.get("WRITES", ())
        reads = [(s.value, i in written) for i, s in enumerate(arguments)]
        makes = [(s.value, -1) for s in fresh]
        self._add(line, sum(s.nbytes for s in fresh), reads, makes)

    def _mutate(self, line: _Line) -> None:
        arguments = [self._storages[name] for name in line["ARGS"]]
        reads = [(s.value, i in line["MUTATE"]) for i, s in enumerate(arguments)]
        makes = []
        for i in line["MUTATE"]:
            arguments[i].value = self._core.add_value(arguments[i].nbytes, True)
            makes.append((arguments[i].value, i))
        self._add(line, 0, reads, makes)

    def _add(
        self, line: _Line, nbytes: int, reads: list[tuple[int, bool]], makes: list[tuple[int, int]]
    ) -> None:
        cost = int(line["TIME"]) * _NANOSECOND
        flops, scratch = float(line.get("FLOPS", 0)), int(line.get("SCRATCH", 0))
        replayable, raw = bool(line.get("REPLAYABLE", True)), bool(line.get("RAW", False))
        backward = bool(line.get("BACKWARD", self._backward))
        self._core.add_call(
            line["NAME"], cost, flops, nbytes, scratch, replayable, raw, backward, reads, makes
        )

    def _name(self, name: str, source: str) -> None:
        self._storages[name] = self._storages[source]
        self._storages[source].names += 1

    def _release(self, name: str) -> None:
        storage = self._storages.pop(name)
        storage.names -= 1
        if storage.names == 0:
            self._core.add_release(storage.value)


def _lines(core: _C.Trace) -> Iterator[_Line]:
    values = core.values()
    # A storage keeps its name through its writes, as it does in the format.
    names = [f"x{i}" for i in range(len(values))]
    yield {"INSTRUCTION": "ANNOTATE", "ANNOTATION": "START"}
    for value, (nbytes, counted) in enumerate(values):
        if not counted:
            yield {"INSTRUCTION": "CONSTANT", "NAME": names[value]}
            yield {"INSTRUCTION": "MEMORY", "NAME": names[value], "MEMORY": str(nbytes)}
    for kind, data in core.events():
        if kind == "call":
            yield from _lines_of_call(values, names, data)
        elif kind == "release":
            yield {"INSTRUCTION": "RELEASE", "NAME": names[data]}
        else:
            what = (
                {"NAME": names[data[0]], "MARK": data[1]}
                if kind == "mark"
                else {"MEMORY": str(data)}
                if kind == "unrecorded"
                else {"NAME": names[data]}
            )
            yield {"INSTRUCTION": "ANNOTATE", "ANNOTATION": kind.upper(), **what}


def _lines_of_call(values: list[tuple[int, bool]], names: list[str], call: Any) -> Iterator[_Line]:
    name, cost, flops, _, scratch, replayable, raw, backward, reads, makes = call
    line: _Line = {"NAME": name, "ARGS": [names[value] for value, _ in reads]}
    time = str(round(cost / _NANOSECOND))
    overwritten = {over for _, over in makes}
    extra: _Line = {
        "SCRATCH": str(scratch) if scratch else None,
        "FLOPS": flops or None,
        "REPLAYABLE": None if replayable else False,
        "RAW": raw or None,
        "BACKWARD": backward or None,
        # What is from outside and overwritten.
        "WRITES": [i for i, (_, w) in enumerate(reads) if w and i not in overwritten] or None,
    }
    extra = {key: value for key, value in extra.items() if value is not None}
    fresh = [value for value, over in makes if over < 0]
    written = [over for _, over in makes if over >= 0]
    if fresh or not written:
        results = [names[value] for value in fresh]
        yield {"INSTRUCTION": "CALL", **line, "RESULT": results, "TIME": time, **extra}
        for value in fresh:
            yield {"INSTRUCTION": "MEMORY", "NAME": names[value], "MEMORY": str(values[value][0])}
            yield {"INSTRUCTION": "ALIAS", "NAME": names[value], "ALIAS": "-1"}
        time = "0"
        extra.pop("FLOPS", None)
    if written:
        yield {"INSTRUCTION": "MUTATE", **line, "MUTATE": written, "TIME": time, **extra}
        for value, over in makes:
            if over >= 0:
                names[value] = names[reads[over][0]]
