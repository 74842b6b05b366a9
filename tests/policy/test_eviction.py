# SPDX-License-Identifier: Apache-2.0
"""Scores and the choice of a victim: numbers only, built without torch but for `c10/util`."""

from pathlib import Path

from models import CORE, compile_model, run_model


def test_scores_and_choices_are_those_worked_out_by_hand() -> None:
    sources = [Path(__file__).with_name("scores_model.cpp"), CORE / "policy" / "eviction.cpp"]
    run_model(compile_model("scores", sources))
