# SPDX-License-Identifier: Apache-2.0
"""`torch.compile(block, backend="rematfn")` inside of `remat`: each graph is an operator."""

import functools
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import (
    EACH,
    EVERY,
    EVERYTHING,
    EXHAUSTIVE,
    Transform,
    assert_bitwise_equal,
    assert_same_as_eager,
    same_as_eager,
    spread,
    untransformed,
)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import rematfn
from rematfn import _C
from rematfn._interop import compiled_graphs
from rematfn.testing import EvictEverything, MemoryTimeline

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # torch's compiler warns about torch
    pytest.mark.usefixtures("nothing_compiled"),
]


@pytest.fixture(autouse=True)
def cut_at_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also the small graphs of tests."""
    monkeypatch.setattr(compiled_graphs, "_LITTLE", 0)


Program = Callable[[Tensor, Tensor], Any]
# Operator by operator, so that most tests need no compiler.
EAGERLY = {"inner": "aot_eager"}


def fused(f: Any, inner: str = "aot_eager", **kwargs: Any) -> Any:
    return torch.compile(f, backend="rematfn", options={"inner": inner}, **kwargs)


def leaves() -> tuple[Tensor, Tensor]:
    x = torch.linspace(0.2, 1.1, 36).view(6, 6)
    return x.requires_grad_(), x.detach().cos().requires_grad_()


# --- blocks ---------------------------------------------------------------------------------------


class Attention(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.norm, self.dropout = nn.LayerNorm(width), nn.Dropout(0.1)
        self.three, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads = [
            t.view(batch, length, 2, width // 2).transpose(1, 2)
            for t in self.three(self.norm(x)).chunk(3, -1)
        ]
        y = F.scaled_dot_product_attention(*heads, dropout_p=0.1, is_causal=True)
        return x + self.dropout(F.gelu(self.out(y.transpose(1, 2).reshape(x.shape))))


class Residual(nn.Module):
    def __init__(self, channels: int = 4) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(channels, channels, 3, padding=1)
        self.norm = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(self.convolution(x)).relu()


class Stacked(nn.Sequential):
    """One graph: some versions of torch compile each part of a Sequential by itself."""

    def forward(self, x: Tensor) -> Tensor:
        for part in self:
            x = part(x)
        return x


BLOCKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "attention": (Attention, (8, 32, 64)),
    "batch norm": (Residual, (4, 4, 8, 8)),
}
MANY = 12


def trained(
    kind: str,
    inner: str,
    transform: Transform,
    look: Callable[[Any], object] = lambda f: None,
    blocks: int = MANY,
) -> Any:
    """Train blocks that are compiled one by one; return all that can be seen.

    `look` is given the transformed function after each step.
    """
    block, shape = BLOCKS[kind]
    torch.manual_seed(0)
    net = nn.Sequential(*(block() for _ in range(blocks)))
    for part in net:
        part.compile(backend="rematfn", options={"inner": inner})
    x = torch.randn(shape)
    f = transform(net)
    losses = []
    for step in range(2):
        torch.manual_seed(step)
        loss = f(x).square().mean()
        loss.backward()
        losses.append(loss.detach())
        look(f)
    return losses, [p.grad for p in net.parameters()], list(net.buffers()), torch.rand(3)


@pytest.mark.parametrize(("kind", "inner"), spread(BLOCKS, ["inductor", "aot_eager"], 2))
def test_compiled_blocks_in_two_fifths_of_the_peak(kind: str, inner: str) -> None:
    expected = trained(kind, inner, untransformed)
    seen: list[Any] = []
    look = lambda f: seen.append(rematfn.stats(f))  # noqa: E731
    actual = trained(kind, inner, lambda f: rematfn.remat(f, 0.4), look)
    assert_bitwise_equal(actual, expected)
    first, second = seen  # the first has no cap: it measures the peak
    assert first.operators == second.operators  # the call that compiles is the same program
    assert second.peak_bytes <= 0.4 * first.peak_bytes
    assert second.replays > 0
    few = trained(kind, inner, untransformed, blocks=3)  # each replay reaches back to the first
    assert_bitwise_equal(trained(kind, inner, EVERYTHING, blocks=3), few)


@pytest.mark.parametrize(
    ("inner", "what"), spread(["aot_eager", "inductor"], ["blocks", "the whole model"], 2)
)
def test_the_allocator_counts_no_more_than_the_budget(inner: str, what: str) -> None:
    """Above the results, which are the caller's. No piece makes the whole of a residual stream."""
    torch.manual_seed(0)
    net = Stacked(*(Attention() for _ in range(6)))
    for part in net if what == "blocks" else [net]:
        part.compile(backend="rematfn", options={"inner": inner})
    x = torch.randn(BLOCKS["attention"][1])  # inductor has compiled for these sizes
    f = rematfn.remat(net, 0.4)
    parameters = list(net.parameters())
    for _ in range(3):
        with MemoryTimeline() as timeline:
            gradients = torch.autograd.grad(f(x).square().mean(), parameters)
    budget = rematfn.stats(f).budget
    assert budget is not None
    assert rematfn.stats(f).replays > 0
    caller = x.nbytes + sum(g.nbytes for g in gradients)
    assert 0.8 * budget < timeline.peak <= budget + caller


def test_products_stay_operators() -> None:
    """What is between two is one, which is made again without them."""

    def f(x: Tensor, w: Tensor) -> Tensor:
        y = ((x @ w).sin().exp() + 1) @ w
        return y.cos() * y.sum(0)

    g = rematfn.remat(fused(f))
    with torch.no_grad():
        g(*leaves())
    assert rematfn.stats(g).operators == 4  # a product and a piece, twice


@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
def test_what_makes_little_is_one_operator_each_way(
    inner: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a cell, called step by step; what a backward returns may be large."""
    monkeypatch.setattr(compiled_graphs, "_LITTLE", 100)

    def cell(h: Tensor, w: Tensor) -> Tensor:
        return (h @ w).tanh()

    step = fused(cell, inner)
    h, w = torch.linspace(-1, 1, 32).view(2, 16), torch.eye(16).cos().requires_grad_()

    def f(h: Tensor) -> Any:
        for _ in range(6):
            h = step(h, w)
        return h, *torch.autograd.grad(h, w, torch.ones_like(h))

    assert_same_as_eager(lambda transform: transform(f)(h))
    g = rematfn.remat(f)
    g(h)
    sums_of_gradients = 5
    assert rematfn.stats(g).operators == 6 + 1 + 6 + sums_of_gradients
    cut = fused(cell, inner, dynamic=True)  # later calls may make more
    with torch.no_grad():
        g = rematfn.remat(lambda h: cut(h, w))
        g(h)
    assert rematfn.stats(g).operators == 2


def test_numbers_are_those_that_inductor_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seeds are an operator; attention draws nothing, and is part of a graph that makes little."""
    monkeypatch.setattr(compiled_graphs, "_LITTLE", 1 << 18)

    def f(x: Tensor, w: Tensor) -> Tensor:
        y = F.scaled_dot_product_attention(*[F.dropout(x @ w, 0.3).view(1, 1, 6, 6)] * 3)
        return F.dropout(y.sin(), 0.5)

    x, w = leaves()

    def run(backend: str, transform: Transform = untransformed) -> Any:
        torch.manual_seed(3)
        out = transform(torch.compile(f, backend=backend))(x, w)
        return out, torch.rand(2), torch.autograd.grad(out.sum(), (x, w))

    out, state, _ = run("inductor")
    torch._dynamo.reset()
    assert_same_as_eager(functools.partial(run, "rematfn"), EVERY)
    assert_bitwise_equal(run("rematfn")[:2], (out, state))
    g = rematfn.remat(torch.compile(f, backend="rematfn"))
    g(x, w)
    assert rematfn.stats(g).operators == 2


@same_as_eager
def test_a_jagged_tensor(transform: Transform) -> Any:
    """Its own size is no number, and its parts are plain."""
    f = fused(lambda rows: (rows.sin() * 2).cos())

    def g(x: Tensor, w: Tensor) -> Tensor:
        rows = torch.nested.as_nested_tensor([x, w[:2]], layout=torch.jagged)
        values: Tensor = f(f(rows).exp()).values()
        return values

    x, w = leaves()
    out = transform(g)(x, w)
    return out, torch.autograd.grad(out.sum(), (x, w))


@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
def test_the_backward_has_the_masks_of_the_forward(inner: str) -> None:
    """What the partitioner recomputes is nothing that draws."""
    f = fused(lambda x, w: F.dropout((x @ w).exp(), 0.5) * 3, inner)
    x, w = torch.rand(64, 8), torch.rand(8, 64).requires_grad_()
    for g in (f, rematfn.remat(f, policy=EvictEverything())):
        out = g(x, w)
        (gradient,) = torch.autograd.grad(out.sum(), w)
        torch.testing.assert_close(gradient, (x.T @ out).detach())
        assert 0.3 < (out == 0).float().mean() < 0.7


@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
def test_what_may_have_other_bits_is_not_fused(inner: str) -> None:
    """Where threads race, and where the core keeps results because a second run's differ."""
    order = torch.tensor([[0, 1, 2, 2, 2, 1]])

    def written(x: Tensor, w: Tensor) -> Tensor:
        return x.sin().scatter(0, order, w.exp()).cos()

    def alignment(x: Tensor, w: Tensor) -> Tensor:
        lengths, targets = torch.tensor([6]), torch.tensor([[1, 2]])
        return F.ctc_loss(x.sin().log_softmax(-1)[:, None], targets, lengths, torch.tensor([2]))

    for f, operator in ((written, "scatter"), (alignment, "ctc_loss")):
        g = rematfn.remat(fused(f, inner))
        with torch.no_grad(), rematfn.where():
            g(*leaves())
        names = [part.operator for part in rematfn.explain(g).operators]
        assert any(operator in name for name in names), names


@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
@pytest.mark.parametrize(
    "tags",
    [(torch.Tag.nondeterministic_seeded,), (torch.Tag.nondeterministic_bitwise,), ()],
    ids=["seeded", "bitwise", "untagged"],
)
def test_a_custom_operator_that_writes_random_numbers(tags: Any, inner: str) -> None:
    """It hides in the higher-order operator that makes it one which writes nothing."""
    with torch.library._scoped_library("tested", "FRAGMENT") as library:
        library.define("scale(Tensor(a!) x) -> ()", tags=tags)

        def scale(x: Tensor) -> None:
            x.mul_(torch.rand_like(x))

        library.impl("scale", scale, "CPU")
        library.impl("scale", lambda x: None, "Meta")

        def body(x: Tensor) -> Tensor:
            y = x.sin().detach()
            torch.ops.tested.scale(y)
            return y * x

        block = fused(body, inner)

        def run(transform: Transform) -> Any:
            torch.manual_seed(0)
            x, _ = leaves()
            out = transform(lambda x: block(x.exp()).sin().exp())(x)
            out.sum().backward()
            return out, x.grad, torch.rand(2)

        assert_same_as_eager(run, EVERY)
        on_cpu, elsewhere = (
            _C.has_one_result("tested::scale", "", where) for where in (True, False)
        )
        assert (on_cpu, elsewhere) == (not tags, False)
        if not tags:  # fused: See Note [Whether an untagged operator draws is observed]
            return
        message = r"may have other bits each time, and is in a branch or a loop"
        with pytest.raises(Exception, match=message):
            fused(lambda x: torch.cond(x.sum() > 0, body, torch.sin, (x,)))(leaves()[0].detach())


@pytest.mark.parametrize("times", [1, 2])
def test_a_checkpoint_inside_that_draws(times: int) -> None:
    """Torch's partitioner hides what draws in higher-order operators, which keep or set a state."""
    w = leaves()[1]

    def part(x: Tensor) -> Tensor:
        x = functools.reduce(F.dropout, [0.2] * (times - 1), x)
        return F.dropout(x @ w, 0.5) * torch.rand(6, 6)

    block = fused(lambda x: checkpoint(part, x.sin(), use_reentrant=False).exp())

    def run(transform: Transform) -> Any:
        torch.manual_seed(0)
        x = leaves()[0]
        out = transform(lambda x: block(x.cos()).sin())(x)
        return out, *torch.autograd.grad(out.sum(), (x, w)), torch.rand(2)

    assert_same_as_eager(run, EVERY)


def test_who_asks_where_is_not_compiled() -> None:
    """Paths of modules differ from block to block, and the compiler has a limit."""
    seen: list[int | None] = []
    look = lambda f: seen.append(rematfn.stats(f).operators)  # noqa: E731
    expected = trained("batch norm", "aot_eager", rematfn.remat, look)
    for how in ({}, {"policy": EvictEverything()}):
        torch._dynamo.reset()
        asked = functools.partial(rematfn.remat, where=True, **how)
        assert_bitwise_equal(trained("batch norm", "aot_eager", asked, look), expected)
    assert len(set(seen)) == 1, seen


@pytest.mark.parametrize("compiles", ["blocks", "the update too"])
def test_a_step_with_compiled_blocks_and_its_optimizer(compiles: str) -> None:
    # torch compiles a method 8 times, and then it rounds as eager: not for each try at a budget.
    mode = EACH if compiles == "blocks" or EXHAUSTIVE else EVERY
    assert_same_as_eager(functools.partial(steps, compiles), mode)


def steps(compiles: str, transform: Transform) -> Any:
    if EXHAUSTIVE:
        torch._dynamo.reset()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.2), nn.Linear(6, 6))
    block, head = fused(net), fused(lambda h: h.softmax(-1).square().sum())
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    update = optimizer.step if compiles == "blocks" else fused(optimizer.step)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = head(block(block(x.sin())).exp())
        loss.backward()
        update()
        return loss.detach()

    f = transform(step)
    losses = [f(leaves()[0].detach()) for _ in range(3)]
    return losses, list(net.parameters()), list(net.buffers())


# --- what AOTAutograd's graphs do, and is undone at the edge --------------------------------------


def doubles(x: Tensor, w: Tensor) -> Tensor:
    x.mul_(2)
    return (x * w).sin()


def writes_inside(x: Tensor, w: Tensor) -> Tensor:
    y = x * w
    y.mul_(x)
    return y.sum(0)


def draws(x: Tensor, w: Tensor) -> Tensor:
    return F.dropout(x @ w, 0.3) * torch.rand_like(x) + torch.randn(6, 6)


def breaks(x: Tensor, w: Tensor) -> Tensor:
    y = (x @ w).sin()
    torch._dynamo.graph_break()
    return (y * x).exp()


def sums_in_any_order(x: Tensor, w: Tensor) -> Tensor:
    return torch.zeros(6, 6).index_add(0, torch.tensor([0, 0, 1, 2, 2, 5]), x @ w)


def says_twice(x: Tensor, w: Tensor) -> Any:
    y = x.sin()
    return y, y, y.view(-1), y.t()


def in_autocast() -> Program:
    block = fused(lambda x, w: (x @ w).sin() @ w)

    def f(x: Tensor, w: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return block(x.sin(), w).float()

    return f


def given_what_overlaps() -> Program:
    block = fused(lambda a, b: (a.mul_(2), (a + b).sin())[1])

    def f(x: Tensor, w: Tensor) -> Tensor:
        y = x.sin()
        return block(y[:3], y[2:5]) * y[:3]

    return f


def within(around: Callable[..., Any]) -> Program:
    """Return a program whose block is called by way of `around`."""
    block = fused(lambda x, w: F.dropout((x @ w).sin(), 0.5))
    return lambda x, w: around(block, x.sin(), w)


def as_a_block(body: Program) -> Program:
    block = fused(body)
    return lambda x, w: block(x.sin(), w.exp())


def without_arguments() -> Program:
    block = fused(lambda: torch.randn(6) + torch.ones(6))
    return lambda x, w: block() * x


BODIES: dict[str, Program] = {
    "views": lambda x, w: ((x @ w).t(), x[1:], (x * 2)[:, 1:3], x),
    "twice": says_twice,
    "no tensors": lambda x, w: ((x @ w).exp(), 3, None, x.shape[0]),
    "in place": doubles,
    "in place inside": writes_inside,
    "random": draws,
    "graph break": breaks,
    "scatter": sums_in_any_order,
}
PROGRAMS: dict[str, Callable[[], Program]] = {
    **{name: functools.partial(as_a_block, body) for name, body in BODIES.items()},
    "no arguments": without_arguments,
    "arguments that overlap": given_what_overlaps,
    "in autocast": in_autocast,
    "in a checkpoint": lambda: within(functools.partial(checkpoint, use_reentrant=False)),
    "made opaque": lambda: within(lambda block, *args: rematfn.opaque(block)(*args)),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_what_a_graph_takes_returns_and_writes(name: str) -> None:
    f = PROGRAMS[name]()

    def run(transform: Transform) -> Any:
        torch.manual_seed(1)
        x, w = leaves()
        out = transform(f)(x, w)
        tensors = [t for t in (out if isinstance(out, tuple) else [out]) if isinstance(t, Tensor)]
        sum(t.sum() for t in tensors if t.requires_grad).backward()
        return out, x.grad, w.grad, torch.rand(2)

    assert_same_as_eager(run, EVERY)


def writes_beside_a_result(x: Tensor, total: Tensor) -> Tensor:
    least, most = torch.aminmax(total + x.detach().sum())
    total.copy_(most + 1)
    return x.sin() * least


# What is written, and the body that does.
WRITES: dict[str, tuple[Callable[[], Tensor], Program]] = {
    "a sum": (lambda: torch.zeros(()), lambda x, s: (s.add_(x.sum()), (x * 2).sin())[1]),
    # Its new contents depend on nothing else.
    "a counter": (lambda: torch.zeros((), dtype=torch.int64), lambda x, n: (n.add_(1), x.sin())[1]),
    "contents that are made beside a result": (lambda: torch.zeros(3), writes_beside_a_result),
}


@pytest.mark.parametrize(
    ("name", "inner"), [*((name, "aot_eager") for name in WRITES), ("a counter", "inductor")]
)
def test_an_argument_of_the_callers_is_written_once(name: str, inner: str) -> None:
    make, body = WRITES[name]
    block = fused(body, inner)

    def run(transform: Transform) -> Any:
        x, written = leaves()[0], make()
        out = transform(lambda x: block(block(x.exp(), written), written).exp())(x)
        out.sum().backward()
        return out, x.grad, written

    assert_same_as_eager(run)


RESULTS_OF_A_PIECE: dict[str, Callable[[Tensor], Any]] = {
    "conjugate": lambda z: (z, z.conj()),
    "conjugate first": lambda z: (z.conj(), z, z[1:]),
    "negative": lambda z: (torch._neg_view(z), z),
    "negative part of the conjugate": lambda z: (z[:, 1:], z.conj().imag, z.conj()),
    "real part": lambda z: (z, z.real),
    "real part first": lambda z: (z.real[1:], z.imag, z),
    "negative part first": lambda z: (z.conj().imag, z),
    "as real": lambda z: (z, torch.view_as_real(z)[:, 1:]),
    "other bits": lambda z: (z, z.view(torch.int32)[..., ::3], z.view(torch.uint8)),
    "odd number of bytes": lambda z: (z, z.real.clone().view(-1)[3:].view(torch.int16)),
}


@pytest.mark.parametrize(
    ("name", "inner"), [*((n, "aot_eager") for n in RESULTS_OF_A_PIECE), ("as real", "inductor")]
)
@pytest.mark.parametrize("of", ["a result", "an argument"])
def test_results_that_read_one_storage_in_several_ways(name: str, inner: str, of: str) -> None:
    """As another type, conjugated or negated: a write to one of them is a write to all."""
    views = RESULTS_OF_A_PIECE[name]
    block = fused((lambda v: views(v.sin())) if of == "a result" else views, inner)
    x = torch.view_as_complex(torch.linspace(0.2, 1.1, 32).view(4, 4, 2))

    def run(transform: Transform) -> Any:
        def f(x: Tensor) -> Any:
            first, *others = block(x.cos())
            others[0].mul_(2)
            return first, *others, [t.exp() for t in (first, *others) if t.is_floating_point()]

        return transform(f)(x)

    assert_same_as_eager(run, EVERY)


def swaps(a: Tensor, b: Tensor, c: Tensor) -> None:
    old = a.clone()
    a.copy_(b)
    b.copy_(old)


def copies_twice(a: Tensor, b: Tensor, c: Tensor) -> None:
    b.copy_(a)
    a.mul_(2)
    c.copy_(b)


def transposes(a: Tensor, b: Tensor, c: Tensor) -> None:
    old = a.t().clone()
    a.copy_(b.t())
    b.copy_(old)


def keeps_a_view(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    last = a[-1]
    made = b * 2 + last.sin()
    c.copy_(last.flip(0).expand(6, 6))
    a.add_(1)
    return made


def gives_a_view(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    made = a.t() @ a.t()
    c.copy_(a.t())
    a.mul_(2)
    return made


@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
@pytest.mark.parametrize("f", [swaps, copies_twice, transposes, keeps_a_view, gives_a_view])
def test_arguments_that_are_written_into_each_other(f: Any, inner: str) -> None:
    """Inductor removes the copies between them, since all is read before the first is written."""
    block = fused(f, inner)

    def run(transform: Transform, f: Any = block) -> Any:
        tensors = [torch.full((6, 6), float(n)).cumsum(0) for n in range(3)]
        made = transform(f)(*tensors)
        return tensors, made

    (tensors, made), (expected, by_eager) = run(untransformed), run(untransformed, f)
    assert_bitwise_equal(tensors, expected)
    torch.testing.assert_close(made, by_eager)
    assert_same_as_eager(run, EVERY)


@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
def test_a_write_that_draws_or_sums_up_in_any_order(inner: str) -> None:
    """What is written is made again, where it was made in the function: of the same numbers."""

    def update(w: Tensor, rows: Tensor) -> None:
        with torch.no_grad():
            w.copy_(torch.bernoulli(w.sigmoid()))
            w.add_(w.index_add(0, rows, w))

    options = {"inner": inner, "fallback_random": True}
    updated = torch.compile(update, backend="rematfn", options=options)

    def run(transform: Transform) -> Any:
        @transform
        def f(x: Tensor) -> Any:
            w = x.sin()
            updated(w, torch.zeros(len(x), dtype=torch.int64))
            y = w.exp()
            return (y * w).sum(), y.sum(0), w.mean()

        torch.manual_seed(0)
        return f(leaves()[0])

    assert_same_as_eager(run, EVERY)


def test_a_write_comes_when_it_is_made() -> None:
    """What is evicted until then, the block's arguments too, is replayed from the old contents."""

    def update(w: Tensor, g: Tensor) -> None:
        with torch.no_grad():
            w.lerp_(g, 0.1)

    updated = fused(update)

    def argument_is_away(x: Tensor, w: Tensor) -> Tensor:
        g = w.sin()
        y = (x @ x).exp()
        updated(w, g)
        return (y @ x).tanh()

    def read_later(x: Tensor, w: Tensor) -> Any:
        h = (x @ w).sin()
        q = h.exp()
        updated(w, x.cos())
        return (h * q).sum(), (h @ w).sum()

    for f in (argument_is_away, read_later):

        def run(transform: Transform, f: Program = f) -> Any:
            x, w = (t.detach() for t in leaves())
            versions = w._version
            g = transform(f)
            return g(x, w), g(x, w), w, w._version - versions

        assert run(untransformed)[-1] == 2
        assert_same_as_eager(run, EVERY)
        assert_same_as_eager(run)


def test_new_contents_are_made_one_after_the_other() -> None:
    def update(tensors: list[Tensor], others: list[Tensor]) -> None:
        for t, other in zip(tensors, others, strict=True):
            t.mul_(2).add_(other)
        tensors[0].add_(tensors[1])

    def run(transform: Transform) -> Any:
        tensors = [torch.full((1024,), float(n)) for n in range(8)]
        transform(functools.partial(fused(update), tensors, tensors[::-1]))()
        return tensors

    nbytes = 4 * 1024
    expected = run(untransformed)
    assert_bitwise_equal(run(EVERYTHING), expected)
    assert_bitwise_equal(run(lambda f: rematfn.remat(f, 5 * nbytes)), expected)


# --- guards ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
def test_sizes_that_differ_from_call_to_call(inner: str) -> None:
    """Among the results is one of as many bytes as the size that differs."""

    def f(x: Tensor) -> Any:
        return (x @ x.t()).sin().relu() + x.shape[0], x[:, 0] > 0

    block = fused(f, inner, dynamic=True)

    def run(transform: Transform) -> Any:
        seen = []
        for n in (3, 5, 7):
            x = torch.linspace(-1, 1, n * 4).view(n, 4).requires_grad_()
            out, signs = transform(lambda x: block(x.exp()))(x)
            out.sum().backward()
            seen += [out, signs, x.grad]
        return seen

    assert_same_as_eager(run, EVERY)


def test_a_result_that_would_not_fit_is_refused_before_it_is_made() -> None:
    """The sizes of results are known from the graph, of each size that it is called with."""
    block = fused(lambda x: (x + 1).repeat(100, 1), dynamic=True)
    for n in (4, 8):
        x = torch.zeros(n, 4)
        g = rematfn.remat(lambda x: block(x.sin()), budget=50 * x.nbytes)
        with pytest.raises(rematfn.BudgetError, match=r"rematfn::compiled"):
            g(x)


@same_as_eager(mode=EVERY)
def test_attributes_of_a_module(transform: Transform) -> Any:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.factor, self.linear, self.last = 2, nn.Linear(6, 6), torch.zeros(())
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            self.last = x * 2
            return self.linear(x) * self.factor + self.calls

    torch.manual_seed(0)
    net, (x, _), seen = Counts(), leaves(), []
    block = fused(net)
    for net.factor in (2, 3):
        out = transform(lambda x: block(x.sin()))(x)
        out.sum().backward()
        seen += [out, net.last.detach().clone()]
    return seen, x.grad, net.calls


@same_as_eager(mode=EVERY)
def test_without_gradients(transform: Transform) -> Any:
    block = fused(lambda x, w: (x @ w).sin().t())
    seen = []
    for guard in (torch.no_grad, torch.inference_mode):
        with guard():
            seen.append(transform(lambda x, w: block(x.sin(), w) * 2)(*leaves()).clone())
    return seen


# --- what stands around ---------------------------------------------------------------------------


@pytest.mark.parametrize("inside", [False, True], ids=["around", "inside"])
@pytest.mark.parametrize("transform_of", [torch.func.grad, torch.func.vmap])
@same_as_eager(mode=EVERY)
def test_transforms_of_functions(transform: Transform, transform_of: Any, inside: bool) -> Any:
    x, w = (t.detach() for t in leaves())

    def body(x: Tensor) -> Tensor:
        return (x * w.sum(0)).sin().sum()

    block = fused(transform_of(body) if inside else body)
    f = transform(lambda x: block(x.sin()).sum())
    return (f if inside else transform_of(f))(x)


@same_as_eager(mode=EVERY)
def test_a_backward_that_runs_twice(transform: Transform) -> Any:
    block = fused(lambda x, w: (x @ w).sin())
    x, w = leaves()
    loss = transform(lambda x: block(x.sin(), w))(x).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    return x.grad, w.grad


def test_what_was_compiled_outlives_its_function() -> None:
    """A replay may come when nobody has the function any more."""

    def f(x: Tensor) -> Tensor:
        y = torch.compile(nn.Tanh(), backend="rematfn", options=EAGERLY)(x.sin())
        torch._dynamo.reset()
        return y.exp() * y

    x = leaves()[0].detach()
    g = rematfn.remat(f, policy=EvictEverything())
    assert_bitwise_equal(g(x), x.sin().tanh().exp() * x.sin().tanh())
    assert rematfn.stats(g).replays > 0


@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
def test_a_replay_between_the_graphs_of_a_function(inner: str) -> None:
    """Dynamo watches the frames there, and is not to compile those of a piece."""
    x, w = leaves()

    def f(x: Tensor) -> Any:
        y = (x @ w).tanh()
        z = (y @ w).sin().exp()
        if z.sum() > 0:
            z = z * 2
        return z.exp() + len(y.tolist()), y

    block = fused(f, inner)

    def run(transform: Transform) -> Any:
        out, y = transform(lambda x: block(x.cos()))(x)
        return out, y, torch.autograd.grad(out.sum(), x)

    assert_same_as_eager(run, EVERY)


def test_pieces_go_after_their_function() -> None:
    def count_after_a_call() -> int:
        g = rematfn.remat(fused(lambda x: (x @ x).sin().exp()), policy=EvictEverything())
        g(leaves()[0]).sum().backward()
        del g
        torch._dynamo.reset()
        gc.collect()
        return sum(isinstance(o, torch.fx.GraphModule) for o in gc.get_objects())

    counts = [count_after_a_call() for _ in range(4)]
    assert counts[1] == counts[3]


# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize("transform", [untransformed, rematfn.remat, EVERYTHING])
@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
@pytest.mark.parametrize("f", [torch.exp, lambda x: x * x.sin()], ids=["result", "argument"])
def test_double_backward_is_refused(transform: Transform, inner: str, f: Any) -> None:
    """Whether its backward reads a result, or an argument, from which a graph leads to x."""
    block = fused(f, inner)
    x, _ = leaves()
    loss = transform(lambda x: block(x.sin()).square())(x).sum()
    with pytest.raises(RuntimeError, match=r"no double backward.* Leave f uncompiled"):
        torch.autograd.grad(loss, x, create_graph=True)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"mode": "reduce-overhead"}, "mode='reduce-overhead'.*CUDA graphs overwrite"),
        ({"mode": "max-autotune"}, "mode='max-autotune'.*CUDA graphs overwrite"),
        ({"options": {"triton.cudagraphs": True}}, "options.*CUDA graphs overwrite"),
        ({"options": {"inner": "eager"}}, '"inductor" or "aot_eager"'),
        ({"options": {"no such option": 1}}, "no such option"),
    ],
    ids=str,
)
def test_what_cannot_be_asked_for(given: dict[str, Any], message: str) -> None:
    with pytest.raises(Exception, match=message):
        torch.compile(torch.sin, backend="rematfn", **given)(torch.ones(3))


@pytest.mark.parametrize("is_known", [False, True], ids=["new", "compiled before"])
def test_a_compiled_function_of_another_backend_is_named(is_known: bool) -> None:
    f = torch.compile(lambda x: x.sin(), backend="aot_eager")
    if is_known:
        f(torch.ones(3))
    advice = r'backend="aot_eager"\) inside of remat.*backend="rematfn"'
    with pytest.raises(RuntimeError, match=advice):
        rematfn.remat(lambda x: f(x.exp()))(torch.ones(3))
    assert _C.stack_depth() == 0


@same_as_eager(mode=EVERY)
def test_a_backward_under_autocast_of_a_block_that_was_not(transform: Transform) -> Any:
    f = fused(lambda x, w: ((x @ w).exp().softmax(-1) @ w).tanh() * 2, "inductor")
    x, w = leaves()
    out = transform(f)(x, w).sum()
    with torch.autocast("cpu", torch.bfloat16):
        gradients = torch.autograd.grad(out, (x, w))
    expected = torch.autograd.grad(f(x, w).sum(), (x, w))
    assert_bitwise_equal(gradients, expected)
    return gradients


@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
@pytest.mark.parametrize(
    "draw",
    [
        lambda x: torch.gather(x, 1, torch.rand(6, 6).argsort(1)),
        lambda x: x + torch.empty_like(x).exponential_(),
        F.gumbel_softmax,
    ],
    ids=["sorted", "filled", "gumbel"],
)
def test_numbers_that_are_drawn_in_a_block(draw: Any, inner: str) -> None:
    """Several results are read off them; or they are drawn into memory that nothing has filled."""
    f = fused(lambda x, w: (draw(x.sin()) @ w).exp(), inner)

    def run(transform: Transform) -> Any:
        torch.manual_seed(0)
        x, w = leaves()
        return torch.autograd.grad(transform(f)(x, w).sum(), (x, w))

    expected = run(untransformed)
    verified = functools.partial(rematfn.remat, policy=EvictEverything(), verify=True)
    for transform in (rematfn.remat, verified):
        assert_bitwise_equal(run(transform), expected)


def test_a_batch_of_gradients_is_refused() -> None:
    f = fused(lambda x, w: (x @ w).sin() @ w)
    x, w = leaves()
    out = rematfn.remat(f)(x, w)
    with pytest.raises(NotImplementedError, match=r"is_grads_batched=True\. Compile"):
        torch.autograd.grad(out, x, torch.eye(36).view(36, 6, 6), is_grads_batched=True)


def test_branches() -> None:
    def f(x: Tensor, otherwise: Any = torch.cos) -> Tensor:
        made: Tensor = torch.cond(x.sum() > 0, lambda x: x.sin() @ x, otherwise, (x,))
        return made.exp() * 2

    x = torch.rand(6, 6)
    expected = fused(f)(x)
    assert_bitwise_equal(EVERYTHING(fused(f))(x), expected)
    with pytest.raises(Exception, match=r"native_dropout.* is in a branch or a loop"):
        fused(lambda x: f(x, lambda x: F.dropout(x, 0.5)))(x)


@pytest.mark.parametrize("solve", [torch.linalg.solve, torch.linalg.inv, torch.linalg.cholesky])
@same_as_eager(mode=EVERY)
def test_a_solver_checks_its_matrix(transform: Transform, solve: Any) -> Any:
    x, y = leaves()
    arguments = (y,) if solve is torch.linalg.solve else ()

    def f(x: Tensor) -> Tensor:
        h = (x.sin() @ x.sin().mT) / 6 + torch.eye(len(x))
        return fused(lambda h, *rest: solve(h.exp() + h, *rest).cos())(h, *arguments)

    out = transform(f)(x)
    out.sum().backward()
    return out, x.grad, is_refused(transform(fused(singular)), x.detach())


def singular(x: Tensor) -> Tensor:
    return torch.linalg.inv(x * 0)


def is_refused(f: Any, x: Tensor) -> bool:
    try:
        f(x)
    except torch.linalg.LinAlgError:
        return True
    return False


def test_a_singular_matrix_is_refused_where_torch_compiles_the_check() -> None:
    """Torch 2.11 leaves it out of the graph."""
    theirs = torch.compile(singular, backend="aot_eager")
    x = torch.ones(3, 3)
    assert is_refused(rematfn.remat(fused(singular)), x) == is_refused(theirs, x)


@torch.library.custom_op("rematfn_tests::rows_summed", mutates_args=())
def rows_summed(x: Tensor) -> Tensor:
    return torch.vmap(lambda row: torch.where(row > 0, row, 0.0).sum() * row)(x)


rows_summed.register_fake(torch.empty_like)


def test_a_piece_that_calls_a_kernel_which_transforms() -> None:
    """In the first call of a graph, too, which torch runs inside of a mode."""
    x = torch.linspace(-1, 1, 36).view(6, 6)
    f = lambda x: rows_summed(x.sin()).cos() * 2  # noqa: E731
    for transform in (rematfn.remat, EVERYTHING):
        torch._dynamo.reset()
        g = transform(fused(f))
        for _ in range(2):
            assert_bitwise_equal(g(x), f(x))


def test_a_graph_with_effects_is_refused() -> None:
    with torch.library._scoped_library("tested", "FRAGMENT") as library:
        library.define("log(Tensor x) -> Tensor")
        library.impl("log", torch.clone, "CompositeExplicitAutograd")
        from torch._higher_order_ops.effects import _EffectType, _register_effectful_op

        effect = _register_effectful_op(torch.ops.tested.log.default, _EffectType.ORDERED)
        try:
            with pytest.raises(Exception, match="has effects beside its results"):
                fused(lambda x: torch.ops.tested.log(x) * 2)(torch.ones(3))
        finally:
            effect.destroy()
