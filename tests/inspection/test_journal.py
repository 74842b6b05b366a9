# SPDX-License-Identifier: Apache-2.0
"""What calls write down under `where`: what it says, and that it changes nothing."""

import pytest
import torch
from helpers import assert_bitwise_equal
from torch import Tensor, nn

import rematfn
from rematfn._inspection.journal import journal_of

KIB = 1024


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x)
        hidden = torch.tanh(hidden)
        return x + self.down(hidden)


class Net(nn.Module):
    def __init__(self, width: int = 16, blocks: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def line_of(text: str, path: str = __file__) -> int:
    """Return the first line of a file (this one) that has `text`."""
    with open(path, encoding="utf-8") as file:
        return next(i for i, line in enumerate(file, 1) if text in line)


def chain(x: Tensor) -> Tensor:
    for _ in range(10):
        x = x.sin()
    return x.sum()


@pytest.mark.parametrize("budget", [None, 5 * 4 * KIB])
def test_a_call_evicts_the_same_with_and_without(budget: int | None) -> None:
    x = torch.linspace(0, 1, KIB)
    policy = rematfn.policies.Guided(search=0)  # both follow the same plan
    plain, watched = (
        rematfn.remat(torch.func.grad(chain), budget, policy=policy, where=where)
        for where in (False, True)
    )
    for _ in range(3):
        assert_bitwise_equal(plain(x), watched(x))
        found = [rematfn.stats(g) for g in (plain, watched)]
        if budget is None:  # what nobody asks for is not looked at
            found = [(s.peak_bytes, s.evictions, s.replays, s.operators) for s in found]
        assert found[0] == found[1]


def test_places_of_forward_and_backward() -> None:
    net, x = Net(), torch.randn(8, 16)
    g = rematfn.remat(net, "16KiB", where=True)
    g(x).sum().backward()
    journal = journal_of(g, "test")
    here = {(i, journal.place(i)) for i in range(len(journal.calls))}
    tanh = line_of("hidden = torch.tanh(hidden)")
    forward = {place.module for i, place in here if journal.calls[i].name == "aten::tanh"}
    assert forward == {f"Net.blocks.{i}" for i in range(4)}
    assert {p.line for i, p in here if "tanh" in journal.calls[i].name} == {tanh}
    backward = {place.module for i, place in here if journal.calls[i].name == "aten::tanh_backward"}
    assert backward == forward
    products = {p.module for i, p in here if journal.calls[i].name in ("aten::addmm", "aten::mm")}
    assert products == {f"Net.blocks.{i}.{name}" for i in range(4) for name in ("up", "down")}
    assert all(place.file == __file__ for _, place in here)


def test_a_budget_error_names_the_line() -> None:
    net, x = Net(), torch.randn(8, 16)
    g = rematfn.remat(net, "1KiB", where=True)
    line = line_of("hidden = self.up(x)")
    with pytest.raises(rematfn.BudgetError, match=rf"test_journal\.py:{line} in forward"):
        g(x)

    def f(x: Tensor) -> Tensor:
        return x[0].sin().sum()  # its gradient is as large as x

    x = torch.randn(10_000, 1, requires_grad=True)
    with rematfn.where():
        y = rematfn.remat(f, "8KiB")(x)
    line = line_of("# its gradient is as large")
    with pytest.raises(rematfn.BudgetError, match=rf"in the backward of .*test_journal\.py:{line}"):
        y.backward()


def test_nobody_pays_for_it_in_a_call_that_has_not_asked() -> None:
    g = rematfn.remat(chain)
    g(torch.ones(4))
    with pytest.raises(ValueError, match="written nothing down"):
        rematfn.explain(g)
    with pytest.raises(ValueError, match="was not called yet"):
        rematfn.explain(rematfn.remat(chain))
