# SPDX-License-Identifier: Apache-2.0
"""What a refused operator would make is known to the byte; of what runs nobody asks."""

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import kept, loss_of, no_shape_function_in_python, untransformed
from processes import in_a_process
from programs import ZOO
from torch import Tensor

import rematfn

aten = torch.ops.aten
T, F = True, False


def numbers(*sizes: int) -> Tensor:
    return torch.linspace(0.1, 0.9, int(torch.Size(sizes).numel())).view(sizes)


X, M, Q = numbers(3, 8, 6, 6), numbers(12, 16), numbers(2, 3, 7, 4)
I, W, B = torch.tensor([[0, 1, 2, 1]]), numbers(5, 8, 3, 3), numbers(5)  # noqa: E741
C, LABELS, PIXELS = numbers(8), torch.tensor([0, 1, 2, 3]), torch.zeros(2, 3, 3, dtype=torch.long)
ONE = torch.tensor(1.0)
NORMED = aten.native_layer_norm(M, [16], M[0], M[0], 1e-5)
BATCHED = aten.native_batch_norm(X, C, C, None, None, T, 0.1, 1e-5)
POOLED = aten.max_pool2d_with_indices(X, [2, 2])
ATTENDED = aten._scaled_dot_product_flash_attention_for_cpu(Q, Q, Q)

UNARY = (
    *("neg", "exp", "exp2", "expm1", "log", "log1p", "log2", "sin", "cos", "tan", "tanh", "sqrt"),
    *("sigmoid", "rsqrt", "reciprocal", "erf", "floor", "ceil", "sign", "silu", "gelu", "elu"),
    *("leaky_relu", "softplus", "trunc", "atan", "sinh", "cosh", "relu", "amax", "amin", "argmax"),
    *("argmin", "all", "any", "zeros_like", "ones_like", "empty_like", "bernoulli", "tril", "triu"),
    *("hardtanh", "hardswish", "rand_like", "randn_like", "std", "var", "sort"),
)
BINARY = ("add", "sub", "mul", "div", "pow", "eq", "ne", "lt", "le", "gt", "ge")

CALLS: list[tuple[Any, ...]] = [
    *((getattr(aten, name), M) for name in UNARY),
    *((getattr(aten, name), M, M[:1]) for name in (*BINARY, "maximum", "minimum", "atan2")),
    *((getattr(aten, name), I, M[:4, :1]) for name in (*BINARY, "maximum", "minimum", "atan2")),
    *((getattr(aten, name).Scalar, M, 2.0) for name in BINARY if name != "pow"),
    *((aten.pow, M, 2.0), (aten.bitwise_and, I, I), (aten.bitwise_or, I, I)),
    *((aten.clamp, M, 0.0, 1.0), (aten.clamp_min, M, 0.0), (aten.clamp_max, M, 0.0)),
    *((aten.addcmul, M, M, M), (aten.addcdiv, M, M, M), (aten.lerp, M, M, 0.3)),
    *((aten.sum, M, [0]), (aten.sum, M, [0], True), (aten.sum, I, [0]), (aten.mean, M, [1])),
    *((aten.select_backward, M[0], [12, 16], 0, 3), (aten.select_backward, ONE, [7], 0, -1)),
    (aten.slice_backward, M[:4], [12, 16], 0, 0, 4, 1),
    *((aten.roll, M, [1], [0]), (aten.flip, M, [0]), (aten.repeat, M, [2, 1, 3])),
    *((aten.hardtanh_backward, M, M, -1, 1), (aten.hardswish_backward, M, M)),
    *((aten.glu_backward, M[:, :8], M, 1), (aten.mish_backward, M, M)),
    *((aten._prelu_kernel, M, M), (aten._prelu_kernel_backward, M, M, M)),
    *((aten.log_sigmoid_backward, M, M, M), (aten.index_put, M, [I[0]], M[:4])),
    *((aten.var_mean, M, [1]), (aten.std_mean, M, None), (aten.var, M, [0, 1])),
    *((aten.logsumexp, M, [0, 1]), (aten.logsumexp, X, [1, -1], T), (aten.sort, M, 0, T)),
    *((aten.arange, 7), (aten.arange, 3, 9), (aten.arange, 9, 2, -2), (aten.arange, 0, 7, 3)),
    *((lambda: torch.arange(5, dtype=torch.half),), (aten.full, [3, 2], 1.5), (aten.full, [3], 2)),
    *((aten.full, [5], T), (aten.full_like, M, 2), (aten.rand, [3, 4]), (aten.randn, [5])),
    *((aten.constant_pad_nd, M, [1, 2]), (aten.constant_pad_nd, X, [1, -2, 0, 3], 2.0)),
    *((aten.native_dropout, M, 0.5, T), (aten.native_dropout_backward, M, M > 0.5, 2.0)),
    *((aten._foreach_add, [M, M[:2]], 1.0), (aten._foreach_div.List, [M, B], [M, B])),
    *((aten._foreach_norm, [M, B]), (aten._foreach_exp, [B]), (aten._foreach_lerp, [M], [M], 0.5)),
    *(
        (aten._adaptive_avg_pool2d, X, [4, 3]),
        (aten._adaptive_avg_pool2d_backward, X[:, :, :2, :3], X),
    ),
    *((aten.grid_sampler_2d, X, X[:, 0, :5, :4].unflatten(2, (2, 2)), 0, 0, F),),
    *((aten.binary_cross_entropy, M, M, None, how) for how in (0, 1)),
    *((aten.huber_loss, M, M, how) for how in (0, 1)),
    *(
        (aten.binary_cross_entropy_backward, ONE, M, M),
        (aten.huber_loss_backward, ONE, M, M, 1, 1.0),
    ),
    (aten.smooth_l1_loss_backward, ONE, M, M, 1, 1.0),
    *((aten.sum, M), (aten.mean, M), (lambda m: m.sum(dtype=torch.float64), M)),
    *((aten.prod, M, 1), (aten.max, M, 1), (aten.min, M, 0), (aten.all, M, 1), (aten.any, M, 1)),
    *((aten.cumsum, M, 1), (aten.linalg_vector_norm, M), (aten.topk, M, 3)),
    *((aten.mm, M, M.mT), (aten.bmm, Q[0], Q[0].mT), (aten.addmm, M[:, 0], M, M.mT)),
    (aten.baddbmm, numbers(3, 7, 7), Q[0], Q[0].mT),
    *((aten._softmax, M, 1, F), (aten._log_softmax, M, 1, F)),
    *((aten._safe_softmax, M, 1), (aten.logical_not, M), (aten.abs, M)),
    *((aten.masked_fill, M[:1], M > 0.5, 2.0), (aten.masked_fill.Tensor, M, M[0] > 0.5, ONE)),
    *((aten.index_select, M, 1, I[0]), (aten.index_select, M, 0, I[0])),
    (aten._softmax_backward_data, M, M, 1, torch.float),
    (aten._log_softmax_backward_data, M, M, 1, torch.float),
    *((aten.gelu_backward, M, M), (aten.silu_backward, M, M), (aten.sigmoid_backward, M, M)),
    *((aten.tanh_backward, M, M), (aten.threshold_backward, M, M, 0)),
    *((aten.elu_backward, M, 1.0, 1.0, 1.0, F, M), (aten.leaky_relu_backward, M, M, 0.1, F)),
    (aten.softplus_backward, M, M, 1.0, 20.0),
    (aten.avg_pool2d, X, [2, 2]),
    (aten.avg_pool2d_backward, X[:, :, :3, :3], X, [2, 2], [2, 2], [0, 0], F, T, None),
    (aten.max_pool2d_with_indices, X, [2, 2]),
    (
        *(aten.max_pool2d_with_indices_backward, POOLED[0], X),
        *([2, 2], [2, 2], [0, 0], [1, 1], F, POOLED[1]),
    ),
    *((aten.nll_loss_forward, M[:4], LABELS, None, reduced, -100) for reduced in (0, 1)),
    (aten.nll_loss_backward, ONE, M[:4], LABELS, None, 1, -100, ONE),
    *((aten.nll_loss2d_forward, Q[:, :, :3, :3], PIXELS, None, how, -100) for how in (0, 1)),
    (aten.nll_loss2d_backward, ONE, Q[:, :, :3, :3], PIXELS, None, 1, -100, ONE),
    *((aten.mse_loss, M, M), (aten.mse_loss, M, M, 0), (aten.mse_loss_backward, ONE, M, M, 1)),
    *((aten.cat, [M, M], 1), (aten.cat, [M, I.expand(12, 4)], 1), (aten.stack, [M, M], 1)),
    *((aten.gather, M, 0, I), (aten.scatter_add, M, 0, I, M)),
    *((torch.scatter, M, 0, I, 1.0), (torch.scatter, M, 0, I, M)),
    (lambda m: aten.zeros_like(m, dtype=torch.float64), M),
    *((aten.zeros, [5, 6]), (aten.ones, [5]), (aten.empty, [3, 3]), (aten.new_zeros, M, [3, 4])),
    (lambda m: aten.new_empty(m, [3, 4], dtype=torch.half), M),
    *((aten.where, M > 0, M, ONE.double()), (aten.where, M[:1] > 0, M[:, :1], I[0, :1])),
    (aten.convolution, X, W, B, [2, 1], [1, 0], [1, 2], F, [0, 0], 1),
    (aten.convolution, X, W, None, [1], [1], [1], F, [0], 1),
    (aten.convolution, X, W.transpose(0, 1), B, [2, 2], [1, 1], [1, 1], T, [1, 1], 1),
    (aten.convolution, X, numbers(8, 4, 3, 2), None, [2, 1], [1, 0], [1, 2], T, [1, 0], 2),
    (aten.convolution, X, numbers(8, 1, 3, 3), None, [1, 1], [1, 1], [1, 1], F, [0, 0], 8),
    *(
        (
            *(aten.convolution_backward, numbers(3, 5, 4, 4), X, W, [5]),
            *([1, 1], [0, 0], [1, 1], F, [0, 0], 1, mask),
        )
        for mask in ([T, T, T], [F, T, F])
    ),
    (aten.native_layer_norm, M, [16], M[0], M[0], 1e-5),
    (aten.native_layer_norm, M.bfloat16(), [16], M[0], M[0], 1e-5),
    *(
        (aten.native_layer_norm_backward, M, M, [16], NORMED[1], NORMED[2], M[0], M[0], mask)
        for mask in ([T, T, T], [F, T, F])
    ),
    *((aten.native_batch_norm, X, C, C, C.clone(), C.clone(), on, 0.1, 1e-5) for on in (T, F)),
    (
        *(aten.native_batch_norm_backward, X, X, C, None, None),
        *(BATCHED[1], BATCHED[2], T, 1e-5, [T, T, F]),
    ),
    (aten.native_group_norm, X, C, C, 3, 8, 36, 4, 1e-5),
    (aten.native_group_norm, X.bfloat16(), C.bfloat16(), C.bfloat16(), 3, 8, 36, 4, 1e-5),
    (aten.native_group_norm, X.bfloat16(), C, C, 3, 8, 36, 4, 1e-5),
    (
        aten.native_group_norm_backward,
        X,
        X,
        X[:, :4, 0, 0],
        X[:, :4, 0, 0],
        C,
        3,
        8,
        36,
        4,
        [T, T, F],
    ),
    *((aten.embedding, M, I), (aten.embedding_dense_backward, numbers(1, 4, 16), I, 12, -1, F)),
    (aten._scaled_dot_product_flash_attention_for_cpu, Q, Q, Q),
    (aten._scaled_dot_product_flash_attention_for_cpu, *[Q.bfloat16()] * 3),
    (
        aten._scaled_dot_product_flash_attention_for_cpu_backward,
        *(Q, Q, Q, Q, ATTENDED[0], ATTENDED[1], 0.0, F),
    ),
]
# Numbers that torch computes wider than they are given.
CALLS += [
    *((getattr(aten, name).Scalar, I, 2.5) for name in BINARY if name != "pow"),
    *((aten.sum, I), (aten.abs, M + 1j), (aten.stack, [M, M.double()])),
]


def fresh_bytes(results: Any) -> int:
    tensors = results if isinstance(results, tuple | list) else [results]
    return sum(t.untyped_storage().nbytes() for t in tensors if isinstance(t, Tensor))


@pytest.mark.parametrize("number", range(len(CALLS)))
def test_a_budget_one_byte_too_small_is_refused_for_what_the_operator_would_make(
    number: int,
) -> None:
    op: Callable[..., Any]
    op, *args = CALLS[number]
    made = fresh_bytes(op(*args))
    if made == 1:
        pytest.skip("there is no smaller budget")
    g = rematfn.remat(lambda: op(*args), made - 1)
    with pytest.raises(rematfn.BudgetError):
        g()
    roomy = rematfn.remat(lambda: op(*args), 1 << 30)
    with no_shape_function_in_python():
        roomy()
    assert made <= rematfn.stats(g).min_budget <= rematfn.stats(roomy).min_budget, op


def test_what_writes_its_argument_adds_nothing() -> None:
    x = M.clone()

    def f() -> None:
        x.add_(M).mul_(M).sigmoid_().copy_(M).relu_().addcmul_(M, M)

    g = rematfn.remat(f, "1B")
    g()
    assert rematfn.stats(g).min_budget == 0


NETWORKS = ("transformer-dropout", "attention-fused", "cnn-batchnorm", "u-net", "lstm")


@in_a_process
def test_a_budget_imports_nothing_that_the_step_does_not() -> None:
    for program in (program for program in ZOO if program.name in NETWORKS):
        loss_of(program.make(), untransformed).backward()  # no optimizer: it imports the compiler
        before = set(sys.modules)
        transform, made = kept(lambda f: rematfn.remat(f, "1GiB"))
        loss_of(program.make(), transform).backward()
        assert rematfn.stats(made[0]).operators > 5
        added = set(sys.modules) - before
        assert not added & {"torch._dynamo", "sympy", "onnx"}
        assert not added, sorted(added)[:20]
    assert "torch._dynamo" not in sys.modules
