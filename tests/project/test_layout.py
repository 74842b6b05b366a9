# SPDX-License-Identifier: Apache-2.0
"""The tree shows who may know whom: no part includes or imports one that comes after it."""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from rematfn import _C

ROOT = Path(__file__).parents[2]
CORE = ROOT / "csrc"
PARTS = [
    *("base", "memory", "policy", "engine", "planning", "tensors", "levels", "operators"),
    "python",
]
WITHOUT_TENSORS = PARTS[: PARTS.index("tensors")]
SUFFIXES = {".cpp", ".h"}
WRITTEN = {".md", ".py"}


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
    found = (p for p in CORE.rglob("*") if p.suffix in SUFFIXES)
    return sorted(p for p in found if "third_party_shims" not in p.parts)


@pytest.mark.parametrize("path", sources(), ids=lambda path: path.name)
def test_no_include_runs_up(path: Path) -> None:
    assert path.parent.name in PARTS
    assert faults(path.parent.name, path.read_text(encoding="utf-8")) == []


# --- within the engine ----------------------------------------------------------------------------


def engine_order() -> dict[str, int]:
    """Return, by the name of a file, its row in the README's table."""
    readme = (CORE / "README.md").read_text(encoding="utf-8")
    table = readme.split("**[engine/]")[1].split("**[")[0]
    rows = [line for line in table.splitlines() if line.startswith("| `")]
    return {
        name: i for i, row in enumerate(rows) for name in re.findall(r"`(\w+)\.(?:h|cpp)`", row)
    }


@pytest.mark.parametrize(
    "path", [p for p in sources() if p.parent.name == "engine"], ids=lambda path: path.name
)
def test_no_include_in_the_engine_runs_up(path: Path) -> None:
    order = engine_order()
    names = re.findall(r'^#include "engine/(\w+)\.h"', path.read_text(encoding="utf-8"), re.M)
    assert [name for name in names if order[name] > order[path.stem]] == []


# --- the Python side ------------------------------------------------------------------------------

PACKAGE = ROOT / "rematfn"
# `rematfn` is the package's own `__init__`: the public names.
PYTHON_PARTS = [
    *("_C", "errors", "_interop", "policies", "_transform", "_inspection", "_traces", "testing"),
    *("rematfn", "demo", "_commands", "__main__"),
]


def name_of(path: Path) -> str:
    """Return the module that a file is."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {name_of(path): path for path in [*sorted(PACKAGE.rglob("*.py")), PACKAGE / "_C.pyi"]}


def part_of(module: str) -> str:
    return [*module.split("."), "rematfn"][1]


def imports(module: str, text: str) -> Iterator[str]:
    """Yield the modules of ours that a module imports, wherever in it."""
    is_package = module in MODULES and MODULES[module].name == "__init__.py"
    package = [*module.split("."), *([""] if is_package else [])]
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names if name.name.split(".")[0] == "rematfn")
        elif isinstance(node, ast.ImportFrom):
            above = package[: -node.level] if node.level else []
            source = ".".join([*above, *([node.module] if node.module else [])])
            if source.split(".")[0] == "rematfn":
                for name in node.names:
                    inside = f"{source}.{name.name}"
                    yield inside if inside in MODULES else source


def python_faults(module: str, text: str) -> list[str]:
    """Return what a module imports and may not."""
    later = PYTHON_PARTS[PYTHON_PARTS.index(part_of(module)) + 1 :]
    return [name for name in imports(module, text) if part_of(name) in later]


@pytest.mark.parametrize("module", MODULES)
def test_no_import_runs_up(module: str) -> None:
    assert python_faults(module, MODULES[module].read_text(encoding="utf-8")) == []


def test_an_import_that_runs_up_is_a_fault() -> None:
    level, package = "rematfn._transform.level", "rematfn.policies"
    assert python_faults(level, "from .. import _C\nfrom .budget import Limit\n") == []
    assert python_faults(level, "from rematfn import stats\n") == ["rematfn"]
    inside = "def f():\n    from .._traces import file\n"
    assert python_faults(level, inside) == ["rematfn._traces.file"]
    assert python_faults(package, "from ._scores import Policy\n") == []
    assert python_faults(package, "from .._transform import level\n") == [level]
    assert python_faults("rematfn.demo.train", "import rematfn\n") == []


def test_no_modules_import_each_other_in_a_circle() -> None:
    order = TopologicalSorter(
        {name: set(imports(name, path.read_text())) for name, path in MODULES.items()}
    )
    assert set(order.static_order()) == set(MODULES)


def names_of_the_core() -> dict[str, ast.AST]:
    stub = ast.parse((PACKAGE / "_C.pyi").read_text(encoding="utf-8"))
    found: dict[str, ast.AST] = {}
    for node in stub.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            found[node.name] = node
        elif isinstance(node, ast.AnnAssign):
            found[ast.unparse(node.target)] = node
    return found


def test_the_stub_names_what_is_in_the_core() -> None:
    found = names_of_the_core()
    hooks = found["testing"]
    assert isinstance(hooks, ast.ClassDef)
    kinds = (ast.FunctionDef, ast.ClassDef)
    defined = {node.name for node in hooks.body if isinstance(node, kinds)}
    for module, names in ((_C, set(found)), (_C.testing, defined)):
        assert {name for name in vars(module) if not name.startswith("__")} == names


# --- the prose ------------------------------------------------------------------------------------

# A Note starts with its title on a line of its own, underlined with tildes. Every other mention of
# a title is a citation; `torch's Note [...]` is about a Note of torch's.
DEFINED = re.compile(r"^\W*Note \[([^\]]+)\]\s*\n\W*~{4,}", re.MULTILINE)
CITED = re.compile(r"(?<![Tt]orch's )Notes? \[([^\]]+)\]")
LINE_BREAK = re.compile(r"\s*\n\s*(?://+|#+|\*+)?\s*")


def faults_of_notes(texts: list[str]) -> list[str]:
    """Return what is wrong with the Notes of these sources, a sentence for each fault."""
    defined = Counter(title for text in texts for title in DEFINED.findall(text))
    bare = (LINE_BREAK.sub(" ", DEFINED.sub("", text)) for text in texts)
    cited = {title for text in bare for title in CITED.findall(text)}
    return [
        *(f"written {n} times: {title}" for title, n in sorted(defined.items()) if n > 1),
        *(f"cited but never written: {title}" for title in sorted(cited - set(defined))),
        *(f"written but never cited: {title}" for title in sorted(set(defined) - cited)),
    ]


def test_a_note_is_written_once_and_cited() -> None:
    """A subtle point is written beside the code it is about, and cited from elsewhere."""
    folders = (ROOT / folder for folder in ("csrc", "rematfn", "docs"))
    paths = [p for f in folders for p in f.rglob("*") if p.suffix in {*SUFFIXES, *WRITTEN, ".pyi"}]
    assert faults_of_notes([path.read_text(encoding="utf-8") for path in paths]) == []


def test_a_note_that_is_not_written_or_that_nobody_cites_is_found() -> None:
    written = "// Note [Pin before you evict]\n// ~~~~~~~~~~~\n// Because.\n"
    assert faults_of_notes([written]) == ["written but never cited: Pin before you evict"]
    cites = "see Note [Pin before you\n// evict] and Note [Pinning]"
    assert faults_of_notes([written, cites]) == ["cited but never written: Pinning"]


FOLDERS = ("csrc", "rematfn", "tests", "docs", "benchmarks", "tutorials")
NAMED = re.compile(rf"(?<![\w/.-])(?:{'|'.join(FOLDERS)})/[\w/]+\.(?:cpp|h|json|md|png|py|supp)\b")


def test_files_that_are_named_exist() -> None:
    texts = [ROOT / "Makefile", *ROOT.glob("*.md")]
    for folder in FOLDERS:
        texts += [p for p in (ROOT / folder).rglob("*") if p.suffix in {*SUFFIXES, *WRITTEN}]
    named = {name for path in texts for name in NAMED.findall(path.read_text(encoding="utf-8"))}
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8").replace("\\\n", " ")
    for prefix, names in re.findall(r"\(addprefix (tests/[\w/]*),([^)]*)\)", makefile):
        named |= {prefix + name for name in names.split()}
    assert {"tests/engine/test_engine.py", "tests/levels/test_threads.py"} <= named
    assert {name for name in named if not (ROOT / name).exists()} == set()
