# SPDX-License-Identifier: Apache-2.0
"""torch.profiler around, outside and inside of levels.

Each profile is taken in a process of its own, since what goes wrong is printed at its end.
"""

import re
import time
from pathlib import Path

import pytest
import torch
from helpers import Transform, assert_bitwise_equal
from processes import Ended, forked, in_a_process
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import rematfn
from rematfn import _C
from rematfn.testing import EvictEverything

SCRIPT = """
import contextlib, io, sys
import torch
from torch import func, nn
from torch.profiler import ProfilerActivity, profile
import rematfn
from rematfn.testing import EvictEverything

how = sys.argv[1]
torch.manual_seed(0)
layers = [nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.1), nn.Tanh()) for _ in range(4)]
model, x = nn.Sequential(*layers), torch.randn(64, 64)
params = dict(model.named_parameters())

def loss(params, x):
    return func.functional_call(model, params, (x,)).square().mean()

def samples(params, x):
    return func.vmap(func.grad(loss), (None, 0), randomness="different")(params, x[:8])

WAYS = {
    "eager": lambda f: f,
    "everything": lambda f: rematfn.remat(f, policy=EvictEverything()),
    "moves": lambda f: rematfn.offload(f, policy=EvictEverything()),
}

def run(f, work):
    torch.manual_seed(1)
    if work == "backward":
        out = f(params, x)
        out.backward()
        found = [out.detach(), *(p.grad for p in params.values())]
        model.zero_grad()
        return found
    return list(f(params, x).values())

for work in "backward", "samples":
    f = samples if work == "samples" else loss
    expected = run(f, work)
    g = WAYS[how](f)
    with profile(
        activities=[ProfilerActivity.CPU], record_shapes=True, profile_memory=True, with_stack=True
    ) as taken:
        found = run(g, work)
    assert all(map(torch.equal, found, expected))
    events = taken.events()
    ours = sorted({e.name for e in events if e.name.startswith("rematfn::")})
    shapes = {tuple(map(tuple, e.input_shapes)) for e in events if e.name == "aten::addmm"}
    print(work, ours, shapes)
    if how != "eager":
        counts = rematfn.stats(g)
        assert counts.moves if how == "moves" else counts.replays
"""


COUNTED = """
import contextlib, sys
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
import rematfn

torch.manual_seed(0)
layers = [nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64)) for _ in range(4)]
model, x = nn.Sequential(*layers), torch.randn(64, 64)
how = sys.argv[1]
f = lambda x: model(x).square().mean()
if how == "moves":
    g = rematfn.offload(f, 0.4)
else:
    g = rematfn.remat(f, 0.4, policy=rematfn.policies.Guided(search=0))
for shapes in None, None, True, False, None:
    with contextlib.ExitStack() as stack:
        if shapes is not None:
            stack.enter_context(profile(activities=[ProfilerActivity.CPU], record_shapes=shapes))
        g(x).backward()
    s = rematfn.stats(g)
    print("counts", s.replays, s.budget, s.peak_bytes if how != "moves" else "", sep="|")
"""


LAZY = """
import torch
from torch.profiler import ProfilerActivity, profile
import rematfn

def f(x):
    a, b = x.sin(), x.exp()
    lazy = rematfn.keep(torch._lazy_clone(a))
    for _ in range(4):
        x = (x * 2).cos()  # before each of these the level looks for what has died
    lazy += 1
    return a.sum() + b.sum() + lazy.sum() + x.sum()

x = torch.linspace(0, 1, 4096)
expected = f(x)
for budget in (None, 4 * x.nbytes + 600):
    g = rematfn.remat(f, budget)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True, acc_events=True):
        assert torch.equal(g(x), expected)
assert rematfn.stats(g).replays
"""


def run(script: str, argument: str, folder: Path) -> Ended:
    return forked(folder, {"it": (script, argument)})["it"]


def shapes(ended: Ended) -> list[str]:
    return [re.sub(r"\[.*\]", "", line) for line in ended.out.splitlines()]


def errors(ended: Ended) -> list[str]:
    """Return what was printed to stderr, without times and numbers of processes."""
    return [re.sub(r"\d+", "", line) for line in ended.err.splitlines()]


@pytest.fixture(scope="module")
def eager(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    ended = run(SCRIPT, "eager", tmp_path_factory.mktemp("profiled"))
    assert ended.code == 0, ended.err
    return ended


@pytest.mark.skipif(
    torch.__version__ < "2.13",
    reason="torch 2.12 asks evicted tensors for their addresses, and prints that they refuse",
)
@pytest.mark.parametrize("how", ["everything", "moves"])
def test_a_profile_with_shapes(how: str, tmp_path: Path, eager: Ended) -> None:
    ended = run(SCRIPT, how, tmp_path)
    assert ended.code == 0, ended.err[-2000:]
    assert errors(ended) == errors(eager)
    assert shapes(ended) == shapes(eager)
    wanted = "rematfn::move to the disk" if how == "moves" else "rematfn::replay aten::addmm"
    assert wanted in ended.out


@pytest.mark.parametrize("how", ["guided", "moves"])
def test_a_profile_with_shapes_shows_what_calls_do_without(how: str, tmp_path: Path) -> None:
    """Note [A profiler keeps tensors from dying]."""
    ended = run(COUNTED, how, tmp_path)
    assert ended.code == 0, ended.err[-2000:]
    _measured, *after = re.findall(r"counts\|.*", ended.out)
    assert len(after) == 4
    assert set(after) == {after[0]}, after


@pytest.mark.skipif(
    torch.__version__ < "2.13", reason="torch 2.12 prints that evicted tensors refuse"
)
def test_a_profile_with_shapes_of_a_lazy_clone(tmp_path: Path) -> None:
    """What torch shares until it is written is not for us to share."""
    ended = run(LAZY, "", tmp_path)
    assert ended.code == 0, ended.err[-2000:]
    assert "Exception" not in ended.err


@in_a_process
def test_what_a_profiler_keeps_from_dying_may_be_on_its_way_to_a_disk() -> None:
    """Its bytes are freed with its last tensor: they are not to be read after that."""
    busy, x = torch.ones(1 << 22), torch.linspace(0, 1, 1 << 12)

    def f(x: Tensor) -> Tensor:
        before = [busy * 2, busy * 3]  # the disk is at work on these
        made = []
        for i in range(6):
            y = (x + i).sin()
            made.append(y * 2)
            del y  # the profiler knows it, and its bytes are freed without a word
        in_their_place = [torch.full_like(x, float(i)) for i in range(12)]
        time.sleep(0.1)  # the copies are made
        for _ in range(4):
            in_their_place.append(torch.ones(7).sin()[:1])
        return sum(made) + sum(in_their_place) + sum(b[:1] for b in before)

    expected = f(x)
    _C.testing.draw_link_costs(True)
    for _ in range(6):
        # Without acc_events torch 2.12 warns that it forgets earlier cycles.
        with profile(activities=[ProfilerActivity.CPU], record_shapes=True, acc_events=True):
            g = rematfn.remat(f, offload=rematfn.Disk(), policy=EvictEverything())
            assert_bitwise_equal(g(x), expected)
            assert rematfn.stats(g).moves > 0
            assert rematfn.stats(g).replays > 0


@pytest.mark.parametrize("transform", [rematfn.remat, rematfn.offload])
@pytest.mark.parametrize("enter", ["_record_function_enter", "_record_function_enter_new"])
def test_the_handle_of_a_range_stays_what_it_is(transform: Transform, enter: str) -> None:
    """See Note [Some tensors are objects]."""

    def f(x: Tensor) -> Tensor:
        handle = getattr(torch.ops.profiler, enter)("range", None)
        y = x.sin().cos()
        torch.ops.profiler._record_function_exit(handle)
        return y.exp().sum()

    x = torch.linspace(-1, 1, 64)
    g = transform(f, policy=EvictEverything())
    assert_bitwise_equal(torch.func.grad(g)(x), torch.func.grad(f)(x))
