# SPDX-License-Identifier: Apache-2.0
"""What a refused operator would make is known to the byte; of what runs nobody asks."""

import functools
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
C, LABELS, ONE = numbers(8), torch.tensor([0, 1, 2, 3]), torch.tensor(1.0)
NORMED = aten.native_layer_norm(M, [16], M[0], M[0], 1e-5)
ATTENDED = aten._scaled_dot_product_flash_attention_for_cpu(Q, Q, Q)

CALLS: list[tuple[Any, ...]] = [
    *((getattr(aten, name), M) for name in ("exp", "gelu", "argmax", "std", "sort", "bernoulli")),
    *((getattr(aten, name), M, M[:1]) for name in ("add", "pow", "lt", "maximum")),
    *((aten.mul.Scalar, I, 2.5), (aten.sum, I), (aten.stack, [M, M.double()])),  # are wider
    *((aten.var_mean, M, [1]), (aten.max, M, 1), (aten.topk, M, 3), (aten.cumsum, M, 1)),
    *((aten.arange, 9, 2, -2), (aten.full, [3, 2], 1.5), (aten.randn, [5]), (aten.zeros, [5, 6])),
    *((aten.constant_pad_nd, M, [1, 2]), (aten.native_dropout, M, 0.5, T)),
    *((aten._foreach_add, [M, M[:2]], 1.0), (aten._foreach_norm, [M, B])),
    *((aten.mm, M, M.mT), (aten.bmm, Q[0], Q[0].mT), (aten.addmm, M[:, 0], M, M.mT)),
    *((aten._softmax, M, 1, F), (aten._softmax_backward_data, M, M, 1, torch.float)),
    *((aten.gather, M, 0, I), (aten.scatter_add, M, 0, I, M), (aten.index_put, M, [I[0]], M[:4])),
    *((aten.max_pool2d_with_indices, X, [2, 2]), (aten.grid_sampler_2d, X, X[..., :2], 0, 0, F)),
    *((aten.nll_loss_forward, M[:4], LABELS, None, reduced, -100) for reduced in (0, 1)),
    (aten.convolution, X, W, B, [2, 1], [1, 0], [1, 2], F, [0, 0], 1),
    (
        *(aten.convolution_backward, numbers(3, 5, 4, 4), X, W, [5]),
        *([1, 1], [0, 0], [1, 1], F, [0, 0], 1, [T, T, T]),
    ),
    (aten.native_layer_norm, M.bfloat16(), [16], M[0], M[0], 1e-5),
    (aten.native_layer_norm_backward, M, M, [16], NORMED[1], NORMED[2], M[0], M[0], [T, F, T]),
    *((aten.native_batch_norm, X, C, C, C.clone(), C.clone(), on, 0.1, 1e-5) for on in (T, F)),
    (aten.native_group_norm, X.bfloat16(), C, C, 3, 8, 36, 4, 1e-5),
    *((aten.embedding, M, I), (aten.embedding_dense_backward, numbers(1, 4, 16), I, 12, -1, F)),
    (
        aten._scaled_dot_product_flash_attention_for_cpu_backward,
        *(Q, Q, Q, Q, ATTENDED[0], ATTENDED[1], 0.0, F),
    ),
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


def test_what_writes_and_makes_is_refused_before_it_writes() -> None:
    @torch.library.custom_op("rematfn_tests::doubles_and_repeats", mutates_args=("a",))
    def doubles_and_repeats(a: Tensor, b: Tensor) -> Tensor:
        a.mul_(2)
        return b.repeat(8, 1)

    doubles_and_repeats.register_fake(lambda a, b: b.repeat(8, 1))
    a = M.clone()
    with pytest.raises(rematfn.BudgetError):
        rematfn.remat(lambda b: doubles_and_repeats(a, b), 4 * M.nbytes)(M)
    assert torch.equal(a, M)


NETWORKS = ("transformer-dropout", "attention-fused", "cnn-batchnorm", "u-net", "lstm")


@functools.partial(in_a_process, modules=())
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
