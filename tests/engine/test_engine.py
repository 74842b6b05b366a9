# SPDX-License-Identifier: Apache-2.0
"""The engine apart from tensors: built without torch but for `c10/util`, and run on numbers."""

from __future__ import annotations

from pathlib import Path

import pytest
from models import CORE, compile_model, run_model

PARTS = ("base", "memory", "policy", "engine", "planning")
TESTS = [
    "chain",
    "programs",
    "moves",
    "leave",
    "searches",
    "early",
    "ahead",
    "by value",
    "addressed",
    "word",
    "broken",
    "timings",
]


@pytest.fixture(scope="module")
def model() -> Path:
    """Compile these parts and the tests of them; nothing else of torch is linked."""
    sources = [path for part in PARTS for path in sorted((CORE / part).glob("*.cpp"))]
    sources += sorted(Path(__file__).parent.glob("*_model.cpp"))
    return compile_model("engine", sources, with_c10=True)


# One test, so that not every process compiles.
def test_the_engine_keeps_its_promises_without_tensors(model: Path) -> None:
    for name in TESTS:
        run_model(model, name)
