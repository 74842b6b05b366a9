# SPDX-License-Identifier: Apache-2.0
"""Forms of a budget, and what is said and done when one is too small."""

import re

import pytest
import torch
from helpers import assert_bitwise_equal, refusal_of
from torch import Tensor

import rematfn
from rematfn.testing import MemoryTimeline

KIB = 1024


def test_the_smallest_budget_of_a_call_works_and_one_byte_less_does_not() -> None:
    x = torch.linspace(-1, 1, KIB)  # no operator needs more than its input and its output

    def f(x: Tensor) -> Tensor:
        for _ in range(6):
            x = x.sin().cos()
        return x

    g = rematfn.remat(f, budget=40 * KIB)
    g(x)
    assert rematfn.stats(g).min_budget == 8 * KIB
    again = rematfn.remat(f, budget=8 * KIB)
    assert_bitwise_equal(again(x), f(x))
    assert rematfn.stats(again).peak_bytes == 8 * KIB
    with pytest.raises(rematfn.BudgetError):
        rematfn.remat(f, budget=8 * KIB - 1)(x)


def product(x: Tensor) -> Tensor:
    """Two operands of two units each, and a product of two more: of 4 KiB each, 24 KiB."""
    a, b = torch.stack([x.sin(), x.cos()]), torch.stack([x, x.exp()])
    return torch.bmm(a.view(2, 32, 32), b.view(2, 32, 32)).sum()


def refusal(budget: int | str) -> str:
    x = torch.linspace(-1, 1, KIB).requires_grad_()
    return str(refusal_of(lambda: rematfn.remat(product, budget)(x).backward()))


def test_an_error_tells_where_no_eviction_helps() -> None:
    a = torch.randn(256, 256)  # 256 KiB

    def product(a: Tensor) -> Tensor:
        return a.sin() @ a.cos()

    with pytest.raises(rematfn.BudgetError) as error:
        rematfn.remat(product, "512KiB")(a)
    assert "`aten::mm` reads 512 KiB that count and allocates 256 KiB: no eviction helps." in str(
        error.value
    )

    def pinned(a: Tensor) -> Tensor:  # by its addresses
        b = a.sin()
        b.numpy()
        return b.sum() + (a.cos() * 2).sum()

    with pytest.raises(rematfn.BudgetError) as error:
        rematfn.remat(pinned, "600KiB")(a)
    assert "resident at once" in str(error.value)
    assert "no eviction helps" not in str(error.value)

    def replayed(a: Tensor) -> Tensor:  # what is allocated is a replay's, which needs three at once
        return torch.dot(a.sin().add_(a.cos()).view(-1), a.exp().add_(a.tanh()).view(-1))

    with pytest.raises(rematfn.BudgetError) as error:
        rematfn.remat(replayed, "640KiB")(a)
    assert "`aten::dot` needs 768 KiB" in str(error.value)
    assert "no eviction helps" not in str(error.value)


def test_the_error_comes_before_the_operator_runs() -> None:
    """So the peak is kept even then, and what the operator would have written is not."""
    x, outside = torch.ones(4 * 256), torch.zeros(8 * 256)

    def f(x: Tensor) -> Tensor:
        y = x.sin()  # one unit, of the two there are
        outside.copy_(torch.cat([y, y]))  # the concatenation would be two more
        return y

    with MemoryTimeline() as timeline, pytest.raises(rematfn.BudgetError, match="aten::cat"):
        rematfn.remat(f, budget=8 * KIB)(x)
    assert timeline.peak <= 8 * KIB
    assert not outside.any()


def test_an_error_in_the_backward_comes_before_its_operator_too() -> None:
    x = torch.ones(KIB, requires_grad=True)  # its gradient is 4 KiB, all zeros but for 16 bytes
    g = rematfn.remat(lambda x: (x[:4] * x[:4]).sin().sum(), budget=KIB)
    loss, one = g(x), torch.ones(())
    with MemoryTimeline() as timeline, pytest.raises(rematfn.BudgetError):
        loss.backward(one)
    assert timeline.peak <= KIB
    assert x.grad is None


def scripted_sum(x: torch.Tensor) -> torch.Tensor:
    return (x.sin() * x).sum()


def test_an_error_keeps_its_type_through_torchscript() -> None:
    """TorchScript's interpreter makes a RuntimeError of whatever an operator raises."""
    script = torch.jit.script(scripted_sum)
    x = torch.ones(1000)
    with pytest.raises(rematfn.BudgetError, match=r"aten::mul.*needs") as caught:
        rematfn.remat(script, 6000)(x)
    assert "TorchScript" in str(caught.value.__cause__)


def test_an_error_names_the_operator_and_speaks_in_the_unit_that_the_budget_was_given_in() -> None:
    text = refusal("18 kB")
    assert text.startswith("remat(product, budget=18 kB)"), text
    assert "aten::bmm" in text, text
    assert "needs 24.58 kB" in text, text
    assert re.search(r"Raise the budget to about [\d.]+ kB,", text), text
    assert "KiB" not in text
    assert re.search(r"to about 0\.0\d+ MiB,", refusal("0.0171 MiB"))
    bytes_alone = re.search(r"to about [\d.]+ KiB \((\d+) bytes\),", refusal(18 * KIB))
    assert bytes_alone
    assert int(bytes_alone[1]) >= 24 * KIB
