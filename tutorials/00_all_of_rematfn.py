# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 0. All of rematfn
#
# Training needs memory for every intermediate result until the backward pass has read it. rematfn
# lets you say how much. `rematfn.remat(f, budget)` computes what `f` computes, bit for bit, and the
# tensors that it keeps stay inside `budget` bytes.
#
# This page is all that you need to use it. The other notebooks are about how it works.

# %%
# SPDX-License-Identifier: Apache-2.0
import torch
from show import table

import rematfn

torch.manual_seed(0)


def loss_fn(weights, x, y):
    for w in weights[:-1]:
        x = torch.nn.functional.gelu(x @ w)
    return (x @ weights[-1] - y).square().mean()


weights = [torch.randn(256, 256) / 16 for _ in range(24)]
x, y = torch.randn(512, 256), torch.randn(512, 256)

loss = rematfn.remat(loss_fn, budget="8MiB")  # a function like loss_fn
for _ in range(2):  # the first call is measured, from the second on it is guided
    gradients = torch.func.grad(loss)(weights, x, y)

expected = torch.func.grad(loss_fn)(weights, x, y)
assert all(torch.equal(a, b) for a, b in zip(gradients, expected, strict=True))
print(rematfn.stats(loss))

# %% [markdown]
# What did not fit was *evicted*: its bytes were freed, and the operators that made it were run
# again (*replayed*) when it was read. The first call knows nothing of the program, and replays
# more; it leaves a record, by which later calls choose what to evict. `min budget`, in the
# printout, is what the largest operator alone needs. Nothing in `loss_fn` had to change. You can
# rely on three things.
#
# 1. **The same bits.** Values and gradients are those of `f`: dropout masks, in-place operators and
#    batch norm's statistics included. What cannot be replayed exactly is kept.
# 2. **The budget holds.** Room is made before an operator runs.
# 3. **It composes.** `torch.func`, `.backward()`, `create_graph=True` and autocast work around it
#    and inside it. What you get back are ordinary tensors.
#
# Do not take our word for the second. `MemoryTimeline` reads the allocator, and asks rematfn
# nothing.


# %%
def peak_of(f, *args):
    with rematfn.testing.MemoryTimeline() as timeline:
        results = f(*args)  # noqa: F841 -- they are to live to the end of the block
    return timeline.peak_excluding_survivors  # without the results, which are the caller's


without = peak_of(torch.func.grad(loss_fn), weights, x, y)
within = peak_of(torch.func.grad(loss), weights, x, y)
print(f"without a budget {without / 2**20:.1f} MiB, within 8 MiB {within / 2**20:.1f} MiB")
# 8 bytes more: the loss, and the 1 that its backward begins with, are made by grad outside of it.
assert within <= (8 << 20) + 8 < without

# %% [markdown]
# ## The ways to write it
#
# As a decorator, here of a function that returns gradients; on a module, which keeps its
# parameters, buffers and names; and in the place of `torch.utils.checkpoint`.


# %%
@rematfn.remat(budget=0.3)  # 0.3 of the peak that it would have without a budget
def step(weights, x, y):
    return torch.func.grad_and_value(loss_fn)(weights, x, y)


_, value = step(weights, x, y)
assert value == loss_fn(weights, x, y)

model = torch.nn.Sequential(
    torch.nn.Linear(256, 256), torch.nn.BatchNorm1d(256), torch.nn.Dropout(0.1), torch.nn.ReLU()
)
budgeted = rematfn.remat(model, "4MiB")
budgeted(x).sum().backward()
assert model[0].weight.grad is not None  # the same parameters
assert model[1].num_batches_tracked == 1  # replaying does not count a batch twice

value = rematfn.checkpoint(model, x)  # the arguments are torch's
assert value.shape == x.shape

# %% [markdown]
# The order of the transforms decides how much the budget covers. `remat(grad(f))` bounds all of a
# step, gradients included. In `grad(remat(f))` a gradient is yours from the moment that it is
# complete, and counts no more. Both have the same bits, with a `vmap` or a `jvp` between them too
# (notebook 8).
#
# ## Budgets
#
# | budget | means |
# |---|---|
# | `4096`, `"1.5GiB"`, `"200MB"` | bytes; KiB, MiB, GiB are binary, kB, MB, GB decimal |
# | `0.3` | a fraction of the largest peak that calls have without a budget |
# | `rematfn.Budget("8GiB")` | bytes that all functions share which are given this object |
# | `None` | no cap: values are evicted only if memory runs short |
#
# Intermediates, what autograd saves, gradients in flight and the scratch memory of kernels (on a
# CPU) count. Arguments and parameters do not; results only until they are returned.
#
# The first call of a function with a fraction has no cap, since nobody knows its peak yet.
# `rematfn.warmup` finds it from shapes alone, without computing anything.

# %%
rematfn.warmup(step, weights, x, y)
shared = rematfn.Budget("6MiB")
first, second = rematfn.remat(loss_fn, shared), rematfn.remat(loss_fn, shared)
leaves = [w.clone().requires_grad_() for w in weights]
total = first(leaves, x, y) + second(leaves, x + 1, y)  # two graphs wait for their backward
total.backward()
print(f"both together: {shared.peak_bytes / 2**20:.1f} MiB")
assert shared.peak_bytes <= 6 << 20

# %% [markdown]
# If one operator alone needs more than the budget, a `BudgetError` says so, and
# names the least budget in which the function gets past this operator.

# %%
try:
    rematfn.remat(loss_fn, "768KiB")(weights, x, y)
except rematfn.BudgetError as error:
    print(error)
else:
    raise AssertionError("gelu needs its input and its output at once")

# %% [markdown]
# ## What happened, and what would happen
#
# `rematfn.stats(g)` tells what the last call of `g` did. The first call of a function is recorded.
# From the second on it is known when each value will be read next, so less is replayed. And a
# record can be asked what another budget would cost, without running anything. (*Cost* is an
# estimate of an operator's time, from its arithmetic and its bytes.)

# %%
gradient = rematfn.remat(torch.func.grad(loss_fn), "12MiB")
rows = []
for _ in range(2):
    gradient(weights, x, y)
    s = rematfn.stats(gradient)
    rows.append((s.call, s.evictions, s.replays, f"{s.replayed_cost:.1%}"))
table(rows, ["call", "evictions", "replays", "replayed, of the cost"])
assert [row[0] for row in rows] == ["first", "guided"]
assert rows[1][2] < rows[0][2]

trace = rematfn.record(torch.func.grad(loss_fn), weights, x, y)
rows = [(b, f"{rematfn.simulate(trace, b).replayed_cost:.1%}") for b in (0.7, 0.5, 0.3, 0.2)]
table(rows, ["budget, of the peak", "would replay, of the cost"])

# %% [markdown]
# Half of the peak costs nothing here: `torch.func.grad` keeps what a second derivative would need,
# and nobody asks for one.
#
# ## Say what to keep
#
# The default policy decides by itself. If you know better, mark a value and name it, or choose
# another policy from `rematfn.policies`. Marks and policies change what is evicted first. They
# never change a result, and a budget comes before them.


# %%
def marked(weights, x, y):
    for i, w in enumerate(weights):
        x = torch.nn.functional.gelu(x @ w)
        if i % 6 == 5:
            x = rematfn.keep(x, "every sixth")
    return (x - y).square().mean()


keeping = rematfn.remat(marked, policy=rematfn.policies.Manual(only=("every sixth",)))
saving = rematfn.remat(marked, policy=rematfn.policies.Speed())  # keeps matrix products
for g in (keeping, saving):
    got = torch.func.grad(g)(weights, x, y)
    wanted = torch.func.grad(marked)(weights, x, y)
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))

# %% [markdown]
# ## Move instead of recompute
#
# `rematfn.offload` moves what does not fit and fetches it: from the CPU to a disk, from a GPU to
# the host's pinned memory. Nothing is computed twice. With `remat(f, budget, offload=True)` each
# value takes the cheaper of the two ways. On a CPU, `offload="packed"` compresses values in memory
# instead, without loss.

# %%
moved = rematfn.offload(torch.func.grad(loss_fn), "12MiB")  # to="/a/folder" says where
got = moved(weights, x, y)
s = rematfn.stats(moved)
assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
assert s.replays == 0 < s.moves
print(f"{s.moves} values moved, {s.replays} operators replayed")
assert s.peak_bytes <= 12 << 20

# %% [markdown]
# ## What it does not do
#
# - It is not free. What is replayed costs time, and so does each operator: `make bench` measures
#   it, and `stats` tells what was replayed.
# - Code inside `f` that reads a tensor's bytes past PyTorch's operators (`np.from_dlpack`, an
#   extension in C++) has to call `rematfn.materialize(tensor)` first, or gets an error.
#   `print`, `numpy()`, `data_ptr()` and `torch.save` just work.
# - A compiled function inside `f` needs `torch.compile(g, backend="rematfn")`. If another backend
#   compiles it, it has to be wrapped, `rematfn.opaque(torch.compile(g))`, and runs outside of the
#   budget.
# - What `f` reads must not be overwritten between the forward and the backward pass: a
#   `ReplayError`.
# - It runs on Linux, with torch 2.11 to 2.15. A build from source is for one minor version of
#   torch.
#
# Each has its program and its rewrite in [`docs/limitations.md`](../docs/limitations.md). How all
# of this works is told in notebooks 1 to 8, which begin with [the dispatcher](01_dispatcher.ipynb).
#
# **Question.** You train with `loss = rematfn.remat(loss_fn, "8MiB")`, and the process still needs
# more than 8 MiB on top of the parameters. Is the budget broken?
#
# <details><summary>Answer</summary>
#
# No. It bounds what `loss_fn` and its backward make. Returned gradients, the optimiser's state and
# the data are the caller's. To have the gradients and the update inside, transform the whole step.
# </details>
