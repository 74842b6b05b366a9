# SPDX-License-Identifier: Apache-2.0
"""The demo at toy size, and that it would notice a broken promise."""

import math
import re
import subprocess
import sys
import time
from dataclasses import replace

import pytest
import torch

import rematfn
from rematfn import _C
from rematfn.__main__ import main
from rematfn.demo.chargpt import CharGPT, Sizes, make_chargpt
from rematfn.demo.report import Report
from rematfn.demo.task import Count, Held
from rematfn.demo.text import Corpus
from rematfn.demo.train import Comparison, Options, bitwise_equal, run_demo
from rematfn.testing import MemoryTimeline

TOY = {"layers": 2, "width": 32, "heads": 2, "context": 32, "batch": 4}
TWO_STEPS = ["demo", "--steps", "2"]
TWO_STEPS += [word for name, value in TOY.items() for word in (f"--{name}", str(value))]

KEPT = Report(
    device="cpu",
    parameters=10,
    budget=1000,
    own_peak=990,
    counted_peak=1000,
    eager_peak=3000,
    resident=1500,
    eager_resident=None,
    replayed_cost=0.1,
    early_ratios=[1.4],
    time_ratios=[1.3, 1.1, 1.2],
    eager_seconds=0.5,
    unequal=[],
    compared=78,
    losses=[4.0, 3.0, 2.0],
)


def test_corpus_is_english_and_round_trips():
    corpus = Corpus.of_python_manual()
    assert len(corpus.ids) > 100_000
    assert "Python" in corpus.text(corpus.ids)
    assert Corpus.of("banana").vocabulary == "abn"
    assert Corpus.of("banana").text(Corpus.of("banana").ids) == "banana"


def test_batches_are_excerpts_that_the_seed_decides():
    corpus = Corpus.of("the quick brown fox jumps over the lazy dog")
    batches = corpus.batches(3, 8, seed=1)
    first, second = next(batches), next(batches)
    assert first.shape == (3, 9)
    text = corpus.text(corpus.ids)
    assert all(corpus.text(row) in text for row in (*first, *second))
    assert not torch.equal(first, second)
    torch.manual_seed(99)
    assert torch.equal(first, next(corpus.batches(3, 8, seed=1)))
    assert not torch.equal(first, next(corpus.batches(3, 8, seed=2)))


def test_text_shorter_than_an_excerpt_is_an_error():
    with pytest.raises(ValueError, match="excerpts of 9 from a text of 5 characters"):
        next(Corpus.of("short").batches(1, 8, seed=0))


def test_model_has_ten_million_parameters_by_default():
    with torch.device("meta"):
        model = CharGPT(Sizes(vocabulary=100))
    assert len(model.blocks) == 6
    assert 10e6 < sum(p.numel() for p in model.parameters()) < 11e6


def test_model_does_not_look_ahead():
    model = CharGPT(Sizes(7, layers=2, width=16, heads=2, context=8, dropout=0.0))
    ids = torch.arange(6).expand(1, 6)
    changed = ids.clone()
    changed[0, 4] = 0
    before, after = model(ids), model(changed)
    torch.testing.assert_close(before[:, :4], after[:, :4], rtol=0, atol=0)
    assert (before[:, 4:] != after[:, 4:]).any(-1).all()


def test_loss_begins_at_that_of_a_blind_guess_and_depends_on_dropout():
    loss_fn, params = make_chargpt(Sizes(50, layers=2, width=32, heads=2, context=8))
    tokens = torch.randint(50, (4, 9))
    torch.manual_seed(1)
    loss = loss_fn(params, tokens)
    assert abs(loss.item() - math.log(50)) < 0.3
    assert loss_fn(params, tokens) != loss
    torch.manual_seed(1)
    assert loss_fn(params, tokens) == loss


def test_bitwise_equality_sees_signs_of_zero_and_accepts_equal_nans():
    nan, zero = torch.tensor([float("nan")]), torch.tensor(0.0)
    assert bitwise_equal(nan, nan.clone())
    assert not bitwise_equal(zero, -zero)
    assert not bitwise_equal(zero, zero.double())
    assert not bitwise_equal(zero, zero.reshape(1))


def test_comparison_names_what_differs():
    a, b = torch.ones(2), torch.ones(2) + 1e-7
    comparison = Comparison()
    comparison.add("call 1", ({"w": a, "v": b}, a), ({"w": a, "v": a}, a))
    assert comparison.tensors == 3
    assert comparison.unequal == ["call 1: v"]


def test_memory_that_is_kept_counts_like_intermediates():
    x = torch.ones(1000)
    with MemoryTimeline() as timeline:
        results = ({"x": x.sin().cos()}, x.sum())
    assert Count.of(timeline, results).peak == 4000  # the sine
    with MemoryTimeline() as timeline:
        leaked = x.exp()
        results = ({"x": x.sin().cos()}, x.sum())
    assert Count.of(timeline, results).peak == 4000 + leaked.nbytes


def test_kept_promises_are_not_complained_about():
    assert KEPT.broken_promises() == []


def test_the_time_of_a_step_is_the_median_of_pairs():
    assert KEPT.time_ratio == 1.2
    assert "median of 3 pairs\n" in str(KEPT)
    more = replace(KEPT, time_ratios=[1.5, 1.0, 1.1, 1.2])
    assert more.time_ratio == pytest.approx(1.15)
    assert "median of 4 pairs, the middle half 1.075 to 1.275\n" in str(more)
    assert re.search(r"before its plan is settled +1.400  median of 1 pairs\n", str(more))
    unsettled = replace(KEPT, time_ratios=[])
    assert unsettled.time_ratio == 1.4
    assert re.search(r"step, rematted / eager +1.400  median of 1 pairs\n", str(unsettled))
    assert "before its plan is settled" not in str(unsettled)


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
    options = Options(
        budget=0.5,
        steps=40,
        **TOY,
        learning_rate=1e-2,
        png=png,
    )
    report = run_demo(options)
    assert report.broken_promises() == []
    assert report.budget is not None
    assert report.budget < 0.7 * report.eager_peak
    assert report.replayed_cost > 0
    calls = 2 + 20 + 1  # the first two, twenty of the training, the one that is drawn
    assert report.compared == calls * (1 + len(make_chargpt(Sizes(9, layers=2))[1]))
    assert png.read_bytes().startswith(b"\x89PNG")


@pytest.fixture
def costs_are_drawn():
    """Values move or are dropped at random, whatever the disk takes."""
    _C.testing.draw_link_costs(True)
    yield
    _C.testing.draw_link_costs(False)


def test_offload_keeps_every_promise_and_says_what_was_moved(tmp_path, costs_are_drawn):
    png = tmp_path / "step.png"
    options = Options(budget=0.3, steps=40, **TOY, learning_rate=1e-2, png=png, offload=tmp_path)
    report = run_demo(options)
    assert report.broken_promises() == []
    moved = report.moved
    assert moved is not None
    assert moved.peak_bytes > 0
    assert moved.bandwidth_out is not None
    for row in ("moved out", "moved back", "waited for them", "peak on the disk", "bandwidth in"):
        assert f"\n{row} " in str(report)
        assert f"\n{row} " not in str(replace(report, moved=None))
    assert png.read_bytes().startswith(b"\x89PNG")
    assert list(tmp_path.iterdir()) == [png]


def test_what_a_disk_holds_is_seen_over_time(tmp_path):
    disk = rematfn.Disk(tmp_path)
    x = torch.ones(1 << 18, requires_grad=True)
    with Held(disk) as held:
        loss = rematfn.offload(lambda x: x.sin().cos().exp().sum(), to=disk)(x)
        until = time.monotonic() + 60
        while held.peak == 0:  # until it has looked
            assert time.monotonic() < until
            time.sleep(0.001)
        loss.backward()
    assert 0 < held.peak <= disk.peak_bytes
    assert held.seconds == sorted(held.seconds)
    assert len(held.seconds) == len(held.bytes)
    with Held(None) as held:
        x.sin()
    assert (held.bytes, held.peak) == ([], 0)


def test_command_line_shows_the_table_and_fails_if_nothing_was_learnt(tmp_path):
    png = tmp_path / "step.png"
    command = [sys.executable, "-m", "rematfn", *TWO_STEPS, "--png", str(png)]
    run = subprocess.run(
        [*command, "--budget", "none"], capture_output=True, text=True, check=False, timeout=300
    )
    assert run.returncode == 1, run.stderr
    complaints = [line for line in run.stderr.splitlines() if line.startswith("broken promise")]
    assert [line.split(":")[1] for line in complaints] == [" training"], run.stderr
    assert "bitwise eager's" in run.stdout
    assert "2/2" in run.stderr  # the progress bar
    assert png.exists()


def test_budget_too_small_to_run_is_reported_without_a_traceback(tmp_path, capsys):
    png = str(tmp_path / "step.png")
    assert main([*TWO_STEPS, "--budget", "1KiB", "--png", png]) == 1
    assert "BudgetError" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--budget", "2G"], "there is no unit 'G'"),
        (["--budget", "1.5"], "as a fraction it must be in (0, 1]"),
        (["--budget", "0.0"], "as a fraction it must be in (0, 1]"),
        (["--budget", "much"], "A budget is one of"),
        (["--layers", "0"], "it must be a whole number above 0, got '0'"),
        (["--steps", "many"], "it must be a whole number above 0, got 'many'"),
        (["--width", "10", "--heads", "3"], "--width 10 is not a multiple of --heads 3"),
        (["--device", "abacus"], "it must be cpu or cuda, got 'abacus'"),
        (["--device", "cuda:99"], "there is no cuda:99"),
        (["--offload", "no/such/folder"], "there is no folder 'no/such/folder'"),
        (["--png", "no/such/folder/x.png"], "there is no folder 'no/such/folder'"),
    ],
)
def test_bad_option_is_explained(arguments, complaint, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["demo", *arguments])
    assert stopped.value.code == 2
    assert complaint in capsys.readouterr().err
