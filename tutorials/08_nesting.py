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
# # 8. Nesting
#
# `grad(remat(f))` and `remat(grad(f))` should both work, and a `vmap` between them should not hurt.
# At the end of this notebook you know why the obvious design fails at one of the two, and what each
# order means. You have also run three programs that people give up on: per-sample gradients, a
# Hessian-vector product, and a gradient through a training loop that does not fit into memory.
#
# You need to know that a transform is a function from functions to functions, and that a *level* is
# one active application of a transform (notebook 2). To *evict* a version, the contents of a
# storage, is to give up its bytes; to *replay* is to run the recorded operation again (notebook 4).

# %%
# SPDX-License-Identifier: Apache-2.0
import itertools
import subprocess
import sys
import tracemalloc
import weakref

import matplotlib.pyplot as plt
import numpy as np
import torch
import toy
from show import quote, table
from torch.func import functional_call, grad, jvp, vmap
from torch.utils._pytree import tree_leaves
from toy import operators as ops
from toy.dispatcher import Key, fallbacks
from toy.levels import Level, Wrapper, active, thread

import rematfn

torch.manual_seed(0)


def same_bits(a, b):
    return all(torch.equal(x, y) for x, y in zip(tree_leaves(a), tree_leaves(b), strict=True))


# %% [markdown]
# ## 1. The obvious design
#
# We take the toy of notebook 2: a dispatcher, a stack of levels, and `grad`. An operator goes to
# the innermost level. The level does its part and calls the operator again, on what is inside of
# its wrappers, which brings it to the level around. At the bottom NumPy computes.
#
# The obvious design makes `remat` one more level of this kind. It wraps each result. A wrapper
# knows how its value was made, so the value can be dropped. The level keeps the values of the last
# few wrappers, as many as it has `slots`, and replays the others when they are read.


# %%
class Above(Level):
    """remat as a level that wraps, like those of grad and vmap."""

    key = Key.ABOVE

    def __init__(self, slots):
        self.slots = slots
        self.full = []  # wrappers that have their value, the oldest first; weak references

    def fill(self, wrapper):
        op, args = wrapper.made_by
        wrapper.value = op(*(self.value_of(arg) for arg in args))
        self.full = [r for r in self.full if r() is not None] + [weakref.ref(wrapper)]
        while len(self.full) > self.slots:
            self.full.pop(0)().value = None  # evicted

    def value_of(self, arg):
        if not self.owns(arg):
            return arg
        if arg.value is None:
            self.fill(arg)  # a replay
        return arg.value


def at_above(op, keys, args):
    level, thread.in_charge = thread.in_charge, None
    result = Wrapper(level, None, shape=())
    result.made_by = op, args
    level.fill(result)
    result.shape = result.value.shape
    return result


fallbacks[Key.ABOVE] = at_above


def obvious_remat(f, slots):
    def g(x):
        level = Above(slots)
        with active(*thread.stack, level):  # one level among the others
            result = f(x)
        return level.value_of(result)  # what leaves is no wrapper of ours

    return g


# %% [markdown]
# Now both orders, on a chain of 24 sines with 8 slots. `tracemalloc` tells what NumPy has allocated
# at most. We divide it by the bytes of one array.


# %%
def toy_sines(x):
    for _ in range(24):
        x = ops.sin(x)
    return x.sum()


toy_x = toy.Array(np.linspace(0, 1, 1 << 14))


def arrays_alive(f):
    """The result of f, and the most arrays that were alive at once."""
    tracemalloc.start()
    try:
        result = f(toy_x).data
        return result, tracemalloc.get_traced_memory()[1] / toy_x.nbytes
    finally:
        tracemalloc.stop()


toy_gradient, all_of_it = arrays_alive(toy.grad(toy_sines))


def compare_orders(orders, title):
    rows = [("grad(f)", f"{all_of_it:.0f}")]
    peaks = []
    for name, f in orders.items():
        found, peak = arrays_alive(f)
        assert np.array_equal(found, toy_gradient)
        rows.append((name, f"{peak:.0f}"))
        peaks.append(peak)
    table(rows, [title, "most arrays alive"])
    return peaks


of_grad, of_f = compare_orders(
    {
        "remat(grad(f))": obvious_remat(toy.grad(toy_sines), 8),
        "grad(remat(f))": toy.grad(obvious_remat(toy_sines, 8)),
    },
    "obvious design",
)
assert of_grad < 16 < 0.9 * all_of_it < of_f

# %% [markdown]
# Both are right, and only one of them saves anything. (The gradient, and what the running operator
# reads and makes, come on top of the 8 slots.) Why only one? In `grad(remat(f))` the level of
# `remat` is innermost. An operator comes to it first, and goes on to `grad`. There a node saves its
# input: an array. The wrapper that `remat` empties held one reference to that array; the node holds
# another, and nobody asks the node to give it up.
#
# ```text
#   remat(grad(f))                          grad(remat(f))
#
#   operator                                operator
#      |                                       |
#   [ grad ]  nodes save wrappers           [ remat ]  its wrappers hold grad's wrappers
#      |                                       |
#   [ remat ] these can be emptied          [ grad ]   nodes save arrays: nobody
#      |                                       |       can evict them
#   NumPy                                   NumPy
# ```
#
# Whatever is built as a mode or a wrapper above autograd has this trouble: autograd's own
# references keep the bytes. That is why `torch.utils.checkpoint` hooks into what autograd saves.
# And `torch.func.grad` refuses such hooks (notebook 3).
#
# **Question.** `grad(remat(f))` needed no fewer arrays than `grad(f)`. Can it need more?
#
# <details><summary>Answer</summary>
#
# Yes. A value that was evicted is replayed through `grad`: the replay is one more operator with a
# node, and one more saved input. Each replay makes the graph longer. Here it does not show: inside
# of `f` each value is read only by the next operator, before it can go, so nothing is replayed.
# </details>
#
# ## 2. Below everything
#
# The fix is not to forbid an order. The place of `remat` in the stack should not depend on its
# place in the expression. What has to be evictable is *the innermost tensor*, whatever is wrapped
# around it. So remat's level gets a key of its own, below those of all other levels, and wraps
# nothing. This is the toy's `remat`. Its budget is a number of bytes. At its key stands one boxed
# fallback:

# %%
quote("tutorials/toy/remat.py", "def at_remat(", "return op.redispatch")

# %% [markdown]
# `run` takes the operator on the journey that notebooks 4 and 5 tell of. Two things follow from
# this place. First, the backward of `grad(remat(f))` runs when `remat`'s call is over and its level
# is off the stack. What was saved still belongs to it. So each node has noted the stack of levels,
# and the backward puts it back for this node. Second, what leaves must be an ordinary array again,
# and is sealed (notebook 5). That goes for the result of `f`, through the wrappers around it, and
# for the gradient, which leaves later.

# %%
budget = 8 * toy_x.nbytes
peaks = compare_orders(
    {
        "remat(grad(f))": toy.remat(toy.grad(toy_sines), budget),
        "grad(remat(f))": toy.grad(toy.remat(toy_sines, budget)),
    },
    "below everything",
)
assert max(peaks) < 12

# %% [markdown]
# rematfn is built like this. Operators come to its levels by a dispatch key that stands below
# functorch and below autograd, and above the kernels (notebook 5). A tensor of a level is the
# kernel's own tensor with that key, and it is this tensor that autograd and functorch wrap and
# save. Here is the same table from the library: 24 sines of 1 MiB, in 8 MiB. `MemoryTimeline`
# counts at the allocator; the function's results are left out.


# %%
def real_sines(x):
    for _ in range(24):
        x = x.sin()
    return x.sum()


def timeline_of(f, *args):
    with rematfn.testing.MemoryTimeline() as timeline:
        result = f(*args)
    return result, timeline


x = torch.rand(1 << 18)
expected, whole = timeline_of(grad(real_sines), x)
rows = [("grad(f)", f"{whole.peak_excluding_survivors / 2**20:.1f} MiB")]
for name, f in {
    "remat(grad(f))": rematfn.remat(grad(real_sines), "8MiB"),
    "grad(remat(f))": grad(rematfn.remat(real_sines, "8MiB")),
}.items():
    got, timeline = timeline_of(f, x)
    assert same_bits(got, expected)
    beyond = timeline.peak_excluding_survivors - (8 << 20)
    assert beyond <= {"remat(grad(f))": 0, "grad(remat(f))": 8}[name]
    rows.append((name, f"{timeline.peak_excluding_survivors / 2**20:.1f} MiB"))
table(rows, ["", "peak"])

# %% [markdown]
# (Without a budget it is 69 MiB and not 24, since `torch.func.grad` keeps what a second derivative
# would need. In `grad(remat(f))` the allocator sees eight bytes more than the budget: the loss and
# the gradient that the backward begins with are `grad`'s, not `f`'s.)
#
# In C++ no node notes the stack: a level is found by the handles of the arguments (notebook 5). But
# then it has to be there as long as somebody can ask for it.

# %%
quote("csrc/levels/level.h", "// Note [Why the backward finds its", "nobody is running")

# %% [markdown]
# The toy's `grad` tells when a gradient leaves. Autograd knows nothing of levels: the hooks that
# find its gradients are in notebook 5, part 6.
#
# ### So what does the order mean?
#
# It means *how much of the program the budget covers*. How the levels work is the same.
#
# - `remat(grad(f))`: everything from the call to the return. All gradients count until they are
#   returned.
# - `grad(remat(f))`: what `f` makes, and what its backward makes of that. A gradient is the
#   caller's from the moment that it is complete. What `grad` does around `f` does not count.
#
# **Question.** A training step ends with `optimiser.step()`. Which order bounds the memory of
# Adam's temporary tensors?
#
# <details><summary>Answer</summary>
#
# Neither of the two: the optimiser runs outside of both. `remat(step)`, where `step` is forward,
# backward and update, bounds them too.
# </details>
#
# ## 3. Everything in between
#
# If a level sees innermost tensors only, then it does not matter what is stacked above it: `vmap`,
# `jvp`, several `grad`s. Under `vmap`, for instance, the innermost tensor has the whole batch. So a
# level sees the operators of one sample, each with the bytes of all of them.

# %%
one = rematfn.record(grad(real_sines), torch.rand(1000))
batched = rematfn.record(vmap(grad(real_sines)), torch.rand(64, 1000))
print(one, batched, sep="\n")
assert batched.operators == one.operators
assert batched.peak_bytes == 64 * one.peak_bytes

# %% [markdown]
# And it does not matter whether what is evicted is dropped or moved to a disk. That can be checked
# by trying them all. Call a sequence of transforms a word, such as `grad remat vmap` for
# `grad(remat(vmap(f)))`. Each word of up to three with a transform of rematfn in it is compared,
# bit for bit, with the same word without those. The policy evicts every version after every
# operator, so that each one that is read again has to come back.

# %%
everything = rematfn.testing.EvictEverything()
disk = rematfn.Disk()
TRANSFORMS = {
    "grad": lambda f: grad(lambda x: f(x).sum()),
    "jvp": lambda f: lambda x: jvp(f, (x,), (torch.ones_like(x),))[1],
    "vmap": vmap,
    "remat": lambda f: rematfn.remat(f, policy=everything),
    "offload": lambda f: rematfn.offload(f, "1MiB", to=disk, policy=everything),
}
OURS = ("remat", "offload")


def program(x):
    return (x.sin() * x.exp()).tanh() + x


def apply(word):
    f = program
    for name in reversed(word):
        f = TRANSFORMS[name](f)
    return f


cube = torch.randn(3, 3, 3)
words = [w for n in (1, 2, 3) for w in itertools.product(TRANSFORMS, repeat=n)]
words = [w for w in words if set(w) & set(OURS)]
results = {}
for word in words:
    plain = tuple(name for name in word if name not in OURS)
    results[word] = torch.equal(apply(word)(cube), apply(plain)(cube))
names = list(TRANSFORMS)
shown = {True: "same bits", False: "**differ**", None: ""}
rows = [(a, *(shown[results.get((a, b))] for b in names)) for a in names]
table(rows, ["outer transform", *(f"{b}(f)" for b in names)])
print(f"{sum(results.values())} of {len(words)} words of up to three have the same bits")
assert all(results.values())

# %% [markdown]
# ### Budgets inside of budgets
#
# Levels nest in each other, too. A version belongs to the innermost level that was active when it
# was made, and its bytes count in that one and in all around it. Whoever is short of room takes
# from its own versions first, and then from those of the levels inside.

# %%
weights = [torch.randn(128, 128) / 11 for _ in range(16)]
batch = torch.randn(1024, 128)


def block(weights, x):
    for w in weights:
        x = torch.tanh(x @ w)
    return x


inner = rematfn.remat(block, "3MiB")


def two_halves(weights):
    h = inner(weights[:8], batch)  # at most 3 MiB of what this makes
    return block(weights[8:], h).square().mean()


outer = rematfn.remat(grad(two_halves), "6MiB")  # at most 6 MiB in all
got = outer(weights)
inside, around = rematfn.stats(inner), rematfn.stats(outer)
levels = {"inner": inside, "outer": around}
rows = [(name, s.budget >> 20, f"{s.peak_bytes / 2**20:.1f}") for name, s in levels.items()]
table(rows, ["level", "budget, MiB", "peak, MiB"])
assert inside.peak_bytes <= 3 << 20
assert around.peak_bytes <= 6 << 20
assert same_bits(got, grad(lambda w: block(w, batch).square().mean())(weights))

# %% [markdown]
# ### `offload` around, and inside
#
# A *way* is how a version goes and comes back. It may take the ways of its own level and of all
# levels around it, the cheapest first. `remat` adds the way "drop it, and replay it"; `offload`
# adds "write it to the disk". So in `remat(offload(f))` and in `offload(remat(f))` the versions
# inside have both ways. What differs is again only what each budget covers.

# %%
objective = grad(lambda w: block(w, batch).square().mean())
expected = objective(weights)
rows = []
for name, transform in {
    "offload(g)": lambda g: rematfn.offload(g, "4MiB", to=disk),
    "remat(offload(g))": lambda g: rematfn.remat(rematfn.offload(g, "8MiB", to=disk), "4MiB"),
    "offload(remat(g))": lambda g: rematfn.offload(rematfn.remat(g, "8MiB"), "4MiB", to=disk),
    "remat(g, offload=disk)": lambda g: rematfn.remat(g, "4MiB", offload=disk),
}.items():
    f = transform(objective)
    got, timeline = timeline_of(f, weights)
    assert same_bits(got, expected)
    assert rematfn.stats(f).peak_bytes <= 4 << 20
    rows.append((name, "same bits", f"{rematfn.stats(f).peak_bytes / 2**20:.1f} MiB"))
table(rows, ["with g = grad(loss)", "result", "peak of the outer level"])

# %% [markdown]
# **Question.** Under `vmap` a level sees batched operators: one `sin` of 64 samples, and not 64 of
# one. What does that mean for a budget on `vmap(remat(f))`?
#
# <details><summary>Answer</summary>
#
# It covers all samples together. `f` is called once, with a batched tensor; its innermost tensors
# have all 64 samples in them. The budget is not multiplied by 64, and not divided either.
# </details>
#
# ## 4. Three programs that people give up on
#
# The picture below shows the bytes that are alive while each of the first two runs: grey without a
# budget, blue within one (the dotted line). The results do not count: they are the caller's.
#
# **Per-sample gradients** are `vmap(grad(loss))`: one gradient for each sample, as differential
# privacy and influence functions ask for them. All activations of all samples are alive at once,
# and the usual way out is to cut the batch into chunks by hand.
#
# **A Hessian-vector product** is `jvp(grad(loss))`: the forward, its backward, and a tangent for
# each result of both.

# %%
net = torch.nn.Sequential(
    torch.nn.Conv2d(1, 16, 3, padding=1),
    torch.nn.ReLU(),
    torch.nn.Conv2d(16, 16, 3, padding=1),
    torch.nn.ReLU(),
    torch.nn.AvgPool2d(2),
    torch.nn.Conv2d(16, 16, 3, padding=1),
    torch.nn.ReLU(),
    torch.nn.Flatten(),
    torch.nn.Linear(16 * 14 * 14, 10),
)
parameters = {name: p.detach() for name, p in net.named_parameters()}
images, labels = torch.randn(64, 1, 28, 28), torch.randint(10, (64,))


def loss_of_one(parameters, image, label):
    scores = functional_call(net, parameters, (image[None],))
    return torch.nn.functional.cross_entropy(scores, label[None])


def loss(weights):
    return block(weights, batch).square().mean()


def product_with_hessian(weights, vector):
    return jvp(grad(loss), (weights,), (vector,))[1]


stories = {
    "per-sample gradients": (
        vmap(grad(loss_of_one), in_dims=(None, 0, 0)),
        (parameters, images, labels),
        0.75,
    ),
    "Hessian-vector product": (
        product_with_hessian,
        (weights, [torch.randn_like(w) for w in weights]),
        0.3,
    ),
}
rows = []
# Alt: Megabytes alive during per-sample gradients and a Hessian-vector product. The grey curves,
# without a budget, rise above the dotted budget. The blue ones stay below it.
fig, axes = plt.subplots(1, 2, figsize=(8, 2.6))
for ax, (name, (f, args, share)) in zip(axes, stories.items(), strict=True):
    expected, free = timeline_of(f, *args)
    budget = int(share * free.peak_excluding_survivors)
    g = rematfn.remat(f, budget)
    g(*args)  # the first call is recorded, the next one guided
    got, bound = timeline_of(g, *args)
    assert same_bits(got, expected)
    assert rematfn.stats(g).peak_bytes <= budget
    for timeline, colour in ((free, "0.6"), (bound, "C0")):
        alive = torch.tensor(timeline.bytes_excluding_survivors) / 2**20
        ax.plot(torch.linspace(0, 1, len(alive)), alive, color=colour, lw=1)
    ax.axhline(budget / 2**20, color="C3", ls=":", lw=1)
    ax.set(title=name, xlabel="share of the allocator's events", ylabel="MiB alive")
    s = rematfn.stats(g)
    peaks = [f"{t.peak_excluding_survivors / 2**20:.1f}" for t in (free, bound)]
    rows.append((name, *peaks, f"{s.min_budget / 2**20:.1f}", f"{s.replayed_cost:.0%}"))
fig.tight_layout()
plt.show()
table(rows, ["", "peak, MiB", "with a budget", "needed by one operator", "replayed"])
for _, free, bound, _, _ in rows:
    assert float(bound) < 0.8 * float(free)

# %% [markdown]
# The blue curve does not cross its budget. No chunk size had to be found, and the bits are those
# of the whole batch. What it costs depends on the program. The network on the left is a few large
# convolutions, and one of them alone needs most of the budget: it pays much for little. The chain
# on the right pays next to nothing for most of its memory.
#
# **A gradient through a training loop.** Meta-learning, hyper-gradients and test-time training
# differentiate through inner steps: each step's graph stays alive until the outer backward has come
# to it. So memory grows with the number of steps, until it does not fit. Here is the gradient of a
# loss after 24 steps of training, by the learning rate of these steps (a *hyper-gradient*).
#
# To see it not fit we need a machine with less memory. This program is given 400 MiB on top of what
# Python and torch take: a hard limit of the operating system, in a process of its own.

# %%
PROGRAM = """
import resource, sys, torch, rematfn
from torch.func import grad

torch.manual_seed(0)

def inner_loss(weights, x, y):
    for w in weights:
        x = torch.tanh(x @ w)
    return (x - y).square().mean()

def after_training(rate, weights, x, y):
    for _ in range(24):
        gradients = grad(inner_loss)(weights, x, y)
        weights = [w - rate * g for w, g in zip(weights, gradients)]
    return inner_loss(weights, x, y)

weights = [torch.randn(64, 64) / 8 for _ in range(3)]
x, y = torch.randn(4096, 64), torch.randn(4096, 64)
hyper_gradient = grad(after_training)
if sys.argv[1] == "remat":
    hyper_gradient = rematfn.remat(hyper_gradient, "128MiB")

grad(inner_loss)(weights, x, y)  # what torch sets up on first use is not to be in the way
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
limit = int(status["VmSize"].split()[0]) * 1024 + int(sys.argv[2]) * 2**20
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
try:
    print(f"{hyper_gradient(torch.tensor(0.1), weights, x, y).item():.9g}")
except RuntimeError as error:
    print("not enough memory" if "allocate memory" in str(error) else error)
"""


def run(kind, room):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, kind, str(room)], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


rows = [
    ("grad(after_training)", "400 MiB", run("eager", 400)),
    ("remat(grad(after_training), 128 MiB)", "400 MiB", run("remat", 400)),
    ("grad(after_training)", "4 GiB", run("eager", 4096)),
]
table(rows, ["24 inner steps", "given", "the hyper-gradient"])
assert rows[0][2] == "not enough memory"
assert rows[1][2] == rows[2][2]

# %% [markdown]
# What did not fit runs, and gives the number that a larger machine gives. Nothing in the loop was
# changed. How far one can go is a matter of time and no longer of memory: the same program with 96
# steps runs in the same 128 MiB.
#
# **Question.** In `remat(grad(after_training))` there is a `grad` inside of `after_training` as
# well. Why do we not have to write `remat` there, too?
#
# <details><summary>Answer</summary>
#
# The outer level sees the innermost tensors of everything that runs during the call, whatever has
# wrapped them. The inner `grad`'s activations and gradients are among them. A level of its own
# inside would be needed only to bound one inner step by less than the whole.
# </details>
#
# ## Where to go on
#
# - [`docs/design/level.md`](../docs/design/level.md): where a level sits, what leaves it, and how
#   gradients are sealed.
# - [`docs/design/budget.md`](../docs/design/budget.md#what-counts): what counts, in each order of
#   nesting.
# - [`docs/design/offload.md`](../docs/design/offload.md#how-levels-nest): the ways of nested
#   levels.
#
# **Sources.** The stack of levels is functorch's, and JAX's before it; *autodidax* in JAX's
# documentation builds one. Capuchin, DTR and checkpointing are told of in notebooks 3, 4 and 7.
