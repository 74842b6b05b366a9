# SPDX-License-Identifier: Apache-2.0
"""Kernels whose turn comes before a level's: sparse ones, and some that decompose."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import Transform, assert_same_as_eager, same_as_eager
from torch import Tensor, nn
from torch.quasirandom import SobolEngine

import rematfn
from rematfn.testing import EvictEverything

# torch says so at its first sparse tensors.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta:UserWarning"),
    pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning"),
]


def matrix() -> Tensor:
    return torch.linspace(-1, 1, 16).view(4, 4)


def sparse_matrix() -> Tensor:
    return (matrix() * (matrix() > 0.2)).to_sparse()


# --- sparse tensors -------------------------------------------------------------------------------


def write_by_a_sparse_one(x: Tensor) -> Any:
    y = x.sin()
    old = y * 2
    y.add_(sparse_matrix())
    return y.cos(), old + 1, y.exp()


def compressed_of_evicted_values(x: Tensor) -> Tensor:
    values, at = x[0].sin(), torch.arange(5) * 1
    a = torch.sparse_csr_tensor(at, at[:4].clone(), values, (4, 4))
    return a @ x.cos() + values.exp()


def check_invariants(x: Tensor) -> Tensor:
    indices = torch.stack([torch.arange(4), torch.arange(4)]) * 1
    whole = torch.sparse_coo_tensor(indices, x[0].sin(), (4, 4), check_invariants=True)
    return whole.to_dense() + indices.sum()


# --- operators that decompose, and read on the way ------------------------------------------------


def split_at_made_indices(x: Tensor) -> Any:
    at = torch.tensor([1, 3])
    return [part.cos() for part in torch.tensor_split(x.sin(), at * 1)]


def ctc_with_made_lengths(x: Tensor) -> Tensor:
    log_probs = x.sin().view(4, 2, 2).log_softmax(-1)
    lengths = torch.full((2,), 4, dtype=torch.int32)
    targets = torch.ones(2, 1, dtype=torch.int64)
    return F.ctc_loss(log_probs, targets * 1, lengths * 1, lengths // 4, reduction="none")


def packed_sequence(kind: type[nn.RNNBase]) -> Callable[[Tensor], Tensor]:
    def packed(x: Tensor) -> Tensor:
        torch.manual_seed(3)
        layer = kind(2, 3, num_layers=2, bidirectional=True)
        lengths = torch.tensor([4, 2])
        batch = nn.utils.rnn.pack_padded_sequence(x.sin().view(4, 2, 2), lengths * 1)
        out, _ = nn.utils.rnn.pad_packed_sequence(layer(batch)[0])
        return out.cos()

    packed.__name__ = f"packed_{kind.__name__}"
    return packed


READERS = [
    split_at_made_indices,
    ctc_with_made_lengths,
    packed_sequence(nn.LSTM),
    packed_sequence(nn.GRU),
    packed_sequence(nn.RNN),
]


@pytest.mark.parametrize("f", READERS, ids=lambda f: f.__name__)
@same_as_eager
def test_integers_that_an_operator_reads_are_resident(
    transform: Transform, f: Callable[..., Any]
) -> Any:
    x = matrix().requires_grad_()
    out = transform(f)(x)
    loss = sum(part.sum() for part in out) if isinstance(out, list) else out.sum()
    return out, torch.autograd.grad(loss, x)


# --- kernels that decompose under some key only ---------------------------------------------------


def pool(x: Tensor) -> Tensor:
    return F.max_pool1d(x.sin(), 2).cos()


@pytest.mark.parametrize("inference", [True, False], ids=["inference", "no-grad"])
@same_as_eager
def test_max_pool1d_without_gradient_is_replayed(transform: Transform, inference: bool) -> Any:
    with torch.inference_mode(inference), torch.no_grad():
        return [transform(pool)(x) for x in (matrix(), matrix().t())]


# --- operators that are composite in name only ----------------------------------------------------


def points(engine: SobolEngine, w: Tensor) -> Tensor:
    first = engine.draw(6) @ w
    h = w.sin() * 2
    engine.fast_forward(3)
    second = engine.draw(2, dtype=torch.float64).to(w) @ w
    engine.reset()
    return (first.square().sum() + 10 * second.square().sum() + engine.draw(1).sum()) * h


def points_of_an_engine_made_inside(x: Tensor) -> Tensor:
    return points(SobolEngine(4, scramble=True, seed=7), x)


def prune(x: Tensor) -> Any:
    kept, places = torch._rowwise_prune(x.sin(), torch.arange(4) * 1 != 2, torch.int32)
    return kept * 2, places * 2


def choose(x: Tensor) -> Any:
    low, high = torch.choose_qparams_optimized(x.sin(), x.numel(), 200, 0.16, 8)
    return low * 2, high * 2


def saturate(x: Tensor) -> Any:
    w = x * 1e6
    old = w * 2
    saturated = torch._saturate_weight_to_fp16(w)
    return saturated.cos(), w.exp(), old + 1


def linear_in_int8(x: Tensor) -> Any:
    weight, offsets, scale, zero = torch.fbgemm_linear_quantize_weight(x.sin())
    packed = torch.fbgemm_pack_quantized_matrix(weight)
    rest = packed, offsets, scale, zero, torch.ones(4) * 2
    out = torch.fbgemm_linear_int8_weight_fp32_activation(x.t().cos(), weight, *rest)
    return out * 2, weight + 1, offsets * 2, torch.fbgemm_linear_int8_weight(out, weight, *rest)


def linear_in_fp16(x: Tensor) -> Any:
    packed = torch.fbgemm_pack_gemm_matrix_fp16((x * 1.5).t())
    out = torch.fbgemm_linear_fp16_weight(x.t().cos(), packed, x[0].detach() * 2)
    return torch.fbgemm_linear_fp16_weight_fp32_activation(out.sin(), packed, x[1] * 3) * 2


UNRECORDED = [
    write_by_a_sparse_one,
    compressed_of_evicted_values,
    check_invariants,
    points_of_an_engine_made_inside,
    prune,
    choose,
    saturate,
    linear_in_int8,
    linear_in_fp16,
]


@pytest.mark.filterwarnings("ignore:(fbgemm|FOUND weight)")
@pytest.mark.parametrize("f", UNRECORDED, ids=lambda f: f.__name__)
def test_a_kernel_that_works_by_address_finds_bytes_and_is_replayed(f: Callable[..., Any]) -> None:
    with torch.no_grad():
        assert_same_as_eager(lambda transform: transform(f)(matrix()))


@same_as_eager
def test_points_of_an_engine_that_outlives_the_level(transform: Transform) -> Any:
    engine, w = SobolEngine(4, scramble=True, seed=7), matrix().requires_grad_()
    g = transform(lambda w: points(engine, w))
    found = [torch.autograd.grad(g(w).sum(), w) for _ in range(2)]
    return found, engine.quasi, engine.sobolstate, engine.draw(2)


# --- a composite kernel that no list has ----------------------------------------------------------


def decomposed(x: Tensor) -> Tensor:
    """Draw past our kernel of the operator: by the one that torch decomposes it by."""
    engine = SobolEngine(4)
    draw = torch.ops.aten._sobol_engine_draw.default
    return draw.decompose(engine.quasi * 1, 3, engine.sobolstate, 4, 0, torch.float32)[1] * 2


def test_what_no_list_has_is_told_where_all_is_evicted() -> None:
    with pytest.raises(RuntimeError, match="bytes were asked for outside of the dispatcher"):
        rematfn.remat(decomposed, policy=EvictEverything())(matrix())


def test_what_is_written_without_a_word_is_seen_where_all_is_evicted() -> None:
    def write(x: Tensor) -> None:
        """Write as an operator whose schema is wrong does."""
        x.apply_(lambda v: v + 1)

    with torch.library._scoped_library("silent", "DEF") as library:
        library.define("write(Tensor x) -> ()")
        library.impl("write", write, "CPU")

        def f(x: Tensor) -> Tensor:
            y = x.sin()
            torch.ops.silent.write(y)
            return y * 2

        assert not torch.equal(rematfn.remat(f, policy=EvictEverything())(matrix()), f(matrix()))
