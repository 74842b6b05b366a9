# SPDX-License-Identifier: Apache-2.0
"""The fake device itself: asynchronous, with memory that tells of misuse, and the CPU's numbers."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from fake_device import delays, memory_limit, stopped
from helpers import assert_bitwise_equal
from programs import Block
from torch import Tensor, nn

DEVICE = "fake"


def current() -> torch.Stream:
    return torch.accelerator.current_stream()


# --- what it computes -----------------------------------------------------------------------------


class Gpt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(11, 8), nn.Linear(8, 11)
        self.block = Block(8, 2)
        self.block.drop.p = 0.0

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.block(self.embed(tokens)))


def convnet() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True)),
        *(nn.MaxPool2d(2), nn.Conv2d(4, 6, 3), nn.SiLU(), nn.Flatten(), nn.Linear(24, 3)),
    )


@pytest.mark.parametrize(
    ("make", "inputs"),
    [
        (lambda: nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3)), (8, 16)),
        (convnet, (4, 3, 8, 8)),
        (Gpt, None),
    ],
    ids=["mlp", "convnet", "gpt"],
)
def test_networks_give_the_bits_of_the_cpu(
    make: Callable[[], nn.Module], inputs: tuple[int, ...] | None
) -> None:
    net = make()
    x = torch.randint(0, 11, (2, 6)) if inputs is None else torch.randn(inputs)

    def trained(net: nn.Module, x: Tensor) -> list[Tensor]:
        optimizer = torch.optim.Adam(net.parameters(), 0.1)
        for _ in range(2):
            optimizer.zero_grad()
            net(x).square().mean().backward()
            optimizer.step()
        tensors = [*net.parameters(), *(p.grad for p in net.parameters()), *net.buffers()]
        return [t.detach().cpu() for t in tensors]

    with delays(seed=1):
        on_device = trained(copy.deepcopy(net).to(DEVICE), x.to(DEVICE))
    assert_bitwise_equal(on_device, trained(net, x))


@pytest.mark.parametrize("seed", range(3))
def test_operators_of_every_kind_give_the_bits_of_the_cpu(seed: int) -> None:
    def run(x: Tensor) -> list[Tensor]:
        out = torch.empty(0, device=x.device)
        torch.add(x, 1, out=out)  # grows
        y = x.clone()
        y[1:].mul_(x[:-1]).relu_()
        z = torch.fft.rfft(x).conj()
        mask = x > 0
        return [
            *(out, y, z, z.real * 2, x[mask], x.nonzero(), x.t()[::2].sort().values),
            *(torch.view_as_real(z * 1), x.unfold(0, 2, 1).sum(-1), torch.stack([x, y]).cumsum(0)),
            *(x.topk(2).indices, x[[1, 0]], x.to(torch.bfloat16).expand(2, 4, 6).float()),
            *(torch.arange(5, device=x.device), torch.tril_indices(3, 3, device=x.device)),
            *(x * torch.tensor(2.0), x.index_put((torch.tensor([0]),), torch.tensor(3.0))),
            *(torch.linalg.svd(x).S, torch.tensor([float(x.sum()), x.max().item()])),
        ]

    torch.manual_seed(seed)
    x = torch.randn(4, 6)
    with delays(seed, most=200):
        actual = [t.cpu() for t in run(x.to(DEVICE))]
    assert_bitwise_equal(actual, [t.clone() for t in run(x)])


def test_errors_are_raised_by_the_call_or_by_the_next_wait() -> None:
    x = torch.ones(3, device=DEVICE)
    with pytest.raises(RuntimeError, match="elements"):
        x @ torch.ones(4, device=DEVICE)
    with pytest.raises(RuntimeError, match="on fake:0, but `other` is on cpu"):
        x + torch.ones(3)
    x[torch.tensor([7], device=DEVICE)]  # nobody knows yet
    with pytest.raises(IndexError, match="out of bounds"):
        torch.accelerator.synchronize()
    torch.accelerator.synchronize()


def test_random_numbers_follow_the_generator_of_the_device() -> None:
    torch.manual_seed(3)
    before = torch.random.get_rng_state()

    def draw() -> list[Tensor]:
        return [torch.rand(5, device=DEVICE), nn.functional.dropout(torch.ones(9, device=DEVICE))]

    first = draw()
    assert torch.equal(torch.random.get_rng_state(), before)  # the CPU's stands still
    state = torch.fake.get_rng_state()
    after = torch.randn(5, device=DEVICE)
    assert not torch.equal(after, torch.randn(5, device=DEVICE))
    torch.fake.set_rng_state(state)
    assert torch.equal(after, torch.randn(5, device=DEVICE))
    torch.manual_seed(3)
    assert_bitwise_equal(draw(), first)


# --- streams and events ---------------------------------------------------------------------------


def test_the_host_does_not_wait_for_a_kernel() -> None:
    x = torch.zeros(4, device=DEVICE)
    with stopped():
        y = x + 1
        event = torch.Event(DEVICE)
        event.record()
        assert not current().query()
        assert not event.query()
    assert y.tolist() == [1.0] * 4
    assert event.query()


def test_streams_run_side_by_side_and_an_event_orders_them() -> None:
    side = torch.Stream(DEVICE)
    x = torch.zeros(4, device=DEVICE)
    torch.accelerator.synchronize()
    for ordered in (False, True):
        with stopped():
            x.add_(1)
            done = current().record_event()
            with side:
                if ordered:
                    side.wait_event(done)
                seen = x.clone()
            if not ordered:
                side.synchronize()
        torch.accelerator.synchronize()
        assert seen.tolist() == [2.0 if ordered else 0.0] * 4


def test_delays_let_an_unordered_reader_come_first() -> None:
    side = torch.Stream(DEVICE)
    early = rounds = 0
    with delays(seed=4):
        while not 0 < early < rounds:
            rounds += 1
            assert rounds <= 4000, early
            x = torch.zeros(4, device=DEVICE)
            torch.accelerator.synchronize()
            x.add_(1)
            with side:
                seen = x.clone()
            torch.accelerator.synchronize()
            early += seen.tolist() != [1.0] * 4


def test_events_tell_the_time_between_them() -> None:
    first, second = (torch.Event(DEVICE, enable_timing=True) for _ in range(2))
    first.record()
    first.synchronize()
    with stopped():
        second.record()
        subprocess.run(["sleep", "0.02"], check=True)
    second.synchronize()
    assert first.elapsed_time(second) >= 20


# --- memory ---------------------------------------------------------------------------------------


def test_fresh_memory_is_full_of_nans() -> None:
    assert torch.empty(9, device=DEVICE).isnan().all()
    x = torch.ones(9, device=DEVICE)
    del x
    assert torch.empty(9, device=DEVICE).isnan().all()
    assert torch.empty(9, pin_memory=True).isnan().all()


def test_a_block_is_reused_at_once_on_its_own_stream() -> None:
    with stopped():
        x = torch.ones(9, device=DEVICE)
        address = x.data_ptr()
        y = x + 1
        del x
        z = torch.full((9,), 5.0, device=DEVICE)  # while `x + 1` has not run
        assert z.data_ptr() == address
    assert y.tolist() == [2.0] * 9
    assert z.tolist() == [5.0] * 9


def test_a_recorded_stream_keeps_a_block_until_it_is_done() -> None:
    side = torch.Stream(DEVICE)
    x = torch.ones(9, device=DEVICE)
    address = x.data_ptr()
    torch.accelerator.synchronize()
    with stopped(side):
        with side:
            y = x + 1
        x.record_stream(side)
        del x
        assert torch.zeros(9, device=DEVICE).data_ptr() != address
        current().synchronize()
        held = torch.accelerator.memory_stats()["active_bytes.all.current"]
        assert held > torch.accelerator.memory_allocated()
    torch.accelerator.synchronize()
    assert y.tolist() == [2.0] * 9
    assert torch.zeros(9, device=DEVICE).data_ptr() == address


def dies(program: str) -> str:
    """Run a program on the device that a signal ends; return what it wrote."""
    text = "import torch, fake_device\nfake_device.load()\n" + textwrap.dedent(program)
    here = Path(__file__).parents[1]
    found = subprocess.run(
        [sys.executable, "-c", text], cwd=here, capture_output=True, text=True, timeout=120,
        env={**os.environ, "PYTHONPATH": str(here)},
    )  # fmt: skip
    assert found.returncode == -11, (found.returncode, found.stderr)
    return found.stderr


def test_a_late_reader_of_freed_memory_is_found() -> None:
    told = dies(
        """
        side = torch.Stream("fake")
        x = torch.ones(9, device="fake")
        torch.accelerator.synchronize()
        with fake_device.stopped(side):
            with side:
                x.sin()
            del x  # without record_stream
            torch.accelerator.current_stream().synchronize()
        torch.accelerator.synchronize()
        """
    )
    assert "`aten::sin` on stream 1 touched memory that is free" in told


def test_a_copy_to_pinned_memory_that_died_is_found() -> None:
    told = dies(
        """
        import ctypes
        x, pinned = torch.ones(9, device="fake"), torch.empty(9, pin_memory=True)
        address = pinned.data_ptr()
        pinned.copy_(x, non_blocking=True)
        torch.accelerator.synchronize()
        del pinned
        torch.accelerator.synchronize()
        ctypes.c_float.from_address(address).value
        """
    )
    assert "`the host` on stream -1 touched memory that is free" in told


@pytest.mark.parametrize("pinned", [False, True])
def test_only_copies_of_pinned_memory_are_asynchronous(pinned: bool) -> None:
    side = torch.Stream(DEVICE)
    host = torch.ones(9, pin_memory=pinned)
    assert host.is_pinned() == pinned
    x = torch.zeros(9, device=DEVICE)
    torch.accelerator.synchronize()
    with side:
        if not pinned:
            x.copy_(host, non_blocking=True)
            assert side.query()
        else:
            with stopped(side):
                x.copy_(host, non_blocking=True)
                host.fill_(3)  # too early
    torch.accelerator.synchronize()
    assert x.tolist() == [3.0 if pinned else 1.0] * 9


def test_pinned_memory_waits_for_the_copies_of_it() -> None:
    x = torch.ones(9, device=DEVICE)
    with stopped():
        host = torch.full((9,), 5.0, pin_memory=True)
        address = host.data_ptr()
        x.copy_(host, non_blocking=True)
        del host
        assert torch.empty(9, pin_memory=True).data_ptr() != address
    assert x.tolist() == [5.0] * 9
    assert torch.empty(9, pin_memory=True).data_ptr() == address


def test_memory_is_counted_and_ends() -> None:
    before = torch.accelerator.memory_allocated()
    torch.accelerator.reset_peak_memory_stats()
    x = torch.ones(1000, device=DEVICE)
    y = x + 1
    del y
    assert torch.accelerator.memory_allocated() - before == 4000
    assert torch.accelerator.max_memory_allocated() - before == 8000
    with memory_limit(before + 6000), pytest.raises(torch.OutOfMemoryError, match="fake device"):
        x + 1
    assert torch.equal((x + 1).cpu(), torch.full((1000,), 2.0))
