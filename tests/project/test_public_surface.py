# SPDX-License-Identifier: Apache-2.0
"""The public surface. What it is, `docs/api/` says too: `test_site.py` compares."""

from importlib import import_module, metadata
from types import ModuleType

import pytest

import rematfn

PARTS = ["rematfn", "rematfn.errors", "rematfn.policies", "rematfn.policies.reference"]
PARTS += ["rematfn.testing"]
ERRORS = sorted(name for name in rematfn.errors.__all__ if name.endswith("Error"))
BUILT_INS = {
    "BudgetError": MemoryError,
    "ReplayError": RuntimeError,
    "OffloadError": OSError,
}


def in_sight(module: ModuleType) -> set[str]:
    return {
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and not isinstance(value, ModuleType)
    }


def test_nothing_else_is_in_sight():
    assert in_sight(rematfn) == set(rematfn.__all__) - {"errors", "policies", "testing"}
    assert in_sight(rematfn.policies) == set(rematfn.policies.__all__) - {"reference"}


@pytest.mark.parametrize(
    ("part", "name"), [(part, name) for part in PARTS for name in import_module(part).__all__]
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


@pytest.mark.parametrize("name", ERRORS)
def test_an_error_shows_its_public_name_and_where_to_read_on(name):
    error = getattr(rematfn.errors, name)
    shown = f"rematfn.{name}" if hasattr(rematfn, name) else f"rematfn.errors.{name}"
    assert f"{error.__module__}.{error.__qualname__}" == shown
    assert str(error("what happened")) == f"what happened\nSee help({shown})."


def test_the_version_is_the_installed_packages():
    assert rematfn.__version__ == metadata.version("rematfn")
