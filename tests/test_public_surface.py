# SPDX-License-Identifier: Apache-2.0
"""The public surface: adding to it or taking from it is a decision, made here too."""

from types import ModuleType

import pytest

import rematfn

PUBLIC = {
    # the transform
    "remat",
    "Budget",
    "materialize",
    "opaque",
    "check",
    "stats",
    "Stats",
    # in the place of torch.utils.checkpoint
    "checkpoint",
    "checkpoint_sequential",
    # traces
    "Trace",
    "record",
    "simulate",
    "warmup",
    # policies
    "Policy",
    "Guided",
    "ON",
    "DTR",
    "Eq",
    "Local",
    "MSPS",
    "LRU",
    "Largest",
    "EvictEverything",
    "Sqrt",
    "Memory",
    "Speed",
    "Manual",
    "keep",
    "Custom",
    "Candidate",
    # errors
    "RematError",
    "BudgetError",
    "ReplayError",
}
POLICIES = (
    *("Guided", "ON", "DTR", "Eq", "Local", "MSPS", "LRU", "Largest", "EvictEverything"),
    *("Sqrt", "Memory", "Speed", "Manual"),
)
BUILT_INS = {
    "BudgetError": MemoryError,
    "ReplayError": RuntimeError,
}


def test_all_is_what_was_decided():
    assert set(rematfn.__all__) == PUBLIC
    assert len(rematfn.__all__) == len(PUBLIC)


def test_nothing_else_is_in_sight():
    in_sight = {
        name
        for name, value in vars(rematfn).items()
        if not name.startswith("_") and not isinstance(value, ModuleType)
    }
    assert in_sight == PUBLIC


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_every_public_name_is_documented_and_calls_itself_public(name):
    value = getattr(rematfn, name)
    assert len(value.__doc__.strip().splitlines()[0]) > 10
    # A frozen dataclass without a docstring gets its signature for one.
    assert not value.__doc__.startswith(f"{name}(")


@pytest.mark.parametrize("name", POLICIES)
def test_policies_are_values(name):
    policy = getattr(rematfn, name)
    assert policy() == policy()
    assert hash(policy()) == hash(policy())
    assert repr(policy()).startswith(name)
    with pytest.raises(AttributeError):
        policy().threshold = 1


@pytest.mark.parametrize(("name", "built_in"), BUILT_INS.items())
def test_errors_are_caught_as_ours_and_as_pythons(name, built_in):
    error = getattr(rematfn, name)
    assert issubclass(error, rematfn.RematError)
    assert issubclass(error, built_in)


@pytest.mark.parametrize("name", ["RematError", *BUILT_INS])
def test_an_error_shows_its_public_name_and_where_to_read_on(name):
    error = getattr(rematfn, name)
    assert f"{error.__module__}.{error.__qualname__}" == f"rematfn.{name}"
    assert str(error("what happened")) == f"what happened\nSee help(rematfn.{name})."
