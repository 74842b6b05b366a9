# SPDX-License-Identifier: Apache-2.0
"""Kinds of tensors without plain sizes, or without bytes of their own: each goes every way.

A program makes one out of level tensors and works with it; on the way it makes others that a level
evicts. What it gives back is eager's, bit for bit, in whatever way it is run.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import EVERYTHING, Transform, assert_bitwise_equal, assert_same_as_eager
from torch import Tensor

import rematfn

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*nested tensors is in prototype:UserWarning"),
    pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta:UserWarning"),
    pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning"),
    pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning"),
]

Make = Callable[[Tensor], Tensor]
Use = Callable[[Tensor, Tensor], Any]


def start() -> Tensor:
    return torch.linspace(-1, 1, 64).view(8, 8).clone()


def dense(t: Tensor) -> Any:
    """Return what `t` holds as plain tensors of their own."""
    if t.is_nested:
        return [u.clone() for u in t.unbind()]
    if t.is_quantized:
        return t.dequantize()
    return t.to_dense().clone() if t.layout != torch.strided else t.clone()


# --- how they are made ----------------------------------------------------------------------------


def rows(x: Tensor) -> list[Tensor]:
    return [x[:3].sin(), x[3:].cos()]


def nested(x: Tensor) -> Tensor:
    return torch.nested.as_nested_tensor(rows(x))


def nested_of_a_mask(x: Tensor) -> Tensor:
    padded = x.sin().view(2, 4, 8)
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]]) * 1 > 0
    return torch._nested_tensor_from_mask(padded, mask)


def nested_view(x: Tensor) -> Tensor:
    """Return one that stands on a level tensor, and whose sizes are level tensors."""
    sizes = torch.tensor([[3, 8], [5, 8]]) * 1
    strides = torch.tensor([[8, 1], [8, 1]]) * 1
    return torch._nested_view_from_buffer(
        x.sin().view(-1), sizes, strides, torch.tensor([0, 24]) * 1
    )


def jagged(x: Tensor) -> Tensor:
    return torch.nested.nested_tensor_from_jagged(x.sin(), torch.tensor([0, 3, 8]))


def coo(x: Tensor) -> Tensor:
    at = torch.arange(8) * 1
    return torch.sparse_coo_tensor(torch.stack([at, at]), x[0].sin(), (8, 8))


def coo_of_dense(x: Tensor) -> Tensor:
    return (x.sin() * (x > 0)).to_sparse()


def csr(x: Tensor) -> Tensor:
    return (x.sin() * (x > 0)).to_sparse_csr()


def bsr(x: Tensor) -> Tensor:
    return x.sin().to_sparse_bsr((2, 2))


def mkldnn(x: Tensor) -> Tensor:
    return x.sin().to_mkldnn()


def per_tensor(x: Tensor) -> Tensor:
    return torch.quantize_per_tensor(x.sin(), 0.1, 3, torch.qint8)


def per_tensor_of_made_scale(x: Tensor) -> Tensor:
    return torch.quantize_per_tensor(x.sin(), x.amax() / 100, torch.tensor(3) * 1, torch.qint8)


def per_channel(x: Tensor) -> Tensor:
    scales = (x.abs().amax(1) / 100 + 0.01).double()
    return torch.quantize_per_channel(x.sin(), scales, torch.arange(8) * 1, 0, torch.qint8)


def per_channel_of_floats(x: Tensor) -> Tensor:
    scales = x.abs().amax(1) / 100 + 0.01
    return torch.quantize_per_channel(x.sin(), scales, x[0] * 1, 0, torch.quint8)


def zeros(x: Tensor) -> Tensor:
    return torch._efficientzerotensor((8, 8))


# --- what is done with them -----------------------------------------------------------------------


def written(t: Tensor, x: Tensor) -> Any:
    """What was read before the write is replayed from what it was then."""
    before = dense(t)
    t.mul_(2)
    return before, dense(t)


def written_through_views(t: Tensor, x: Tensor) -> Any:
    seen = [u.sin() for u in t.unbind()]
    t.mul_(2)
    seen += [u.sin() for u in t.unbind()]
    t.mul_(3)
    for u in t.unbind():
        u.add_(1)
    return [s + 1 for s in seen], dense(t)


def heads(t: Tensor) -> Tensor:
    split = t.reshape(2, -1, 2, 4).transpose(1, 2)
    return split.contiguous() if t.layout == torch.strided else split


COMMON: dict[str, Use] = {
    "made": lambda t, x: dense(t),
    "clone": lambda t, x: dense(t.clone()),
    "detach": lambda t, x: dense(t.detach()),
    "numel": lambda t, x: (t.dim(), t.numel(), t.size(0)),
    "repr": lambda t, x: repr(t),
}
ARITHMETIC: dict[str, Use] = {
    "mul": lambda t, x: dense(t * 2),
    "add": lambda t, x: dense(t + t),
    "neg": lambda t, x: dense(-t),
    "to": lambda t, x: dense(t.to(torch.float64)),
    "sum": lambda t, x: t.sum(),
    "mul_": lambda t, x: dense(t.clone().mul_(2)),
    "written": written,
    "matmul": lambda t, x: dense(torch.matmul(t, x.exp())),
}
NESTED: dict[str, Use] = {
    "relu, gelu": lambda t, x: dense(F.gelu(t.relu())),
    "add_": lambda t, x: dense(t.clone().add_(t)),
    "zero_": lambda t, x: dense(t.clone().zero_()),
    "copy_": lambda t, x: dense(t.clone().copy_(t * 3)),
    "linear": lambda t, x: dense(F.linear(t, x.exp(), x[0].cos())),
    "softmax": lambda t, x: dense(torch.softmax(t, -1)),
    "layer_norm": lambda t, x: dense(F.layer_norm(t, (8,), x[0].exp(), x[1] * 1)),
    "transpose": lambda t, x: dense(t.transpose(-1, -2).transpose(-1, -2)),
    "select": lambda t, x: dense(t[0]),
    "chunk": lambda t, x: [dense(c) for c in t.chunk(2, -1)],
    "sdpa": lambda t, x: dense(F.scaled_dot_product_attention(heads(t), heads(t), heads(t))),
    "is_same_size": lambda t, x: torch.ops.aten.is_same_size(t, t.clone()),
    "padded": lambda t, x: torch.nested.to_padded_tensor(t, 0.5),
}
STRIDED: dict[str, Use] = {
    "matmul": lambda t, x: dense(torch.matmul(t, t.transpose(-1, -2))),
    "sizes": lambda t, x: (t._nested_tensor_size() * 1, t._nested_tensor_strides() * 1),
    "offsets": lambda t, x: t._nested_tensor_storage_offsets() * 1,
    "from_padded": lambda t, x: dense(
        torch._nested_from_padded(t.to_padded_tensor(0.0), t._nested_tensor_size())
    ),
    "cat": lambda t, x: dense(torch.cat([t, t])),
    "written through views": written_through_views,
}
CHANNELS: dict[str, Use] = {
    "scales": lambda t, x: (t.q_per_channel_scales() * 1, t.q_per_channel_zero_points() * 1),
}
NESTED_ALL = COMMON | ARITHMETIC | NESTED | STRIDED
NESTED_ALL.pop("sum")  # of no strided one: see the gradients
QUANTISED: dict[str, Use] = {
    "int_repr": lambda t, x: t.int_repr().double(),
    "select": lambda t, x: dense(t[0]),
    "chunk": lambda t, x: [dense(c) for c in t.chunk(2, -1)],
    "clone, written": lambda t, x: dense(t.clone().copy_(x.exp())),
}

KINDS: dict[Make, dict[str, Use]] = {
    nested: NESTED_ALL,
    nested_of_a_mask: NESTED_ALL,
    nested_view: NESTED_ALL,
    jagged: {k: v for k, v in (COMMON | ARITHMETIC | NESTED).items() if k not in ("repr",)},
    coo: COMMON | ARITHMETIC,
    coo_of_dense: COMMON | ARITHMETIC,
    csr: COMMON | ARITHMETIC,
    bsr: COMMON | {k: ARITHMETIC[k] for k in ("mul", "neg", "to", "written")},
    mkldnn: COMMON | {"relu": lambda t, x: dense(t.relu()), "mul": ARITHMETIC["mul"]},
    per_tensor: COMMON | QUANTISED,
    per_tensor_of_made_scale: COMMON | QUANTISED,
    per_channel: COMMON | CHANNELS | QUANTISED,
    per_channel_of_floats: CHANNELS | {k: COMMON[k] for k in ("made", "detach", "numel", "repr")},
    zeros: COMMON | {k: ARITHMETIC[k] for k in ("mul", "add", "to", "sum", "matmul")},
}


def program(make: Make, use: Use) -> Callable[[Tensor], Any]:
    def f(x: Tensor) -> Any:
        t = make(x)
        between = x
        for _ in range(3):
            between = between.sin() * 1.01
        return use(t, x), between.sum(), use(make(between), between)

    return f


# --- the ways -------------------------------------------------------------------------------------


def looked_at(look: Callable[[Transform, Any], object]) -> Transform:
    def transform(f: Transform) -> Transform:
        def called(*args: Any) -> Any:
            look(f, *args)
            return f(*args)

        return called

    return transform


def explained(f: Transform, x: Tensor) -> None:
    g = rematfn.remat(f, "1GiB")
    with rematfn.where():
        g(x)
    rematfn.explain(g)


WAYS: dict[str, Transform] = {
    "ample": lambda f: rematfn.remat(f, "1GiB"),
    "offload": lambda f: looked_at(lambda g, x: g(x))(rematfn.offload(f)),  # called twice
    "all offloaded": lambda f: rematfn.offload(f, policy=rematfn.testing.EvictEverything()),
    "record": looked_at(rematfn.record),
    "explain": looked_at(explained),
}


def in_every_operator(make: Make) -> Callable[[Tensor], Any]:
    return lambda x: {name: program(make, use)(x) for name, use in KINDS[make].items()}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
@pytest.mark.parametrize("make", KINDS, ids=lambda make: make.__name__)
def test_a_kind_of_tensor_in_every_operator(make: Make, way: Transform) -> None:
    f = in_every_operator(make)
    assert_bitwise_equal(way(f)(start()), f(start()))


@pytest.mark.parametrize("make", KINDS, ids=lambda make: make.__name__)
def test_a_kind_of_tensor_within_the_least_budget(make: Make) -> None:
    f = in_every_operator(make)
    assert_same_as_eager(lambda transform: transform(f)(start()))


@pytest.mark.parametrize("make", KINDS, ids=lambda make: make.__name__)
def test_a_kind_of_tensor_that_leaves(make: Make) -> None:
    """Its parts leave with it, and it may be written from then on."""
    x = start()
    g = EVERYTHING(lambda x: (make(x), x.exp()))
    t, _ = g(x)
    assert_bitwise_equal(dense(t), dense(make(x)))
    if "written" in KINDS[make]:
        assert_bitwise_equal(written(t, x), written(make(x), x))


# --- gradients ------------------------------------------------------------------------------------

DIFFERENTIABLE: dict[str, Use] = {
    "padded": NESTED["padded"],
    "unbind": lambda t, x: torch.cat([u.sin() for u in t.unbind()]),
    "linear": lambda t, x: torch.nested.to_padded_tensor(F.linear(t, x.exp(), x[0].cos()), 0.0),
    "softmax": lambda t, x: torch.nested.to_padded_tensor(torch.softmax(t, -1), 0.0),
    "layer_norm": lambda t, x: torch.nested.to_padded_tensor(
        F.layer_norm(t, (8,), x[0].exp(), x[1] * 1), 0.0
    ),
    "products": lambda t, x: torch.nested.to_padded_tensor((t * t).relu() + t, 0.0),
    "select": lambda t, x: t.unbind()[0] * 2,
}


DIFFERENTIABLE_STRIDED: dict[str, Use] = DIFFERENTIABLE | {
    "sum": lambda t, x: torch.nested.to_padded_tensor(torch.sum(t, -1, keepdim=True), 0.0),
}


@pytest.mark.parametrize("make", [nested, jagged], ids=lambda make: make.__name__)
def test_gradients_through_nested_tensors(make: Make) -> None:
    uses = DIFFERENTIABLE if make is jagged else DIFFERENTIABLE_STRIDED

    def run(transform: Transform) -> Any:
        x = start().requires_grad_()
        total = transform(lambda x: sum(use(make(x), x).sin().sum() for use in uses.values()))(x)
        return total.detach(), torch.autograd.grad(total, x)

    assert_same_as_eager(run)
    assert_bitwise_equal(run(WAYS["all offloaded"]), run(lambda f: f))


# --- what holds its arguments ---------------------------------------------------------------------


@pytest.fixture
def packed() -> Iterator[Callable[[Tensor, Tensor], Any]]:
    if "fbgemm" not in torch.backends.quantized.supported_engines:
        pytest.skip("no kernels for quantised products here")
    before = torch.backends.quantized.engine
    torch.backends.quantized.engine = "fbgemm"
    yield torch.ops.quantized.linear_prepack
    torch.backends.quantized.engine = before


def test_a_script_object_that_keeps_a_tensor(packed: Callable[[Tensor, Tensor], Any]) -> None:
    """The bias is read by whoever is given the object."""

    def f(x: Tensor) -> Any:
        weights = packed(per_channel(x), x[0].cos())
        q = torch.quantize_per_tensor(x.exp().tanh(), 0.1, 3, torch.quint8)
        return torch.ops.quantized.linear(q, weights, 0.1, 0).dequantize()

    assert_same_as_eager(lambda transform: transform(f)(start()))
    assert_bitwise_equal(WAYS["all offloaded"](f)(start()), f(start()))
