# SPDX-License-Identifier: Apache-2.0
"""The public surface: adding to it or taking from it is a decision, made here too."""

from importlib import import_module, metadata
from types import ModuleType

import pytest

import rematfn

PUBLIC = {
    # the transform
    "remat",
    "offload",
    "Budget",
    "Disk",
    "Host",
    "Packed",
    "materialize",
    "keep",
    "opaque",
    "stats",
    # what happened, and what would
    "where",
    "explain",
    "timeline",
    "profile",
    # in the place of torch.utils.checkpoint
    "checkpoint",
    # traces
    "Trace",
    "record",
    "simulate",
    "warmup",
    # errors
    "BudgetError",
    "ReplayError",
}
ERRORS = {"RematError", "BudgetError", "ReplayError", "OffloadError"}
WARNINGS = {"ThrashingWarning", "NotGuidedWarning", "FloorWarning", "DeferredWarning"}
PARTS = {
    "rematfn.errors": ERRORS | WARNINGS,
    "rematfn.policies": {
        *("Policy", "Guided", "ON", "Sqrt", "Memory", "Speed", "Manual", "Custom", "Candidate"),
    },
    "rematfn.policies.reference": {"DTR", "Local", "MSPS", "LRU", "Largest"},
    "rematfn.testing": {"EvictEverything", "check", "MemoryTimeline", "ResidentPeak"},
}
BUILT_INS = {
    "BudgetError": MemoryError,
    "ReplayError": RuntimeError,
    "OffloadError": OSError,
}


def test_all_is_what_was_decided():
    assert set(rematfn.__all__) == PUBLIC | {"errors", "policies", "testing"}
    for part, names in PARTS.items():
        assert set(import_module(part).__all__) - {"reference"} == names


def in_sight(module: ModuleType) -> set[str]:
    return {
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and not isinstance(value, ModuleType)
    }


def test_nothing_else_is_in_sight():
    assert in_sight(rematfn) == PUBLIC
    assert in_sight(rematfn.policies) == PARTS["rematfn.policies"]


@pytest.mark.parametrize(
    ("part", "name"),
    [
        *(("rematfn", name) for name in sorted(PUBLIC)),
        *((part, name) for part, names in PARTS.items() for name in sorted(names)),
    ],
)
def test_every_public_name_is_documented_and_calls_itself_public(part, name):
    value = getattr(import_module(part), name)
    assert len(value.__doc__.strip().splitlines()[0]) > 10
    # A frozen dataclass without a docstring gets its signature for one.
    assert not value.__doc__.startswith(f"{name}(")


@pytest.mark.parametrize(("name", "built_in"), BUILT_INS.items())
def test_errors_are_caught_as_ours_and_as_pythons(name, built_in):
    error = getattr(rematfn.errors, name)
    assert issubclass(error, rematfn.errors.RematError)
    assert issubclass(error, built_in)


@pytest.mark.parametrize("name", sorted(ERRORS))
def test_an_error_shows_its_public_name_and_where_to_read_on(name):
    error = getattr(rematfn.errors, name)
    shown = f"rematfn.{name}" if hasattr(rematfn, name) else f"rematfn.errors.{name}"
    assert f"{error.__module__}.{error.__qualname__}" == shown
    assert str(error("what happened")) == f"what happened\nSee help({shown})."


def test_the_version_is_the_installed_packages():
    assert rematfn.__version__ == metadata.version("rematfn")
