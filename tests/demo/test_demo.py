# SPDX-License-Identifier: Apache-2.0
"""The demo at toy size, and that it would notice a broken promise."""

import functools
import re
from dataclasses import replace

import pytest
from processes import python

import rematfn
from rematfn.__main__ import main
from rematfn._inspection.stats import Stats
from rematfn.demo.chargpt import Sizes, make_chargpt
from rematfn.demo.report import Report
from rematfn.demo.train import run_demo

TOY = {"layers": 2, "width": 32, "heads": 2, "context": 32, "batch": 4}
TWO_STEPS = ["demo", "--steps", "2"]
TWO_STEPS += [word for name, value in TOY.items() for word in (f"--{name}", str(value))]

KEPT = Report(
    device="cpu",
    parameters=10,
    stats=Stats(budget=1000, replayed_cost=0.1),
    own_peak=990,
    counted_peak=1000,
    eager_peak=3000,
    resident=1500,
    eager_resident=None,
    time_ratios=[1.3, 1.1, 1.2],
    eager_seconds=0.5,
    unequal=[],
    compared=78,
    losses=[4.0, 3.0, 2.0],
)


@pytest.mark.parametrize(
    ("figures", "complaint"),
    [
        ({"unequal": ["call 2: head.weight"]}, "bitwise equality: 1 of 78 .*call 2: head.weight"),
        ({"counted_peak": 1001}, "budget: the allocator counts .*1,001 bytes, 1 above"),
        ({"own_peak": 1012}, "budget: rematfn itself counts .*1,012 bytes, 12 above"),
        ({"losses": [4.0, 3.3]}, "training: the loss went from 4.000 to 3.300"),
        ({"losses": [4.0, float("nan")]}, "training: the loss went from 4.000 to nan"),
    ],
)
def test_broken_promise_is_named(figures, complaint):
    (broken,) = replace(KEPT, **figures).broken_promises()
    assert re.match(complaint, broken), broken


def test_toy_keeps_every_promise_and_draws_a_picture(tmp_path):
    png = tmp_path / "step.png"
    report = run_demo(budget=0.5, steps=40, **TOY, learning_rate=1e-2, png=png)
    assert report.broken_promises() == []
    assert report.stats.budget is not None
    assert report.stats.budget < 0.7 * report.eager_peak
    assert report.stats.replays > 0
    calls = 2 + 20 + 1  # the first two, twenty of the training, the one that is drawn
    assert report.compared == calls * (1 + len(make_chargpt(Sizes(9, layers=2))[1]))
    assert png.read_bytes().startswith(b"\x89PNG")


def test_offload_keeps_every_promise_and_says_what_was_moved(
    tmp_path, costs_at_random, monkeypatch
):
    """Of values so small, a plan may move none."""
    no_plans = functools.partial(rematfn.remat, policy=rematfn.policies.ON())
    monkeypatch.setattr(rematfn, "remat", no_plans)
    png = tmp_path / "step.png"
    report = run_demo(budget=0.3, steps=40, **TOY, learning_rate=1e-2, png=png, offload=tmp_path)
    assert report.broken_promises() == []
    assert report.stats.moves > 0
    assert str(report).endswith(f"the last step\n{report.stats}")
    assert png.read_bytes().startswith(b"\x89PNG")
    assert list(tmp_path.iterdir()) == [png]


def test_command_line_shows_the_table_and_fails_if_nothing_was_learnt(tmp_path):
    png = tmp_path / "step.png"
    run = python("-m", "rematfn", *TWO_STEPS, "--png", str(png), "--budget", "none")
    assert run.code == 1, run.err
    complaints = [line for line in run.err.splitlines() if line.startswith("broken promise")]
    assert [line.split(":")[1] for line in complaints] == [" training"], run.err
    assert "bitwise eager's" in run.out
    assert "2/2" in run.err  # the progress bar
    assert png.exists()


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--budget", "2G"], "there is no unit 'G'"),
        (["--budget", "1"], "1.0 is the whole peak"),
        (["--budget", "1.5"], "as a fraction it must be in (0, 1]"),
        (["--layers", "0"], "it must be a whole number above 0, got '0'"),
        (["--steps", "many"], "it must be a whole number above 0, got 'many'"),
        (["--width", "10", "--heads", "3"], "--width 10 is not a multiple of --heads 3"),
        (["--device", "abacus"], "it must be cpu or cuda, got 'abacus'"),
        (["--device", "cuda:99"], "there is no cuda:99"),
        (["--offload", "no/such/folder"], "there is no folder 'no/such/folder'"),
        (["--png", "."], "is a folder: name a file"),
        (["--png", "no/such/folder/x.png"], "there is no folder 'no/such/folder'"),
    ],
)
def test_bad_option_is_explained(arguments, complaint, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["demo", *arguments])
    assert stopped.value.code == 2
    assert complaint in capsys.readouterr().err
