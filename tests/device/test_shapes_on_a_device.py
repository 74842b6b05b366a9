# SPDX-License-Identifier: Apache-2.0
"""What operators of accelerators will allocate is known without Python, as torch's tells it.

Most have no kernel here, so none runs: the budget is refused before.
"""

from typing import Any

import pytest
import torch
from fake_device import DEVICE
from helpers import no_shape_function_in_python
from torch import Tensor

import rematfn

aten = torch.ops.aten
T, F = True, False


def numbers(*sizes: int, dtype: torch.dtype = torch.half) -> Tensor:
    return torch.empty(*sizes, dtype=dtype, device="meta")


Q, K, V = numbers(2, 3, 70, 8), numbers(2, 3, 40, 8), numbers(2, 3, 40, 16)
BIAS, MASKS = numbers(2, 3, 70, 40), ([T, T, T, T], [T, T, T, F])
X, G, C = numbers(3, 8, 6, 6), numbers(3, 5, 4, 2), numbers(8)
W, R = numbers(8, dtype=torch.float), numbers(6, 6)
MEANS, GROUPS = numbers(3, 8, 1, 1, dtype=torch.float), numbers(3, 2, dtype=torch.float)
IMAGES, VOLUMES, PLACES = numbers(3, 8, 6, 6), numbers(3, 8, 4, 6, 6), numbers(3, 4, 5, 3, 3)
SEED = torch.empty(2, dtype=torch.uint64, device="meta")
BITS = torch.empty(3, 8, 6, 6, dtype=torch.bool, device="meta")
GATES, CELL = numbers(4, 20), numbers(4, 5)
LIST = [numbers(3, 4), numbers(7), numbers(2, 2)]


def backward(op: Any, *after: Any) -> tuple[Any, ...]:
    return (op, V[..., :70, :], Q, K, V, *after)


# With each operator's results as torch's shape function in Python makes them.
CALLS: list[tuple[Any, ...]] = [
    (aten._scaled_dot_product_flash_attention, Q, K, K),
    (aten._scaled_dot_product_flash_attention, Q.float(), K, K, 0.1, T),
    *((aten._scaled_dot_product_efficient_attention, Q, K, V, b, T) for b in (None, BIAS)),
    (aten._scaled_dot_product_efficient_attention, Q, K, V, None, F),
    (aten._scaled_dot_product_cudnn_attention, Q, K, V, None, T),
    *((aten._scaled_dot_product_fused_attention_overrideable, Q, K, V, b) for b in (None, BIAS)),
    (aten._flash_attention_forward, Q, K, K, None, None, 3, 3, 0.0, F, F),
    (aten._flash_attention_forward, Q[0], K[0], K[0], SEED, SEED, 2, 2, 0.0, F, F),
    backward(aten._scaled_dot_product_flash_attention_backward, *[Q, W, W, W, 3, 3, 0.0, F, W, W]),
    backward(aten._flash_attention_backward, *[Q, W, W, W, 3, 3, 0.0, F, W, W]),
    backward(
        aten._scaled_dot_product_cudnn_attention_backward,
        *[Q, W, W, W, BIAS, W, W, 3, 3, 0.0, F],
    ),
    *(
        backward(
            aten._scaled_dot_product_fused_attention_overrideable_backward,
            *[BIAS, m, Q, W, W, W, 3, 3, 0.0, F, W, W],
        )
        for m in MASKS
    ),
    *(
        backward(
            aten._scaled_dot_product_efficient_attention_backward,
            *[BIAS, Q, W, W, W, 0.0, m],
        )
        for m in MASKS
    ),
    *((aten.cudnn_batch_norm, X, w, w, w, w, on, 0.1, 1e-5) for w in (C, W) for on in (T, F)),
    *((aten.native_batch_norm, X, w, w, w, w, T, 0.1, 1e-5) for w in (C, W)),
    (aten._batch_norm_with_update, X, W, W, W, W, 0.1, 1e-5),
    (aten.cudnn_batch_norm_backward, X, X, W, W, W, W, W, 1e-5, C),
    (aten.batch_norm_backward, X, X, W, W, W, W, W, T, 1e-5, [T, T, F], C),
    (aten.native_batch_norm_backward, X, X, W, W, W, W, W, T, 1e-5, [T, T, T]),
    *((aten.native_layer_norm, X, [6, 6], w, w, 1e-5) for w in (R, R.float(), None)),
    *(
        (aten.native_layer_norm_backward, X, X, [6, 6], MEANS, MEANS, R, R, m)
        for m in ([T, T, T], [F, T, F])
    ),
    (aten._fused_rms_norm_backward, X, X, [6, 6], MEANS, R, [T, T]),
    (aten.native_group_norm_backward, *[X.float()] * 2, GROUPS, GROUPS, W, 3, 8, 36, 2, [T, T, T]),
    (aten.native_dropout, X, 0.3, T),
    (aten.native_dropout_backward, X, BITS, 2.0),
    *((op, X, 1, T) for op in (aten._softmax, aten._log_softmax)),
    (aten._log_softmax_backward_data, X.float(), X.float(), 1, torch.half),
    *((aten.grid_sampler_2d, IMAGES, G, 0, 0, F), (aten.grid_sampler_3d, VOLUMES, PLACES, 0, 0, F)),
    *((aten.grid_sampler_2d_backward, X, IMAGES, G, 0, 0, F, m) for m in ([T, T], [F, T])),
    *((aten.upsample_nearest2d, X, [9, 9]), (aten.upsample_bilinear2d, X, [9, 9], F)),
    (aten.upsample_bilinear2d_backward, numbers(3, 8, 9, 9), [9, 9], [3, 8, 6, 6], F),
    *(
        (aten._adaptive_avg_pool2d, X, [3, 2]),
        (aten._adaptive_avg_pool2d_backward, X[..., :2, :3], X),
    ),
    (aten.max_pool2d_with_indices, X, [2, 2]),
    (aten._thnn_fused_lstm_cell, GATES, GATES, CELL, GATES[0], GATES[0]),
    *(
        (
            *(
                aten._cudnn_rnn,
                numbers(7, 3, 5),
                [W],
                1,
                W,
                numbers(4, 3, width),
                numbers(4, 3, 6),
                2,
            ),
            *(6, proj, 2, F, 0.0, T, T, [], None),
        )
        for proj, width in ((0, 6), (2, 2))
    ),
    *((aten.binary_cross_entropy_with_logits, X, X, None, None, how) for how in (0, 1)),
    *((aten.binary_cross_entropy, X, X, None, how) for how in (0, 1)),
    *((aten.huber_loss, X, X, how, 1.0) for how in (0, 1)),
    (aten.convolution, X, numbers(5, 8, 3, 3), None, [2, 1], [1, 0], [1, 2], F, [0, 0], 1),
    *((aten._foreach_add.List, LIST, LIST), (aten._foreach_mul.Scalar, LIST, 2.0)),
    *((aten._foreach_sqrt, LIST), (aten._foreach_addcdiv.Scalar, LIST, LIST, LIST)),
    (aten._foreach_norm.Scalar, LIST, 2.0),
]


def tensors(results: Any) -> list[Tensor]:
    values = results if isinstance(results, tuple | list) else [results]
    return [t for t in values if isinstance(t, Tensor)]


@pytest.mark.parametrize("number", range(len(CALLS)))
def test_a_budget_one_byte_too_small_is_refused_for_what_torch_s_shape_function_tells(
    number: int,
) -> None:
    op, *args = CALLS[number]
    given = {id(t) for t in args if isinstance(t, Tensor)}
    try:
        results = tensors(op(*args))
    except NotImplementedError:
        pytest.skip("this torch has no shape function for it")
    made = sum(t.untyped_storage().nbytes() for t in results if id(t) not in given)

    def there(value: Any) -> Any:
        if isinstance(value, list):
            return [there(v) for v in value]
        return torch.empty_like(value, device=DEVICE) if isinstance(value, Tensor) else value

    on_device = [there(value) for value in args]
    g = rematfn.remat(lambda: op(*on_device), f"{made - 1}B")
    with no_shape_function_in_python(), pytest.raises(rematfn.BudgetError):
        g()
    assert rematfn.stats(g).min_budget == made, op
