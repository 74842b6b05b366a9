# SPDX-License-Identifier: Apache-2.0
"""`timeline`: its points, its picture, its trace."""

import contextlib
import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_journal import Net
from torch import Tensor

import rematfn
from rematfn._inspection.timeline import Timeline


@pytest.fixture(params=["remat", "hybrid", "no budget"])
def shown(request: Any, tmp_path: Path) -> Timeline:
    options: Any = {
        "remat": {"budget": "12KiB"},
        "hybrid": {"budget": "12KiB", "offload": tmp_path},
        "no budget": {},
    }[request.param]
    net, x = Net(), torch.randn(8, 16)
    g = rematfn.remat(net, where=True, **options)
    for _ in range(2):
        g(x).sum().backward()
    return rematfn.timeline(g)


def test_points_are_within_the_budget_and_reach_the_peak(shown: Timeline) -> None:
    used = [point.used for point in shown.points]
    assert max(used) == shown.peak_bytes
    assert shown.budget is None or max(used) <= shown.budget
    assert used[-1] == 0
    assert shown.points[-1].moved == 0
    times = [point.time for point in shown.points]
    positions = [point.position for point in shown.points]
    assert times == sorted(times)
    assert positions == sorted(positions)
    assert max(point.backward for point in shown.points) > 0
    begins = shown.backward_from
    assert begins is not None
    assert max(p.backward for p in shown.points if p.position < begins) == 0


def test_the_picture(shown: Timeline, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    figure = shown.figure()
    axes, rug, listed = figure.axes
    assert axes.get_ylabel().startswith("KiB resident")
    assert rug.get_xlabel() == "operators of the program"
    assert "the largest tensors at the peak" in listed.texts[0].get_text()
    figure.canvas.draw()  # what is cut off shows in where it came to lie
    renderer = figure.canvas.get_renderer()  # type: ignore[attr-defined]
    whole = figure.bbox
    for text in [axes.title, *listed.texts, *figure.legends[0].get_texts()]:
        box = text.get_window_extent(renderer)
        assert whole.x0 <= box.x0 < box.x1 <= whole.x1, text.get_text()
        assert whole.y0 <= box.y0 < box.y1 <= whole.y1, text.get_text()
    assert not axes.title.get_window_extent(renderer).overlaps(
        figure.legends[0].get_window_extent(renderer)
    )
    shown.save(tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 1000
    with pytest.raises(ValueError, match=r"must end in \.png"):
        shown.save(tmp_path / "picture.gif")


def test_the_chrome_trace(shown: Timeline, tmp_path: Path) -> None:
    trace = shown.chrome_trace()
    events = trace["traceEvents"]
    operators = [e for e in events if e["ph"] == "X" and e["tid"] == 0]
    assert {e["cat"] for e in operators} == {"forward", "backward"}
    begins = [e["ts"] for e in operators]
    assert begins == sorted(begins)
    assert all(e["dur"] >= 0 for e in events if e["ph"] == "X")
    used = [sum(e["args"].values()) for e in events if e.get("name") == "resident bytes"]
    assert max(used) == shown.peak_bytes
    shown.save(tmp_path / "trace.json")
    shown.save(tmp_path / "trace.json.gz")
    assert json.loads((tmp_path / "trace.json").read_text()) == trace
    assert json.loads(gzip.decompress((tmp_path / "trace.json.gz").read_bytes())) == trace


def test_what_an_operator_allocates_is_drawn_where_room_was_made_for_it() -> None:
    """The highest point is the peak, though events of the same operator come before its results."""
    net = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(6)])
    g = rematfn.remat(lambda x: net(x).softmax(-1).sort(-1)[0].sum(), 0.5, where=True)
    for _ in range(2):
        g(torch.randn(64, 64)).backward()
    drawn = rematfn.timeline(g)
    assert rematfn.stats(g).evictions
    assert max(point.used for point in drawn.points) == drawn.peak_bytes


@pytest.mark.parametrize(("f", "budget"), [(torch.sin, "1KiB"), (lambda x: x, "1MiB")])
def test_a_call_that_held_nothing(f: Callable[..., Tensor], budget: str, tmp_path: Path) -> None:
    g = rematfn.remat(f, budget, where=True)
    with contextlib.suppress(rematfn.BudgetError):
        g(torch.ones(64, 64))
    rematfn.timeline(g).save(tmp_path / "empty.png")
    assert (tmp_path / "empty.png").stat().st_size > 1000
