# SPDX-License-Identifier: Apache-2.0
"""The tree of the core shows who may know whom: no part includes one that lies below it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

CORE = Path(__file__).parents[2] / "csrc"
PARTS = [
    *("base", "memory", "policy", "engine", "planning", "tensors", "levels", "operators"),
    "python",
]
WITHOUT_TENSORS = PARTS[: PARTS.index("tensors")]
SUFFIXES = {".cpp", ".h"}


def faults(part: str, text: str) -> list[str]:
    """Return what a source of ``part`` includes and may not."""
    below = PARTS[PARTS.index(part) + 1 :]
    ours = re.findall(r'^#include "(.+)"', text, re.M)
    torch = re.findall(r"^#include <((?:ATen|c10|torch)/.+)>", text, re.M)
    found = [name for name in ours if name.split("/")[0] not in PARTS or name.count("/") != 1]
    found += [name for name in ours if name.split("/")[0] in below]
    if part in WITHOUT_TENSORS:
        found += [name for name in torch if not name.startswith("c10/util/")]
    return found


def sources() -> list[Path]:
    return sorted(p for p in CORE.rglob("*") if p.suffix in SUFFIXES)


@pytest.mark.parametrize("path", sources(), ids=lambda path: path.name)
def test_no_include_runs_up(path: Path) -> None:
    assert path.parent.name in PARTS
    assert faults(path.parent.name, path.read_text(encoding="utf-8")) == []


def test_an_include_that_runs_up_is_a_fault() -> None:
    assert faults("engine", '#include "engine/domain.h"\n#include "base/pool.h"\n') == []
    assert faults("engine", '#include "planning/search.h"\n') == ["planning/search.h"]
    assert faults("engine", '#include "domain.h"\n') == ["domain.h"]
    assert faults("engine", "#include <ATen/Tensor.h>\n") == ["ATen/Tensor.h"]
    assert faults("engine", "#include <c10/util/SmallVector.h>\n") == []
    assert faults("tensors", "#include <ATen/Tensor.h>\n") == []


@pytest.mark.parametrize("part", PARTS)
def test_each_part_says_what_it_is(part: str) -> None:
    text = (CORE / part / "README.md").read_text(encoding="utf-8")
    assert text.startswith(f"# {part}\n")
    for start in re.findall(r"`(\w+\.(?:h|cpp))`", text):
        assert (CORE / part / start).exists(), start


def test_the_table_of_files_is_complete() -> None:
    text = (CORE / "README.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`(\w+\.(?:h|cpp))`", text))
    headers = {path.name for path in sources() if path.suffix == ".h"}
    assert headers - named == set()
    assert {n for n in named if n not in {path.name for path in sources()}} == set()
