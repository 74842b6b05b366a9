# SPDX-License-Identifier: Apache-2.0
"""The engine apart from tensors: built without torch but for `c10/util`, and run on numbers."""

from pathlib import Path

from models import CORE, compile_model, run_all, run_model

STATES = CORE.parent / "docs" / "design" / "states.md"
PARTS = ("base", "memory", "policy", "engine", "planning")


def transitions_in(page: Path) -> set[tuple[str, ...]]:
    """Return the rows of the page's table of transitions."""
    table = page.read_text(encoding="utf-8").split("| transition |")[1].split("\n\n")[0]
    rows = [row.strip("| ").split(" | ") for row in table.splitlines()[2:]]
    return {
        (name.strip("`"), before, after)
        for name, *before_and_after, _ in rows
        for before, after in [before_and_after]
    }


# One test, so that not every process compiles.
def test_the_engine_keeps_its_promises_without_tensors() -> None:
    sources = [path for part in PARTS for path in sorted((CORE / part).glob("*.cpp"))]
    sources += sorted(Path(__file__).parent.glob("*_model.cpp"))
    model = compile_model("engine", sources, with_c10=True)
    printed = run_model(model, "transitions").splitlines()
    assert {tuple(line.split(" | ")) for line in printed} == transitions_in(STATES)
    run_all(model)
