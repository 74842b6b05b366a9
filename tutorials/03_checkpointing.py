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
# # 3. Checkpointing
#
# A backward pass reads what the forward pass has made, so the forward keeps it, and the memory of
# a step grows with its depth. *Checkpointing* keeps less of it, and runs parts of the forward a
# second time. torch has two kinds of it, `use_reentrant=True` and `use_reentrant=False`. At the end
# of this notebook you will have written both, you will know when they are worth their price, and
# where each of them stops working.
#
# The idea is Chen et al., *Training Deep Nets with Sublinear Memory Cost*
# ([arXiv:1604.06174](https://arxiv.org/abs/1604.06174)).

# %%
# SPDX-License-Identifier: Apache-2.0
import functools
import inspect
import itertools
import os
import weakref
from contextlib import contextmanager, suppress

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
import torch.utils.checkpoint as torch_source
from show import quote, table
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from torch.utils.flop_counter import FlopCounterMode

import rematfn
from rematfn.testing import MemoryTimeline

torch.manual_seed(0)
torch.set_num_threads(1)

# %% [markdown]
# ## 1. What autograd saves, and when it frees it
#
# Each operator that needs a gradient leaves a *node* in a graph. The node keeps the tensors that
# its formula for the gradient reads. `saved_tensors_hooks` calls us for each of them.


# %%
def saved_by(f, *args):
    """Run f; return its result, and the shapes of what autograd saved."""
    saved = []

    def pack(tensor):
        saved.append(tuple(tensor.shape))
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        return f(*args), saved


w = torch.randn(3, 4, requires_grad=True)
a = torch.randn(2, 3, requires_grad=True)
rows = []
for name, f in {
    "a + a": lambda: a + a,
    "a @ w": lambda: a @ w,
    "a.tanh()": lambda: a.tanh(),
    "(a @ w).tanh()": lambda: (a @ w).tanh(),
}.items():
    rows.append(
        (f"`{name}`", len(saved_by(f)[1]), ", ".join(map(str, saved_by(f)[1])) or "nothing")
    )
table(rows, ["operator", "saved", "shapes"])
assert [row[1] for row in rows] == [0, 2, 1, 3]

# %% [markdown]
# An addition saves nothing: its gradient does not depend on its inputs. A product saves both
# factors. `tanh` saves its *result*, since the derivative is `1 - result²`. So in `(a @ w).tanh()`
# nobody keeps the product, and it is freed at once.
#
# A tensor holds the node that made it, and each node holds the nodes before it. So the result of
# the forward keeps the whole graph. A backward pass runs the nodes from the last to the first, and
# after each node it frees what that node has saved, unless we ask for `retain_graph=True`. A node
# shows what it has saved as an attribute. To read that attribute once it is freed raises an error.

# %%
h = a.exp()
loss = h.square().sum()
node = h.grad_fn  # of exp, which saves its result
holds = []


def holds_its_result(node):
    try:
        return node._saved_result is not None
    except RuntimeError:  # "Trying to backward through the graph a second time ..."
        return False


holds.append(holds_its_result(node))
h.register_hook(lambda grad: holds.append(holds_its_result(node)))  # just before exp's node runs
a.register_hook(lambda grad: holds.append(holds_its_result(node)))  # just after
loss.backward()
print("exp's node holds its result: before the backward, before the node, after it:", holds)
assert holds == [True, True, False]

# %% [markdown]
# Now a deep network. `MemoryTimeline` counts the bytes that torch's allocator hands out and takes
# back. Our unit is an *activation*: the bytes of one layer's result. We leave out the gradients
# that a step returns.

# %%
WIDTH, BATCH, DEPTH = 64, 512, 16
ACTIVATION = BATCH * WIDTH * 4  # bytes
layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh()) for _ in range(DEPTH)]
x = torch.randn(BATCH, WIDTH, requires_grad=True)


def step(network):
    """Run network and its backward; return the gradients of x and of the weights."""
    leaves = [x, *(layer[0].weight for layer in layers)]
    for leaf in leaves:
        leaf.grad = None
    result = network(x)
    loss = result.square().mean() if result.dim() else result
    result = None  # autograd has it, if it needs it
    loss.backward()
    return [leaf.grad for leaf in leaves]


@contextmanager
def without_stderr():  # the profiler, which MemoryTimeline reads, reports each start there
    kept, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(null)


def measured(network):
    """The gradients of a step, and its peak beside these gradients."""
    with without_stderr(), MemoryTimeline() as timeline:
        grads = step(network)
    return grads, timeline.peak_excluding_survivors / ACTIVATION


def plain(h, depth=DEPTH):
    for i in range(depth):
        h = layers[i % DEPTH](h)  # a longer chain uses the weights again
    return h


step(plain)
expected, whole = measured(plain)
peaks = [measured(lambda h, depth=depth: plain(h, depth))[1] for depth in (4, 8, 16)]
table([[d, f"{p:.1f}"] for d, p in zip((4, 8, 16), peaks)], ["layers", "peak, activations"])
assert peaks[0] + 3.5 < peaks[1] and peaks[1] + 7 < peaks[2]  # one more for each layer

# %% [markdown]
# Each layer adds one activation. The other four are those that the backward of the loss,
# `square().mean()`, works with.
#
# <details><summary><b>Question.</b> Would the peak change if the layers were <code>relu</code> and
# not <code>tanh</code>? And if a layer were only an addition of a constant?</summary>
#
# *Answer.* Not with `relu`. It saves its result as well, to know where that is positive. The next
# product saves the same tensor as its factor, so it is one tensor. An addition saves nothing. A
# chain of additions alone would need no more than two activations, however long it is.
# </details>

# %% [markdown]
# ## 2. Why a first forward without gradients, and a second with?
#
# The smallest fix: do not keep what a part of the network makes. Keep its *input*, and run the
# part again when its gradient is asked for. An `autograd.Function` can do this, since it says
# itself what its forward saves and what its backward does.


# %%
log = []


class CheckpointFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, f, h):
        ctx.f = f
        ctx.save_for_backward(h)  # the input, and nothing else
        with torch.no_grad():  # the first forward: no node, so nothing is saved; see below
            return f(h)

    @staticmethod
    def backward(ctx, grad):
        (h,) = ctx.saved_tensors
        h = h.detach().requires_grad_()  # a leaf: the inner graph ends here
        with torch.enable_grad():  # the second forward: nodes, so that there is a way back
            out = ctx.f(h)
        torch.autograd.backward(out, grad)  # a backward pass inside the backward pass
        return None, h.grad


def checkpoint(f, h):
    return CheckpointFunction.apply(f, h)


def part(first, last):
    """Layers first to last - 1, as one function that tells when it runs."""

    def run(h):
        log.append((first, torch.is_grad_enabled()))
        for i in range(first, last):
            h = layers[i % DEPTH](h)
        return h

    return run


def checkpointed(h):
    for first in range(0, DEPTH, 4):
        h = checkpoint(part(first, first + 4), h)
    return h


grads, peak = measured(checkpointed)
assert all(torch.equal(mine, plain) for mine, plain in zip(grads, expected, strict=True))
assert peak < 0.75 * whole
table(
    [["plain", f"{whole:.1f}"], ["four parts of four layers", f"{peak:.1f}"]],
    ["network", "peak, activations"],
)
table(
    [[i + 1, first, with_grad] for i, (first, with_grad) in enumerate(log)],
    ["run", "part that begins at layer", "with grad"],
)
assert log == [
    (0, False),
    (4, False),
    (8, False),
    (12, False),
    (12, True),
    (8, True),
    (4, True),
    (0, True),
]

# %% [markdown]
# The table answers the heading.
#
# - The first forward runs to get the *value*, which the next part needs now. If it ran with
#   gradients, its nodes would save what we want to free. (`apply` switches gradients off for the
#   `forward` of each `Function`. We write `no_grad` all the same, as torch does.)
# - The second forward runs to get the *nodes*. Its value is known already. Without gradients there
#   would be no nodes, and `backward` could not be called on its result.
#
# The second forward of the last part runs first, and each is over, with its memory freed, before
# the next one begins. So at any time there are the inputs of the parts, and the activations inside
# one of them.
#
# `detach()` matters. Without it the inner backward would not stop at the part's input. It would go
# on through the whole outer graph, which the outer backward is still walking.
#
# torch's own, with `use_reentrant=True`, has the same steps. It also notes the state of the random
# number generator for each part, which is why its peak is a little higher (part 7):

# %%
source = inspect.getsource(torch_source.CheckpointFunction)
for needle in (
    "with torch.no_grad():",
    "detach_variable(tuple(inputs))",
    "with torch.enable_grad()",
    "torch.autograd.backward(",
):
    assert needle in source


def torchs(h):
    for first in range(0, DEPTH, 4):
        h = torch_checkpoint(part(first, first + 4), h, use_reentrant=True)
    return h


log.clear()
grads, theirs = measured(torchs)
assert all(torch.equal(mine, plain) for mine, plain in zip(grads, expected, strict=True))
assert [with_grad for _, with_grad in log] == [False] * 4 + [True] * 4
assert abs(theirs - peak) < 0.5
print(f"ours {peak:.1f} activations, torch's {theirs:.1f}")

# %% [markdown]
# *Reentrant* means that a backward pass runs inside a backward pass. The inner one does not know
# which gradients the outer one was asked for: it adds to `.grad` of every weight that it meets. So
# torch refuses it where only some are asked for:

# %%
try:
    torch.autograd.grad(torch_checkpoint(part(0, 4), x, use_reentrant=True).sum(), x)
    raise AssertionError("it was not refused")
except RuntimeError as error:
    print(str(error).partition(". ")[0])
    assert "incompatible with .grad()" in str(error)

# %% [markdown]
# <details><summary><b>Question.</b> Is the second forward needed for the last part?</summary>
#
# *Answer.* Hardly. Its backward begins as soon as its first forward and the loss are over. Without
# a checkpoint the activations inside it would be there while the backward of the loss runs, and no
# longer. Here this costs one activation of the peak, and saves a forward of the part.
# `checkpoint_sequential` leaves the last part out.
# </details>

# %% [markdown]
# ## 3. How a backward finds the layer before
#
# There is no list of layers in autograd. Each node holds `next_functions`: the nodes of the inputs
# of its operator. To find the layer before is to follow this reference. A checkpoint is one node
# for the whole part, and what its `backward` returns for an input goes to the node of that input.

# %%
out = checkpointed(x)
names, node = [], out.grad_fn
while node is not None:
    names.append(type(node).__name__)
    node = next((following for following, _ in node.next_functions if following is not None), None)
print(" -> ".join(names))
assert names == ["CheckpointFunctionBackward"] * 4 + ["AccumulateGrad"]

# %% [markdown]
# The weights are not in this chain. They are no inputs of the checkpoint: `f` reaches them on
# its own. Autograd learns of them in the second forward, which makes an inner graph that ends in
# their `AccumulateGrad` nodes. This is the way by which the inner backward finds them.
#
# ### Where does the loss go between two checkpoints?
#
# Nowhere. There is one loss, at the end, and it is computed once. Between two checkpoints goes a
# *gradient*: that of the loss with respect to the tensor between them. It has the shape of that
# tensor. A part gets the gradient of its result, and returns the gradient of its input.
#
# `torch.autograd.backward(out, grad)` in our `backward` begins at the part's result with that
# gradient, as if there were a small loss `(out * grad).sum()` of its own. The next cell cuts the
# network in two halves and looks.

# %%
middle = plain(x, 8).detach().requires_grad_()
part(8, 16)(middle).square().mean().backward()
between = middle.grad  # all that the first half gets of the loss
(by_gradient,) = torch.autograd.grad(plain(x, 8), x, between)
(by_small_loss,) = torch.autograd.grad((plain(x, 8) * between).sum(), x)
print("between the halves goes a gradient of shape", tuple(between.shape))
assert torch.equal(by_gradient, expected[0]) and torch.equal(by_small_loss, expected[0])

# %% [markdown]
# ## 4. What is the phony for?
#
# The next problem: the first layer of most networks reads *data*, which needs no gradient.

# %%
data = x.detach()
out = checkpoint(part(0, 4), data)
print("the result requires a gradient:", out.requires_grad)
assert not out.requires_grad  # the weights of layers 0 to 3 would silently get no gradient

# %% [markdown]
# An `autograd.Function` makes a node only if one of its tensor *inputs* requires a gradient. The
# first forward ran without gradients, and the weights are no inputs, so autograd sees no reason
# for a node. Nobody calls our `backward`, and the weights are not trained. There is no error,
# either. (torch's own gives a warning.)
#
# The fix is an input without meaning: an empty tensor that requires a gradient. torchgpipe calls
# it the *phony*; fairscale's `checkpoint_wrapper` passes a `dummy_tensor_requires_grad`.


# %%
class WithPhony(torch.autograd.Function):
    @staticmethod
    def forward(ctx, phony, f, h):
        return CheckpointFunction.forward(ctx, f, h)

    @staticmethod
    def backward(ctx, grad):
        return None, *CheckpointFunction.backward(ctx, grad)


def with_phony(f, h):
    return WithPhony.apply(torch.empty(0, requires_grad=True), f, h)


weight = layers[0][0].weight
weight.grad = None
with_phony(part(0, 4), data).sum().backward()
mine_of_layer_0, weight.grad = weight.grad, None
plain(data, 4).sum().backward()
assert torch.equal(mine_of_layer_0, weight.grad)
print("layer 0 has its gradient, by way of", type(with_phony(part(0, 4), data).grad_fn).__name__)

# %% [markdown]
# ### Why is the phony of size zero, or of size one?
#
# Its numbers are never read, so it needs none, and torchgpipe's has size zero. fairscale's copy of
# the pipeline makes it of size one. A comment in its
# [phony.py](https://github.com/facebookresearch/fairscale/blob/main/fairscale/nn/pipe/phony.py)
# says why: at that time tensorpipe, which sent tensors between processes, could not send a tensor
# of size zero. So it is a workaround for the transport, and has nothing to do with autograd.
#
# ### Where does checkpointing recompute?
#
# In the `backward` of its node: on the thread of the backward pass, once the gradient of the part's
# result has arrived. On one device this is the best moment. Any earlier, and the inside of the part
# would be held for longer.
#
# In a pipeline over several devices the gradient comes from another device. A device that waits for
# it could compute the part again in that time. So torchgpipe
# ([checkpoint.py](https://github.com/kakaobrain/torchgpipe/blob/master/torchgpipe/checkpoint.py))
# makes two nodes out of one. The backward of `Recompute` runs the second forward, and needs no
# gradient. The backward of `Checkpoint` takes what `Recompute` has made, and runs the inner
# backward pass. The phony has a second task there. It carries no numbers, but it is an edge of the
# graph, and edges say what comes first. In small:


# %%
order = []


class Checkpoint(torch.autograd.Function):  # the inner backward
    @staticmethod
    def forward(ctx, phony, f, made, h):
        ctx.made = made
        with torch.no_grad():
            return f(h)

    @staticmethod
    def backward(ctx, grad):
        order.append("inner backward")
        out, h = ctx.made.pop()
        torch.autograd.backward(out, grad)
        return None, None, None, h.grad


class Recompute(torch.autograd.Function):  # the second forward; it passes the phony on
    @staticmethod
    def forward(ctx, phony, f, made, h):
        ctx.f, ctx.made, ctx.h = f, made, h.detach()
        return phony.clone()

    @staticmethod
    def backward(ctx, grad):
        order.append("second forward")
        h = ctx.h.requires_grad_()
        with torch.enable_grad():
            ctx.made.append((ctx.f(h), h))
        return grad, None, None, None


class Fork(torch.autograd.Function):  # a phony that comes from h
    @staticmethod
    def forward(ctx, h):
        return h.view_as(h), torch.empty(0)

    @staticmethod
    def backward(ctx, grad, phony_grad):
        return grad


class Join(torch.autograd.Function):  # h, as if it depended on the phony
    @staticmethod
    def forward(ctx, h, phony):
        return h.view_as(h)

    @staticmethod
    def backward(ctx, grad):
        order.append("gradient arrives")
        return grad, torch.empty(0)


def split_checkpoint(f, h):
    made = []
    out = Checkpoint.apply(torch.empty(0, requires_grad=True), f, made, h)
    out, phony = Fork.apply(out)
    phony = Recompute.apply(phony, f, made, h)
    return Join.apply(out, phony)


grads, _ = measured(lambda h: split_checkpoint(part(0, DEPTH), h))
assert all(torch.equal(mine, plain) for mine, plain in zip(grads, expected, strict=True))
print(" -> ".join(order))
assert order == ["gradient arrives", "second forward", "inner backward"]

# %% [markdown]
# ```text
# forward:     h -> Checkpoint -> Fork ------------------> Join -> out
#                                   \--- Recompute --------/
#                                        (phony: 0 numbers)
# ```
#
# A backward runs this picture from right to left. A node waits until all that read its results
# have run: `Checkpoint` waits for `Fork`, and `Fork` for `Recompute`, which reads its phony. So
# the second forward has to come before the inner backward.
#
# `Join` still comes first, and it needs a gradient. But on CUDA that gradient may still be on its
# way: its copy from the other device is queued on a stream of its own. torchgpipe lets the stream
# that computes wait for the copy between `Recompute` and `Checkpoint`, and not before `Recompute`.
#
# <details><summary><b>Question.</b> <code>Recompute</code> returns a gradient for the phony alone.
# Why is it not enough to give it <code>h</code> and return nothing?</summary>
#
# *Answer.* A node runs in a backward only if a gradient is on its way to it. The edge from `Join`
# to `Recompute`, and the one from `Recompute` to `Fork`, are the phony's. Without them nothing
# asks for `Recompute`, and nothing makes `Checkpoint` wait.
# </details>

# %% [markdown]
# ## 5. How does `use_reentrant=False` work?
#
# It makes no node for the part, and runs no backward inside a backward. The first forward runs
# *with* gradients and makes an ordinary graph. Only what the graph saves is replaced. The hooks of
# part 1 do it: `pack` puts an empty *holder* in the place of each saved tensor. When the backward
# asks for the first of them, `unpack` runs the part again. In this second forward other hooks see
# the same tensors come by in the same order, and fill the holders.
#
# Here it is in some twenty lines.


# %%
class Holder:
    """Stands in the graph where a saved tensor would be."""


class SaveInput(torch.autograd.Function):
    @staticmethod
    def forward(ctx, phony, h):
        ctx.save_for_backward(h)
        return phony.clone()  # nobody needs it; the node that keeps h is what we are after


class EverythingIsBack(Exception):  # noqa: N818
    pass


def checkpoint_by_hooks(f, h):
    saver = SaveInput.apply(torch.empty(0, requires_grad=True), h).grad_fn
    holders, again = [], weakref.WeakKeyDictionary()

    def pack(tensor):
        holder = Holder()
        holders.append(weakref.ref(holder))
        return holder

    def unpack(holder):
        if holder not in again:
            run_again()
        return again.pop(holder)

    def run_again():
        (h,), empty = saver.saved_tensors, list(holders)

        def fill(tensor):
            holder, tensor = empty.pop(0)(), tensor.detach()
            if holder is not None:  # its node may be gone
                again[holder] = tensor
            if not empty:
                raise EverythingIsBack
            return tensor

        hooks = saved_tensors_hooks(fill, lambda tensor: tensor)
        with torch.enable_grad(), hooks, suppress(EverythingIsBack):
            f(h)

    with saved_tensors_hooks(pack, unpack):
        return f(h)


def hooked(h):
    for first in range(0, DEPTH, 4):
        h = checkpoint_by_hooks(part(first, first + 4), h)
    return h


log.clear()
grads, by_hooks = measured(hooked)
assert all(torch.equal(mine, plain) for mine, plain in zip(grads, expected, strict=True))
table(
    [[i + 1, first, with_grad] for i, (first, with_grad) in enumerate(log)],
    ["run", "part that begins at layer", "with grad"],
)
print(f"peak: {by_hooks:.1f} activations; with reentrance {peak:.1f}; plain {whole:.1f}")
assert [with_grad for _, with_grad in log] == [True] * 8
assert abs(by_hooks - peak) < 1.5

# %% [markdown]
# Both forwards run with gradients. Three differences to the reentrant kind follow from that.
#
# - There is no phony problem: the first layer's weights are in the graph, so they get gradients
#   although `data` needs none.
# - `torch.autograd.grad` works, since there is only one backward.
# - The second forward can end early.
#
# The `detach()` in `fill` matters here, too. `tanh` saves its own result. Without `detach()` the
# result would hold its node and the node the result, and nobody would free either.

# %%
weight.grad = None
checkpoint_by_hooks(part(0, 4), data).sum().backward()
assert torch.equal(weight.grad, mine_of_layer_0)
(grad_of_x,) = torch.autograd.grad(checkpoint_by_hooks(part(0, 4), x).sum(), x)
assert torch.equal(grad_of_x, torch.autograd.grad(plain(x, 4).sum(), x)[0])

# %% [markdown]
# ### What is early stop?
#
# The second forward is there to fill the holders. When the last one is full, the rest of `f` is of
# no use. `fill` ends it by raising an exception. How much is left out depends on what comes last. A
# product saves its factors *before* it runs, so a product at the end does not run again. `tanh`
# saves its result, so it has to run. torch does the same; `early_stop=False` switches it off.


# %%
class Names(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func._schema.name.removeprefix("aten::"))
        return func(*args, **(kwargs or {}))


def ends_with_product(h):
    return (h @ layers[0][0].weight).tanh() @ layers[1][0].weight


def ends_with_tanh(h):
    return ((h @ layers[0][0].weight) @ layers[1][0].weight).tanh()


def products_of(checkpoint, f):
    """How many products a forward and a backward of f run."""
    with Names() as mode:
        checkpoint(f, x).sum().backward()
    return mode.names.count("mm")


ways = {
    "no checkpoint": lambda f, h: f(h),
    "reentrant, ours": checkpoint,
    "hooks, ours": checkpoint_by_hooks,
    "hooks, torch's": lambda f, h: torch_checkpoint(f, h, use_reentrant=False),
    "the same, `early_stop=False`": lambda f, h: torch_checkpoint(
        f, h, use_reentrant=False, early_stop=False
    ),
}
counted = {
    name: [products_of(way, f) for f in (ends_with_product, ends_with_tanh)]
    for name, way in ways.items()
}
table(
    [(name, *counts) for name, counts in counted.items()],
    ["products that ran", "a product at the end", "tanh at the end"],
)
once = counted["no checkpoint"][0]
assert counted["reentrant, ours"] == [once + 2, once + 2]
assert counted["hooks, ours"] == counted["hooks, torch's"] == [once + 1, once + 2]
assert counted["the same, `early_stop=False`"] == [once + 2, once + 2]

# %% [markdown]
# <details><summary><b>Question.</b> What if the second forward saves other tensors than the
# first?</summary>
#
# *Answer.* Holders are filled by their place in the order, so some would be filled with the wrong
# tensor. Ours does not notice. torch's compares shape, dtype and device of each, and the number of
# all, and raises a `CheckpointError`. It cannot see that the numbers in a tensor are others.
# </details>

# %% [markdown]
# ## 6. Nested checkpoints
#
# A part may itself be a chain of checkpoints. How often does a layer run then? For the reentrant
# kind it is simple. In a part's first forward there are no gradients, so the checkpoints inside it
# save nothing. In its second forward each of them saves its input, and runs once more later. So a
# layer inside `d` checkpoints runs `1 + d` times. We halve the chain down to single layers.


# %%
runs = {}


def halves(first, last, checkpoint=checkpoint):
    """Layers first to last - 1: two halves, each in a checkpoint, down to one layer."""

    def run(h):
        if last - first == 1:
            runs[first] = runs.get(first, 0) + 1
            return layers[first % DEPTH](h)
        middle = (first + last) // 2
        h = checkpoint(halves(first, middle, checkpoint), h)
        return checkpoint(halves(middle, last, checkpoint), h)

    return run


def parts_of(k, depth):
    """A chain of so many layers, in k parts."""

    def run(h):
        for first in range(0, depth, depth // k):
            h = checkpoint(part(first, first + depth // k), h)
        return h

    return run


rows = []
for depth in (16, 64, 256):
    runs.clear(), log.clear()
    grads, tree = measured(halves(0, depth))
    if depth == DEPTH:
        assert all(torch.equal(mine, plain) for mine, plain in zip(grads, expected, strict=True))
    parts = int(depth**0.5)
    _, flat = measured(parts_of(parts, depth))
    rows.append([depth, len(log) // parts, f"{flat:.1f}", max(runs.values()), f"{tree:.1f}"])
    assert set(runs.values()) == {1 + int(depth).bit_length() - 1}  # 1 + log2(depth)
table(rows, ["layers", "sqrt(n) parts: forwards", "their peak", "tree: forwards", "its peak"])
trees = [float(row[4]) for row in rows]
assert all(
    abs(more - less - 4) < 0.2 for less, more in itertools.pairwise(trees)
)  # two for each doubling
assert trees[2] < 0.6 * float(rows[2][2])

# %% [markdown]
# When the chain is twice as long, the tree nests one deeper. That costs one more
# forward and two activations: the input of a checkpoint, and the result of its second forward. The
# peak of `sqrt(n)` parts about doubles when the chain is four times as long. At 16 layers the tree
# gains nothing yet. Chen et al. give both schemes.
#
# ### How often does a layer run with hooks?
#
# For the kind with hooks `1 + d` is wrong. We count, for each layer of a tree over 16.

# %%
counts = {}
for name in ("reentrant, ours", "hooks, ours", "hooks, torch's", "the same, `early_stop=False`"):
    runs.clear()
    grads, _ = measured(halves(0, DEPTH, ways[name]))
    assert all(torch.equal(mine, plain) for mine, plain in zip(grads, expected, strict=True))
    counts[name] = [runs[layer] for layer in range(DEPTH)]
table(
    [(name, *found, f"{sum(found) / DEPTH:.1f}") for name, found in counts.items()],
    ["layer", *range(DEPTH), "mean"],
)
assert set(counts["reentrant, ours"]) == set(counts["the same, `early_stop=False`"]) == {5}
assert counts["hooks, ours"] == counts["hooks, torch's"]
lefts = [f"{layer:04b}"[1:].count("0") for layer in range(DEPTH)]
assert counts["hooks, ours"] == [2 + left for left in lefts]

# %% [markdown]
# It is early stop that changes the count. What a part saves last is the *input of its last
# checkpoint*: what is saved inside that one is hidden from the part. When this input is back, the
# second forward ends, and the right half does not run. So a layer runs
#
# - once in the forward,
# - once when its own checkpoint is filled,
# - and once more for each checkpoint around it of which it lies in the *left* half.
#
# For a tree over `n` layers that is `2 + (log2(n) - 1) / 2` on average, where the reentrant kind
# has `1 + log2(n)`. Without early stop both count the same.
#
# <details><summary><b>Question.</b> Why does <code>checkpoint_by_hooks</code> save its input in a
# node, and not simply in a variable?</summary>
#
# *Answer.* Because of the hooks around. What a node saves is packed, so a checkpoint around this
# one can put a holder in its place, and have it recomputed. A variable would keep the input alive,
# that of each layer in the tree, and nesting would save nothing.
# </details>
#
# ## 7. Random numbers and BatchNorm
#
# A second run is the same function only if it sees the same surroundings. A dropout draws other
# numbers the second time. The gradient is then that of another network.

# %%
drop = nn.Dropout(0.5)
torch.manual_seed(1)
x.grad = None
y = checkpoint(drop, x)
y.sum().backward()
used, derived = y.detach() != 0, x.grad != 0
print(f"{(used != derived).float().mean():.0%} of the elements have the gradient of another mask")
assert 0.4 < (used != derived).float().mean() < 0.6


# %%
def same_numbers(f):
    """f, drawing in each run what it drew in the first."""
    states = []

    def run(h):
        if not states:  # the first run draws from the generator, and moves it on
            states.append(torch.get_rng_state())
            return f(h)
        with torch.random.fork_rng():  # afterwards the generator is where it was
            torch.set_rng_state(states[0])
            return f(h)

    return run


x.grad = None
y = checkpoint(same_numbers(drop), x)
y.sum().backward()
assert torch.equal(y.detach() != 0, x.grad != 0)
assert not torch.equal(checkpoint(same_numbers(drop), x) != 0, y != 0)  # the next draws others

# %% [markdown]
# torch does the same for its global generators, by default (`preserve_rng_state=True`). It does not
# know of a generator of the program's own.
#
# BatchNorm is another case. It *writes*: each forward moves its running statistics. So two forwards
# move them twice.


# %%
def generator_is_safe(checkpoint):
    own = torch.Generator()

    def masked(h):
        return (h * (torch.rand(h.shape, generator=own) < 0.5)).exp().sum()

    results = []
    for way in (lambda f, h: f(h), checkpoint):
        own.manual_seed(1)
        results.append(torch.autograd.grad(way(masked, x), x)[0])
    return torch.equal(*results)


def batches_counted(checkpoint):
    norm = nn.BatchNorm1d(WIDTH)
    torch.autograd.grad(checkpoint(norm, x).sum(), x)
    return int(norm.num_batches_tracked)


def non_reentrant(f, h):
    return torch_checkpoint(f, h, use_reentrant=False)


found = [
    [name, batches_counted(way), generator_is_safe(way)]
    for name, way in [
        ("no checkpoint", lambda f, h: f(h)),
        ("torch.utils.checkpoint", non_reentrant),
        ("rematfn.checkpoint", rematfn.checkpoint),
    ]
]
table(found, ["", "batches that BatchNorm has counted", "own generator is exact"])
assert [row[1:] for row in found] == [[1, True], [2, False], [1, True]]

# %% [markdown]
# rematfn does not run the *function* again. It replays single *operators* from a record, each with
# the generator state that it had, and a write that has been done is not done twice. Notebook 4
# takes such a record apart. A note in the core lists what is put back for a replay:

# %%
quote(
    "csrc/operators/call.h",
    "Note [Replay restores what a kernel can see]",
    "runs below everything that interprets",
)

# %% [markdown]
# ### What does fairscale's patch of BatchNorm do?
#
# fairscale's `checkpoint_wrapper` calls `patch_batchnorm`
# ([checkpoint_utils.py](https://github.com/facebookresearch/fairscale/blob/main/fairscale/nn/checkpoint/checkpoint_utils.py)).
# It puts two hooks on each BatchNorm in the module. While *gradients are off*, they switch
# `track_running_stats` off for the length of the call. So it does not suppress the second update.
# It suppresses the first, and moves the update into the backward. Let us do the same, and see
# where that leads.


# %%
def patched(norm):
    def before(norm, args):
        if not torch.is_grad_enabled():
            norm.tracked, norm.track_running_stats = norm.track_running_stats, False

    def after(norm, args, result):
        if not torch.is_grad_enabled():
            norm.track_running_stats = norm.tracked

    norm.register_forward_pre_hook(before)
    norm.register_forward_hook(after)
    return norm


def without_backward(norm, x):
    checkpoint(norm, x)


def without_gradients(norm, x):
    with torch.no_grad():
        norm(x)


uses = {
    "reentrant checkpoint": lambda norm, x: checkpoint(norm, x).sum().backward(),
    "checkpoint by hooks": lambda norm, x: checkpoint_by_hooks(norm, x).sum().backward(),
    "reentrant checkpoint, and no backward": without_backward,
    "no checkpoint, under `no_grad`": without_gradients,
}


def counted_by(norm, use):
    use(norm, x)
    return int(norm.num_batches_tracked)


found = {
    name: [counted_by(wrap(nn.BatchNorm1d(WIDTH)), use) for wrap in (lambda n: n, patched)]
    for name, use in uses.items()
}
table(
    [(name, *counts) for name, counts in found.items()],
    ["one batch, in training", "counted by BatchNorm", "with the patch"],
)
assert list(found.values()) == [[2, 1], [2, 2], [1, 0], [1, 0]]

# %% [markdown]
# The first row is what the patch is for. The others are its limits. The kind with hooks runs both
# forwards with gradients, so the patch does nothing. A batch whose backward never comes is not
# counted. And a forward in training mode under `no_grad`, such as one that is only there to collect
# statistics, collects none.
#
# <details><summary><b>Question.</b> The statistics of BatchNorm are not read by the backward of a
# network in training. What is wrong with moving them twice?</summary>
#
# *Answer.* The gradients are right, and evaluation is not: the running mean is another than
# without the checkpoint, as if each batch had come twice. Such a difference stays unnoticed until
# the network is used.
# </details>

# %% [markdown]
# ## 8. The square root of n
#
# How many parts? With `k` parts of a chain of `n` layers there are `k` inputs, and inside one part
# `n / k` activations. The sum `k + n / k` is least for `k = sqrt(n)`, where it is `2 sqrt(n)`. We
# measure it. (The measured peak holds a constant besides, for what a backward works with.)

# %%
LONG = 64
counts = [1, 2, 4, 8, 16, 32, 64]
peaks = [measured(parts_of(k, LONG))[1] for k in counts]
_, whole = measured(lambda h: plain(h, LONG))
# Alt: Peak in activations by the number of parts of a chain of 64 layers. The measured curve lies
# a little above k + n / k. Both fall to eight parts and rise after that; the line without
# checkpoints is far above.
figure, axes = plt.subplots(figsize=(6, 3.4))
axes.plot(counts, peaks, "o-", color="#0072B2", label="measured, with checkpoints")
axes.plot(counts, [k + LONG / k for k in counts], "--", color="#D55E00", label="k + n / k")
axes.axhline(whole, color="#555555", linewidth=1, linestyle=":", label="without checkpoints")
axes.set_xscale("log", base=2)
axes.set_xticks(counts, [str(k) for k in counts])
axes.set_ylim(0)
axes.set(xlabel=f"parts, of a chain of {LONG} layers", ylabel="peak, activations")
axes.legend(frameon=False, fontsize=8)
figure.tight_layout()
plt.show()
best = counts[peaks.index(min(peaks))]
print(f"least at {best} parts; sqrt({LONG}) is {LONG**0.5:.0f}")
assert best == 8 and min(peaks) < 0.5 * whole

# %% [markdown]
# `checkpoint_sequential(layers, 8, x, use_reentrant=False)` of torch places the parts in this way.
# (It warns if `use_reentrant` is left out.) The rule holds for a chain whose layers are alike. If
# layers differ in size, or a skip goes around many of them, someone has to choose the parts. What
# we want to say is a *budget* in bytes, and `rematfn.remat(f, budget)` takes one.
#
# ## 9. When is checkpointing worth it?
#
# A checkpoint around a piece of the network frees what the piece saves, except for its input, and
# pays with the FLOPs of the piece. So measure both. The hooks of part 1 tell the bytes.
# `FlopCounterMode` counts the FLOPs of products and convolutions. It leaves out all other
# operators, so we add one FLOP for each number that those make.


# %%
class Work(TorchDispatchMode):
    """One FLOP for each number that is made by an operator that is no product."""

    def __init__(self):
        super().__init__()
        self.flops = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if not any(word in func._schema.name for word in ("mm", "conv")) and not func.is_view:
            self.flops += sum(t.numel() for t in tree_leaves(result) if isinstance(t, torch.Tensor))
        return result


def address(tensor):
    return tensor.untyped_storage().data_ptr()


def saved_and_flops(piece, h):
    """The bytes that a piece saves besides its input and weights, and its FLOPs."""
    h, saved = h.detach().requires_grad_(), {}

    def pack(tensor):
        saved[address(tensor)] = tensor.untyped_storage().nbytes()
        return tensor

    hooks = saved_tensors_hooks(pack, lambda tensor: tensor)
    with FlopCounterMode(display=False) as products, Work() as work, hooks:
        out = piece(h)  # alive, so that no address is used twice
    weights = piece.parameters() if isinstance(piece, nn.Module) else ()
    for there_anyway in (h, *weights):
        saved.pop(address(there_anyway), None)
    return sum(saved.values()), products.get_total_flops() + work.flops, out


def attention(q):
    return F.dropout((q @ q.mT).softmax(-1), 0.1) @ q


def mlp(width):
    return nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))


pieces = {
    "a linear layer, 64 to 64": (nn.Linear(64, 64), (2048, 64)),
    "GELU": (nn.GELU(), (2048, 64)),
    "dropout, GELU, layer norm": (
        nn.Sequential(nn.Dropout(0.1), nn.GELU(), nn.LayerNorm(64)),
        (2048, 64),
    ),
    "attention, heads of 16": (attention, (16, 512, 16)),
    "attention, heads of 64": (attention, (4, 512, 64)),
    "convolution, batch norm, ReLU": (
        nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()),
        (4, 16, 32, 32),
    ),
    "MLP of width 64": (mlp(64), (2048, 64)),
    "MLP of width 256": (mlp(256), (2048, 256)),
}
rows, price = [], {}
for name, (piece, shape) in pieces.items():
    nbytes, flops, _ = saved_and_flops(piece, torch.randn(shape))
    price[name] = 1000 * nbytes / flops
    rows.append((name, nbytes >> 10, f"{flops / 1e6:.1f}", f"{price[name]:.0f}"))
table(rows, ["piece", "frees, KiB", "MFLOP to run again", "bytes for 1000 FLOPs"])
assert price["a linear layer, 64 to 64"] == price["GELU"] == 0
assert price["attention, heads of 16"] > 2 * price["attention, heads of 64"]
assert price["MLP of width 64"] > 3 * price["MLP of width 256"]
assert max(price.values()) == price["dropout, GELU, layer norm"]

# %% [markdown]
# Look at the last column: the more bytes for 1000 FLOPs, the better.
#
# - **A single layer that saves only its input** frees nothing. The checkpoint keeps that input too.
# - **Elementwise operators** are cheap: about one FLOP for each number of four bytes.
# - **Products** cost `2 k` FLOPs for each number that they make, where `k` is the length of the
#   sum. The wider the layer, the worse the bargain. So small heads and narrow layers come first,
#   and products of wide layers last.
#
# *Selective* checkpointing follows from this: keep what wide products make, and run the rest
# again. Korthikanti et al. ([arXiv:2205.05198](https://arxiv.org/abs/2205.05198)) do that for the
# inside of attention. For GPT-3 they report 70 % of the memory of activations for 2.7 % more
# FLOPs.
#
# And if all of the network is in checkpoints? A backward does two products for each of the forward,
# so a second forward makes three into four.

# %%
flops = {}
for name, network in {"plain": plain, "four parts": checkpointed, "by hooks": hooked}.items():
    with FlopCounterMode(display=False) as counter:
        step(network)
    flops[name] = counter.get_total_flops()
table(
    [(name, f"{count / flops['plain']:.2f}") for name, count in flops.items()],
    ["network", "FLOPs of products in a step, ratio"],
)
assert flops["four parts"] / flops["plain"] == flops["by hooks"] / flops["plain"] == 4 / 3

# %% [markdown]
# So checkpointing everything costs at most a third more arithmetic. It is worth it if the bytes of
# *activations* are what does not fit, and if the room is used. That may be for a larger batch, a
# longer sequence, a larger network, or a smaller GPU. It is not
#
# - if the step fits anyway. Then it is only slower;
# - if the peak is elsewhere: weights and the optimiser's state, which no checkpoint makes smaller,
#   or a loss over a large vocabulary. Measure where the peak is first;
# - for the last part, as we saw in part 2.
#
# ## 10. Why it is refused under torch.func.grad
#
# Neither kind works under `torch.func`:


# %%
def small(h):
    return (h @ layers[0][0].weight).tanh().sum()


point = data[:4]
refusals = []
for reentrant in (False, True):
    try:
        wrapped = functools.partial(torch_checkpoint, small, use_reentrant=reentrant)
        torch.func.grad(wrapped)(point)
        raise AssertionError("it was not refused")
    except RuntimeError as error:
        refusals.append(str(error))
        print(f"use_reentrant={reentrant}: {str(error)[:88]} ...")
assert "don't yet support saved tensor hooks" in refusals[0]
assert "setup_context" in refusals[1]

# %% [markdown]
# **Without reentrance**, hooks are switched off while `torch.func.grad` runs. Why?
# `torch.func.grad` is a *level*: inside it a tensor is a wrapper around another one, and the
# wrapper is valid only while the level runs (notebook 2). The hooks would keep a wrapper as the
# input, and run the function on it in the backward. We switch them on again, against torch's will,
# to see what comes of it:


# %%
def forced(h):
    torch._C._autograd._saved_tensors_hooks_enable()
    return torch_checkpoint(small, h, use_reentrant=False)


def twice(f):
    return torch.func.grad(lambda h: torch.func.grad(f)(h).square().sum())(point)


assert torch.equal(torch.func.grad(forced)(point), torch.func.grad(small)(point))
print("second derivative:", f"{twice(forced).norm():.1f}, should be {twice(small).norm():.1f}")
assert not twice(forced).any() and twice(small).any()
try:
    torch.func.vjp(forced, point)[1](torch.tensor(1.0))
    raise AssertionError("it was not refused")
except torch_source.CheckpointError as error:
    print("vjp:", str(error).split(". ")[0].splitlines()[0])

# %% [markdown]
# A first derivative happens to be right. A second is zero, without an error: what the hooks hand
# back is detached, and to the outer level a constant. And the function that `vjp` returns runs when
# the level is over. Its wrapper is dead, and nothing is differentiated with respect to it. So the
# second run saves fewer tensors than the first.
#
# **With reentrance**, a `Function` under a transform must have a `setup_context`, apart from its
# forward. torch's has none, nor has ours. That could be added, but its `backward` calls
# `torch.autograd.backward`, which torch refuses inside a transform.
#
# Both work *above* the transforms, and run *Python* again. rematfn stands below: when an operator
# comes to it, the levels of `torch.func` have unwrapped its tensors already. It drops a plain
# tensor, and replays an operator.

# %%
mine = torch.func.grad(lambda h: rematfn.checkpoint(small, h))(point)
assert torch.equal(mine, torch.func.grad(small)(point))
second = torch.func.hessian(lambda h: rematfn.checkpoint(small, h))(point[0])
assert torch.equal(second, torch.func.hessian(small)(point[0]))

# %% [markdown]
# Last, the chain of 64 layers with a budget, and no parts placed by hand. The budget is the peak of
# the 8 parts. Both peaks are counted at the allocator.

# %%
budget = int(min(peaks) * ACTIVATION)
bounded = rematfn.remat(lambda h: plain(h, LONG).square().mean(), budget)
step(bounded)  # the first call is recorded, the second is guided by the record
grads, bounded_peak = measured(bounded)
stats = rematfn.stats(bounded)
reference, _ = measured(lambda h: plain(h, LONG))
assert all(torch.equal(mine, plain) for mine, plain in zip(grads, reference, strict=True))
assert stats.peak_bytes <= budget
table(
    [
        ["8 parts by hand", f"{min(peaks):.1f}", f"{2 * LONG} operators, the whole forward"],
        [
            "remat",
            f"{bounded_peak:.1f}",
            f"{stats.replays} operators, {stats.replayed_cost:.0%} of the step's cost",
        ],
    ],
    ["", "peak, activations", "computed again"],
)
assert bounded_peak <= min(peaks)

# %% [markdown]
# <details><summary><b>Question.</b> <code>checkpoint</code> keeps what crosses its border, always.
# What must be known to choose better?</summary>
#
# *Answer.* What each value costs to recompute, how many bytes it frees, and when it will be read.
# [Notebook 6](06_choosing_a_victim.ipynb) is about this choice.
# </details>
