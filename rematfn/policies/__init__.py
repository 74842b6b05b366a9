# SPDX-License-Identifier: Apache-2.0
"""Policies: which value to evict when room is needed."""

from . import reference as reference
from ._custom import Candidate, Custom
from ._planned import Guided, Memory, Sqrt
from ._scores import ON, Manual, Policy, Speed

__all__ = [
    "ON",
    "Candidate",
    "Custom",
    "Guided",
    "Manual",
    "Memory",
    "Policy",
    "Speed",
    "Sqrt",
    "reference",
]
