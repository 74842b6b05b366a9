# SPDX-License-Identifier: Apache-2.0
# %% [markdown]
# # A first budget
#
# A training step keeps every residual of the forward until the backward has read it. Here we put
# such a step inside a third of that, and watch what it costs: nothing in accuracy, a few replays in
# time.

# %%
import torch

import rematfn


def loss_fn(weights: list[torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    for w in weights:
        x = torch.relu(x @ w)
    return x.square().mean()


torch.manual_seed(0)
weights = [torch.randn(64, 64) / 8 for _ in range(24)]
x = torch.randn(256, 64)


# %% [markdown]
# Without a budget a level only counts. `rematfn.stats` tells the peak.


# %%
def gradients(f) -> list[torch.Tensor]:
    leaves = [w.clone().requires_grad_() for w in weights]
    return list(torch.autograd.grad(f(leaves, x), leaves))


counted = rematfn.remat(loss_fn)
expected = gradients(loss_fn)
gradients(counted)
print(rematfn.stats(counted))
assert rematfn.stats(counted).replays == 0

# %% [markdown]
# Now a third of it. Values that do not fit are evicted, and recomputed from their lineage when the
# backward reads them. The gradients are the same, bit for bit.

# %%
capped = rematfn.remat(loss_fn, budget=rematfn.stats(counted).peak_bytes // 3)
actual = gradients(capped)
print(rematfn.stats(capped))
assert rematfn.stats(capped).peak_bytes <= rematfn.stats(counted).peak_bytes // 3
assert rematfn.stats(capped).replays > 0
assert all(torch.equal(a, e) for a, e in zip(actual, expected, strict=True))

# %% [markdown]
# A budget that one operator alone exceeds is refused before that operator runs. The message names
# the operator, and what it can do with.

# %%
try:
    rematfn.remat(loss_fn, budget="64KiB")(weights, x)
except rematfn.BudgetError as error:
    print(error)
else:
    raise AssertionError("64 KiB cannot hold the 64 KiB that go into a product and come out of it")

# %% [markdown]
# `remat` is a transform. Per-sample gradients are `vmap` of `grad`, and a budget goes around,
# inside or between.

# %%
per_sample = torch.func.vmap(torch.func.grad(loss_fn), in_dims=(None, 0))
within = rematfn.remat(per_sample, budget="6MiB")
for a, e in zip(within(weights, x[:16, None]), per_sample(weights, x[:16, None]), strict=True):
    assert torch.equal(a, e)
print(rematfn.stats(within))

# %% [markdown]
# **What breaks next.** Lower the last budget until it is refused. Which operator is it that does
# not fit, and why does moving `remat` inside `grad` not help?
