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
# # 4. Lineage
#
# A program keeps more tensors than memory holds, and most of them could be computed again. So let a
# *level* watch the program, throw contents away when memory is short, and make them again when
# somebody reads them, with the same bits. The toy has such a level, `toy.remat`. At the end of this
# notebook you know how it works: `tutorials/toy/lineage.py` is the record, and
# `tutorials/toy/remat.py` decides what goes.
#
# The idea is that of *Dynamic Tensor Rematerialization* (Kirisame et al., ICLR 2021,
# [arXiv:2006.09616](https://arxiv.org/abs/2006.09616)), DTR for short. In each part a program shows
# what a level has to do, and then come the lines of the toy that do it. We ask `rematfn`, whose
# engine is in C++, for the same each time.

# %%
# SPDX-License-Identifier: Apache-2.0
import copy
import inspect
import sys
import tracemalloc
import weakref
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import matplotlib.pyplot as plt
import numpy as np
import show
import torch
import torch.nn.functional as F
import toy
from show import quote, table
from toy import operators as ops
from toy.levels import active
from toy.remat import Remat, Step

import rematfn

numbers = np.linspace(-1, 1, 64).reshape(8, 8)
toy_x, torch_x = toy.Array(numbers), torch.from_numpy(numbers)

# %% [markdown]
# First look at it. This program has the shape of a training step. It computes a chain of sixteen
# sines, and then goes back over the chain, in reverse order. It is written with methods that arrays
# of the toy and tensors of PyTorch both have. `toy.remat` is given a budget of bytes, and a `kind`
# of level: here one that takes notes.


# %%
def there_and_back(x):
    chain = [x]
    for _ in range(16):
        chain.append(chain[-1].sin())
    chain.pop()
    gradient = chain.pop().cos()
    while chain:
        gradient = gradient * chain.pop().cos()
    return gradient


class Watched(Remat):
    """A level that notes after each operator whose contents are here."""

    def __init__(self, budget):
        super().__init__(budget)
        self.here, self.bytes = [], []

    def run(self, op, args):
        result = super().run(op, args)
        self.here.append({version.producer.order for version in self.versions if version.here})
        self.bytes.append(self.resident)
        return result


unit = toy_x.nbytes
expected = there_and_back(toy_x).data
# Alt: Three pictures, for room for 20, 12 and 8 results. Each result has a row that is blue while
# it is in memory. The less room, the more rows are blue, then white, then blue again.
figure, axes = plt.subplots(1, 3, figsize=(10, 3.2), sharey=True)
for axis, units in zip(axes, (20, 12, 8), strict=True):
    f = toy.remat(there_and_back, units * unit, kind=Watched)
    assert np.array_equal(f(toy_x).data, expected)
    for now, here in enumerate(f.level.here):
        axis.bar([now] * len(here), [0.8] * len(here), 1, bottom=list(here), color="#0072B2")
    axis.set(title=f"room for {units}", xlabel="operators of the program")
    assert max(map(len, f.level.here)) <= units
axes[0].set(ylabel="result, in the order of making")
figure.tight_layout()
plt.show()

# %% [markdown]
# Each result has a row, which is blue while it is in memory. The sixteen lowest rows are the chain.
# The others are cosines and gradients, which the program soon drops. Where a row is blue, then
# white, then blue again, contents went and came back. All three runs have the bits of the plain
# program.
#
# ## 1. A record
#
# Take a program of three lines.


# %%
def program(x):
    h = x.sin()
    y = h * h
    return y.exp()


# %% [markdown]
# Suppose that the bytes of `y` are gone, and somebody reads `y`. To make it again we have to know:
#
# - which operator made it: `mul`;
# - what that operator read, its *parents*: `h`, twice;
# - and its other arguments: here there are none.
#
# ### How is a tensor's making recorded, and where are its parents and its access time?
#
# We need somebody who sees each operator. In the toy's dispatcher that is a fallback at the key
# `REMAT`. It is just above `CPU`, so what comes there are plain arrays, whatever transforms have
# wrapped them before (notebook 2). While a level of `remat` is active, the thread includes the key.
#
# Some words for what is written down.
#
# - A **storage** is a block of bytes. A tensor is a storage together with a *view* of it: an
#   offset, sizes and strides. That is so in PyTorch, and in the toy too.
# - A **version** is the contents of a storage until it is written the next time. Versions are what
#   goes and comes back.
# - An **operation** is one recorded call of an operator.
# - A version's **producer** is the operation that made it. A version without a producer is a
#   **constant**: it came from outside, as `x` did, and nobody can make it again.
# - The **lineage** of a version is its producer, the producers of what that one read, and so on.

# %%
quote("tutorials/toy/lineage.py", "class Version:", "self.place.numbers is not None")
quote("tutorials/toy/lineage.py", "class Input:", "self.version, self.view = version, view")
quote("tutorials/toy/lineage.py", "class Operation:", "if isinstance(arg, Input)]")

# %% [markdown]
# A version refers to its storage in one of two ways. `storage` is weak: the program's arrays keep
# that storage alive, and can still drop it. `own` is strong, and keeps it alive. (`pending` is for
# part 2, `state` for part 6.)
#
# The toy's `Storage` has a place for its current version. An `Input` stands in an operation where
# an array stood. So these are the references, and all arrows lead back in time:
#
# ```text
#   array -> storage -> version -> producer -> inputs -> versions -> ...
# ```
#
# Each operator that comes to the level makes a journey, a `Step`. Here are its stages, and the one
# that writes down the call. The others come one by one.

# %%
quote("tutorials/toy/remat.py", "    def run(self):", "return self.result")
quote("tutorials/toy/remat.py", "    def make_operation(", "for version in self.reads)")

# %% [markdown]
# What leads forward, from an operation to its outputs, is weak. So when the program drops the last
# array that needs a part of the record, that part goes too. The C++ keeps to the same rule, with
# the same names. (`Ref` is a counted reference.)

# %%
quote("csrc/engine/lineage.h", "// Note [Lineage owns inputs, never outputs]", "each link.")
quote("csrc/engine/lineage.h", "Ref<Operation> producer;  // none")
quote("csrc/engine/lineage.h", "double last_access")

# %% [markdown]
# Through `producer` one comes to the parents, and `last_access` is the access time. Time is counted
# in costs and not in seconds: the clock advances by the cost of each call. In the toy that is the
# bytes that the call reads and makes. So two runs of a program have the same access times.
#
# `rematfn.record` writes down a program as well. We put the two records side by side. The names of
# versions are the numbers of the operations that made them; 0 is what came from outside.


# %%
class Listing(Remat):
    """A level that lists its operations."""

    def run(self, op, args):
        result = super().run(op, args)
        operation = result.storage.version.producer
        parents = [v.producer.order if v.producer else 0 for v in operation.reads]
        listed.append((op.name, parents))
        return result


def recorded_by_rematfn(f, x):
    events = rematfn.record(f, x)._core.events()
    calls = [data for kind, data in events if kind == "call"]
    return [(call[0].removeprefix("aten::"), [v for v, _ in call[-2]]) for call in calls]


listed = []
toy.remat(program, kind=Listing)(toy_x)
theirs = recorded_by_rematfn(program, torch_x)
table(
    [(i + 1, *a, *b) for i, (a, b) in enumerate(zip(listed, theirs, strict=True))],
    ["operation", "toy", "its parents", "rematfn", "its parents"],
)
assert listed == theirs == [("sin", [0]), ("mul", [1, 1]), ("exp", [2])]

# %% [markdown]
# We can look at the access times of `rematfn`, too. Three words are needed for that; part 3 comes
# back to them.
#
# - A **budget** is the number of bytes that a level may hold. What it makes counts. What comes from
#   outside, as `x`, does not.
# - A **candidate** is a version that may go when there is no room for the next one.
# - A **policy** says which candidate goes. It can be a function of Python that gives each candidate
#   a number, its *score*. The lowest goes first.
#
# `rematfn.remat(f, budget, policy=...)` is `f` under such a level. The policy is told each
# candidate's `age`, the time since its last use. All calls below cost the same, so an age divided
# by a cost is a number of calls.


# %%
def four_results(x):
    h = x.sin()
    y = h.exp()
    z = -h
    w = y.cos()
    return h, y, z, w


def and_a_fifth(x):
    kept = four_results(x)
    return kept[-1] + x


level = Remat()
with active(level):
    versions = [array.storage.version for array in four_results(toy_x)]
ages = [(level.clock - version.last_access) / version.producer.cost for version in versions]

asked = {}


def ask(candidate):
    asked[candidate.producer.removeprefix("aten::")] = round(candidate.age / candidate.cost)
    return -candidate.age


rematfn.remat(and_a_fifth, 4 * unit, policy=ask)(torch_x)

names = [version.producer.op.name for version in versions]
rows = [
    (result, name, age, asked.get(name, "-"))
    for result, name, age in zip("hyzw", names, map(int, ages), strict=True)
]
table(rows, ["result", "made by", "calls since its last use: toy", "rematfn"])
assert [row[2:] for row in rows] == [(1, 1), (0, 0), (1, 1), (0, "-")]

# %% [markdown]
# `w` is missing on the right: the addition is about to read it, so it may not go, and nobody asks
# about it.
#
# **Question.** An operation could simply keep the arrays that it was given. Why does it keep
# versions and views instead?
#
# <details><summary>Answer</summary>
#
# An array keeps its storage alive. If operations kept arrays, a program could drop whatever it
# liked and no byte would become free: the record alone would hold all that was ever computed. `Note
# [A recorded call holds no tensors]` in `csrc/operators/call.h` says the same. The next cell shows
# it of the toy.
#
# </details>

# %%
with active(Remat()):
    h = toy_x.sin()
    bytes_of_h = weakref.ref(h.storage)
    z = h * h
    del h
assert bytes_of_h() is None  # the operation `mul` is recorded, and yet the bytes of h are gone

# %% [markdown]
# ## 2. Away and back
#
# To **evict** a version is to give up its bytes and keep its lineage. A version that has its bytes
# is **resident**. The arrays on an evicted storage stay what they are: the same objects, with their
# shapes.

# %%
quote("tutorials/toy/remat.py", "    def evict(", "self.evictions += 1")
with active(Remat()):
    h = toy_x.sin()
    version = h.storage.version
    version.level.evict(version)
    print("resident:", version.here, "- shape:", h.shape)
    try:
        print(h.data)
    except LookupError as error:
        print(error)
assert not version.here

# %% [markdown]
# Nobody told the dispatcher of this last read, so nobody could help. In the toy it is an error. In
# PyTorch a kernel would read at address zero. So in `rematfn` eviction takes the pointer out of the
# storage, and leaves there a message for whoever reads the bytes without asking the dispatcher.

# %%
FILE = "csrc/tensors/tensor_store.cpp"
quote(FILE, "storage->set_data_ptr_noswap(instead_of", "forbid(*storage")


def reads_behind_the_dispatcher(x):
    h = x.sin()
    rematfn._C.testing.evict(h)
    return torch._C.TensorBase.data_ptr(h)  # as C++ code asks: nobody is told


try:
    rematfn.remat(reads_behind_the_dispatcher)(torch_x)
except RuntimeError as error:
    message = str(error)
print(message)
assert "evicted" in message

# %% [markdown]
# ### When is it made again?
#
# When an operator is about to read it, and no sooner. To make a version again is to **replay** its
# producer, which is to run it again. But first the producer's inputs have to be here. So the
# obvious way is a recursion:


# %%
class Recursive(Remat):
    def materialize(self, wanted):
        self.patience = 10_000  # the toy's limit on replays
        for version in wanted:
            if not version.here:
                self.materialize(version.producer.reads)
                self.replay(version.producer)


# %% [markdown]
# Programs in this notebook have one more argument, a function that evicts the version under a
# tensor. So we choose ourselves what goes, and when. `verdict` runs a program plainly and under a
# level, and compares bits. Without a level the function does nothing. For `rematfn` it is one of
# its hooks for tests. (`m` has functions that need one form for the toy and one for PyTorch.)


# %%
def batch_norm(x, mean, variance):
    """As PyTorch's in training: its running statistics move a little with each call."""
    for running, now in ((mean, x.mean(0)), (variance, x.var(0, ddof=1))):
        running += 0.1 * (now - running)
    return (x - x.mean(0)) / np.sqrt(x.var(0) + 1e-5)


OF_TOY = SimpleNamespace(
    grad=toy.grad,
    dropout=lambda x: x * ops.flip(x) * 2.0,
    batch_norm=ops.define("batch_norm", batch_norm, writes=(1, 2)),
)
OF_TORCH = SimpleNamespace(
    grad=torch.func.grad,
    dropout=lambda x: torch.native_dropout(x, 0.5, True)[0],  # F.dropout calls this on a GPU
    batch_norm=lambda x, mean, variance: F.batch_norm(x, mean, variance, training=True),
)
SEED = ops.generator.bit_generator.state


def evict_in_toy(array):
    version = array.storage.version
    if version.level.may_go(version):
        version.level.evict(version)


def arguments(program, make):
    """Fresh arguments, with the generators at their beginning."""
    ops.generator.bit_generator.state = SEED
    torch.manual_seed(0)
    count = len(inspect.signature(program).parameters) - 2
    return [make(data.copy()) for data in (numbers, np.zeros(8), np.ones(8))[:count]]


def contents(results):
    results = results if isinstance(results, tuple) else (results,)
    return [(r.data if isinstance(r, toy.Array) else r.numpy()).tobytes() for r in results]


def verdict(program, level):
    """What comes of a program under a kind of level of the toy's, or under rematfn."""
    if level == "rematfn":
        m, make, evict = OF_TORCH, torch.from_numpy, rematfn._C.testing.evict
        transform = rematfn.remat
    else:
        m, make, evict = OF_TOY, toy.Array, evict_in_toy
        transform = partial(toy.remat, kind=level)

    expected = contents(program(m, *arguments(program, make), lambda tensor: None))
    try:
        results = transform(lambda *args: program(m, *args, evict))(*arguments(program, make))
    except (LookupError, RecursionError) as error:
        return type(error).__name__
    return "same bits" if contents(results) == expected else "OTHER BITS"


def chain_of_five(m, x, evict):
    chain = [x]
    for _ in range(5):
        chain.append(chain[-1].sin())
    for h in chain[1:]:
        evict(h)
    return chain[-1] + 1.0


assert verdict(chain_of_five, Recursive) == verdict(chain_of_five, "rematfn") == "same bits"
f = toy.remat(lambda x: chain_of_five(OF_TOY, x, evict_in_toy), kind=Recursive)
f(toy_x)
print(f.level.evictions, "evictions,", f.level.replays, "replays")
assert f.level.evictions == f.level.replays == 5

# %% [markdown]
# All five are gone. The addition reads the last. That one needs the fourth, which needs the third,
# and so on: five replays. **The program that breaks it** is a longer chain.


# %%
def long_chain(m, x, evict):
    h = x
    for _ in range(1200):
        h = h + 1.0  # the one before is dropped
    evict(h)
    return h * 2.0


sys.setrecursionlimit(1000)  # Python's own; notebooks have a higher one
found = verdict(long_chain, Recursive)
print(found)
assert found == "RecursionError"

# %% [markdown]
# The program has dropped all but the last `h`. To make that again takes all 1200 operations, and
# the recursion is as deep. The fix: first collect the operations, without a recursion; then replay
# them in the order of the program. Each comes after those that it needs, because the program ran
# them in that order. Such a list is a **replay queue**.

# %%
quote("tutorials/toy/lineage.py", "def queue_of(", "for order in sorted(found)]")
quote("tutorials/toy/remat.py", "    def materialize(", "until we look again")
assert verdict(long_chain, Remat) == verdict(long_chain, "rematfn") == "same bits"

# %% [markdown]
# What a queued replay will read is **pending**. When the last such replay has run, and the
# program does not hold the version, it goes at once. So the chain of 1200 needs room for two
# versions at a time.
#
# A pending version can still be evicted when there is no room, as the last choice. Then a replay
# finds an input missing, is passed over, and the loop begins anew. In the toy a limit on replays
# ends a loop that would go on for ever. The C++ has rules for that. (A *heap* here is a queue,
# which gives out the earliest operation first.)

# %%
quote("csrc/engine/replayer.h", "//   1. Collect the closure", "found missing when its reader")

# %% [markdown]
# **Question.** What keeps `rematfn` from an endless loop, without a limit?
#
# <details><summary>Answer</summary>
#
# Rule 4 of the same Note: whoever finds an input missing *pins* the inputs that it still has, and
# collects again. What is pinned cannot go. With each new queue one more input is pinned, so the
# queues for one operation come to an end. Rule 5 says what happens if the pins leave no
# room.
#
# </details>

# %% [markdown]
# ## 3. A budget
#
# So far we said ourselves what goes. Now the level is to decide, and to keep the bytes of its
# versions within a budget. Three questions:
#
# - **When?** Before an operator runs. Afterwards would be too late, as its results are there then.
# - **How much room?** As much as the results will take. In the toy each operator tells the shape of
#   its result. rematfn runs an operator of PyTorch first on *meta tensors*, which have sizes and no
#   bytes; what comes out has the sizes of the results.
# - **Who goes?** DTR gives each version a score, and the lowest goes first. What is costly to make
#   again should stay; what is large, or was not used for long, should go. The simplest score that
#   says so is called h_local in the paper:
#
# ```text
# score = cost / (bytes * time since the last access)
# ```
#
# Notebook 6 is about better ones. Here is the toy's. What the running operator reads (`keep`) is
# brought back before room is made, and cannot go.

# %%
quote("tutorials/toy/remat.py", "    def may_go(", "self.peak = max(self.peak, need)")
rows = []
for units in (20, 12, 8):
    f = toy.remat(there_and_back, units * unit)
    f(toy_x)
    local = rematfn.policies.reference.Local()
    g = rematfn.remat(there_and_back, units * unit, policy=local)
    assert torch.equal(g(torch_x), there_and_back(torch_x))
    stats = rematfn.stats(g)
    assert stats.peak_bytes <= units * unit
    rows.append((units, f.level.evictions, f.level.replays, stats.evictions, stats.replays))
table(
    rows,
    ["budget, in versions", "toy: evictions", "replays", "rematfn: evictions", "replays"],
)
assert all(row[1:3] == row[3:5] for row in rows)
assert rows[0][1] == 0 < rows[1][1] < rows[2][1]

# %% [markdown]
# `rematfn` was given the same score; it calls it `policies.reference.Local`.
#
# **Question.** A level could as well run the operator first, and then evict until it is within the
# budget again. By how much would it exceed the budget, and when would that matter most?
#
# <details><summary>Answer</summary>
#
# By the results of the running operator, each time. That matters most when they are large: the peak
# is then the budget plus the largest results. If the machine has no memory left for them, the
# operator does not run at all. `Note [Before, not after]` in `csrc/engine/step.h` has the whole
# argument. `rematfn` also makes room for what a kernel takes for the while and gives back, its
# *scratch*; meta tensors say nothing of that.
#
# </details>

# %% [markdown]
# ## 4. Views
#
# Two tensors may stand on one storage. `h.t()` moves no bytes: it is `h`'s storage with other
# strides. PyTorch calls that a *view*. If each tensor had contents of its own, `h` could go, the
# bytes of `v` would go too, and nobody would say so. In a real network it is worse: a linear layer
# reads its weight through a view, and a level that evicts the view has thrown away the weight.


# %%
def reads_a_view(m, x, evict):
    h = x.sin()
    v = h.t()
    evict(h)
    return v + 1.0


with active(Remat()):
    h = toy_x.sin()
    v = h.t()
    print("one version under both:", h.storage.version is v.storage.version)
    print("strides:", h.view[2], v.view[2])
assert h.storage.version is v.storage.version
assert verdict(reads_a_view, Remat) == verdict(reads_a_view, "rematfn") == "same bits"

# %% [markdown]
# So what goes and comes is not a tensor. It is the contents of a storage, and all tensors on the
# storage share it. What about the strides? They belong to the tensor, and an `Input` notes them
# beside the version. So a replay of `v + 1` gets the bytes of `h`, and the strides of `v`.
#
# The toy's storage has a place for its version. A storage of PyTorch's has no such place, but a
# tensor has one that is left to others, its *backend meta*. So the C++ has a class more. A **cell**
# is one storage as its level knows it, and has the current version. It hangs on every tensor of the
# storage, and is called the tensor's **handle**.

# %%
quote("csrc/tensors/level_tensor.h", "// One storage as its level", "struct Cell final")
quote("csrc/tensors/level_tensor.h", "Ref<TensorVersion> version;", "weak_intrusive_ptr<c10")

# %% [markdown]
# **Question.** The program drops `h` and keeps `v`. Do the bytes stay, and can they still be
# evicted and made again?
#
# <details><summary>Answer</summary>
#
# They stay, since `v` holds the storage. And they can go and come back: the storage leads to the
# same version, and nobody asks whether `h` is still alive.
#
# </details>

# %% [markdown]
# ## 5. Writes
#
# A record says what an operator read. It is of use only while what was read stays what it was. Here
# are three programs that write, and a level that does not know it: `believing` makes a kind of
# level that has wrong *facts* about operators.


# %%
def believing(**facts):
    def step(level, op, args):
        op = copy.copy(op)
        vars(op).update(facts)
        return Step(level, op, args)

    return type("Believing", (Remat,), {"step": staticmethod(step)})


def overwrites_its_own(m, x, evict):
    h = x.sin()
    y = h * 2.0
    h.add_(1.0)  # after y was computed from h
    evict(y)
    return y + h


def overwrites_an_argument(m, x, evict):
    h = x.sin()
    x.add_(1.0)
    evict(h)
    return h + x


def moves_statistics(m, x, mean, variance, evict):
    y = m.batch_norm(x, mean, variance)
    evict(y)
    return y + 1.0, mean, variance


writers = [overwrites_its_own, overwrites_an_argument, moves_statistics]
NothingIsWritten = believing(writes=())
found = [verdict(program, NothingIsWritten) for program in writers]
print(found)
assert found == ["OTHER BITS"] * 3
assert [verdict(program, Remat) for program in writers] == ["same bits"] * 3
assert [verdict(program, "rematfn") for program in writers] == ["same bits"] * 3

# %% [markdown]
# No alarm, and wrong numbers: the worst that can happen. The first replays `h * 2` with the `h` of
# after the write. The second has lost the old `x` altogether. The third has its batch norm run
# twice, and each run moves the running statistics.
#
# What the toy's `Remat` does has three parts.
#
# 1. *A write makes a new version.* The storage gets it; operations that were recorded before keep
#    the old one. The old one has lost its bytes to the write, but it still has its producer, so it
#    can be made again, into a storage of its own.
# 2. *A constant is copied before it is overwritten*, for it has no producer. The copy, a
#    *snapshot*, takes the place of the old bytes in the record. It counts, and cannot be evicted.
# 3. *A replay writes to a copy.* It is not to write the program's tensors a second time.

# %%
quote("tutorials/toy/remat.py", "    def take_results(", "self.result.keys |=")  # 1
quote("tutorials/toy/remat.py", "    def save_what_is_overwritten(", "versions.add(constant)")  # 2
quote("tutorials/toy/lineage.py", "    def overwritten(", "self.own = storage")
quote("tutorials/toy/lineage.py", "    def run(", "return made_by(")  # 3

# %% [markdown]
# Who knows what an operator writes? In the toy it is said where the operator is defined. In PyTorch
# an operator has a *schema*, in which a written argument has a `!`. But not every write is there.

# %%
for op in (torch.ops.aten.add_.Tensor, torch.ops.aten.native_batch_norm.default):
    print(op._schema)

# %% [markdown]
# `add_` has its `!`, and `native_batch_norm`, which moves its `running_mean` and `running_var`, has
# none. There is no rule for that, but a list. An entry has an operator, the places of the arguments
# that it writes, and the place of the flag without which it does not write them. In C++ the journey
# of an operator has the same stops as ours.

# %%
quote("csrc/operators/operator_facts.cpp", "constexpr std::array<HiddenWrite", "rrelu_with_noise_")
quote("csrc/engine/step.cpp", "void Step::save_what_is_overwritten", "is_saved(*version)) continue")
quote("csrc/engine/step.cpp", "domain_.snapshot(*version, level_)")

# %% [markdown]
# A batch norm can stand on a list, because it is an operator. What NumPy writes into `x.numpy()`
# cannot. The toy does not see such writes. `rematfn` takes a sample of what comes from outside when
# it is read, and looks at it again before it replays from it: `Note [Evidence of contents]`.
#
# **Question.** `overwrites_its_own` makes no copy of `h`, `overwrites_an_argument` makes one of
# `x`. Which of the two needs more memory, and which more time?
#
# <details><summary>Answer</summary>
#
# The copy takes memory from the write until the last operation that read it is forgotten, whether
# or not anything is ever replayed. Without a copy nothing is paid until somebody needs the old `h`;
# then the sine is computed once more. So one pays in memory at once, the other in time, perhaps.
#
# </details>

# %% [markdown]
# ## 6. Random numbers


# %%
def drops_out(m, x, evict):
    h = m.dropout(x)
    evict(h)
    return h * 2.0, m.dropout(x)


NothingIsRandom = believing(random=False)
found = verdict(drops_out, NothingIsRandom)
print(found)
assert found == "OTHER BITS"
assert verdict(drops_out, Remat) == verdict(drops_out, "rematfn") == "same bits"

# %% [markdown]
# A kernel reads more than its arguments. A random one reads the state of a generator, and moves it
# on. With the wrong facts the replay draws other numbers. Then the program itself does too, since
# the generator has been moved once more. The toy's `Operation` keeps the state that the generator
# had. `run`, quoted above, puts that back, draws, and puts the present back.
#
# In PyTorch a random operator has the tag `nondeterministic_seeded`. `rematfn` restores whatever
# else a kernel can see: whether gradients are recorded, the default dtype, whether deterministic
# algorithms are asked for. (Notebook 3 quotes the Note.)

# %%
assert torch.Tag.nondeterministic_seeded in torch.ops.aten.native_dropout.default.tags

# %% [markdown]
# **Question.** `torch.utils.checkpoint` runs a function a second time, and restores the generator
# before. It keeps one state for each function; we keep one for each random operator. Is ours a
# waste?
#
# <details><summary>Answer</summary>
#
# It costs 5 KB a call on a CPU. But we do not run a function again, we run single operations, in
# whatever order they are needed. The state before the function does not tell what the third dropout
# in it drew. There is a second gain. The function may draw from a generator of its own. Checkpoint
# does not restore that one, and its second run draws another mask, with no error. A replay knows
# which generator the operator was given.
#
# </details>

# %% [markdown]
# ## 7. Aliases
#
# Which tensors share a storage? PyTorch's schemas tell that as well: what belongs together has the
# same letter. `t` has one. `_unsafe_view` has none, and its result is on the storage of its
# argument all the same.

# %%
h = torch_x.sin()
for op, more in ((torch.ops.aten.t.default, ()), (torch.ops.aten._unsafe_view.default, ([64],))):
    shared = op(h, *more).untyped_storage()._cdata == h.untyped_storage()._cdata
    print(op._schema, "- shared:", shared)
    assert shared

# %% [markdown]
# The name means: who calls it promises to forget the argument. `batch @ x` does, for matrices times
# a matrix. But a level has not forgotten. If it believed the schema, it would have two cells for
# one storage. It would evict what is in one of them, and believe that the other still has its
# bytes.
#
# So do not ask the schema who shares a storage. Ask the storage. The toy has done so from the
# start: `made_by` compares storages. Here is the C++.

# %%
quote("csrc/operators/level_results.cpp", "// Puts handles on results", "never off the schema.")


def linear_layer(m, x, evict):
    y = torch.stack([x, x]) @ x  # mm, then _unsafe_view
    y.mul_(3)
    evict(y)
    return y + 1


def unsafe_view(m, x, evict):
    h = x.sin()
    z = torch.ops.aten._unsafe_view(h, (4, 16))
    z.mul_(3)  # writes the bytes of h, too
    evict(h)
    return h + 1, z + 1


def writes_through_a_view(m, x, evict):
    h = x.sin()
    h.t().mul_(3.0)
    evict(h)
    return h + 1.0


assert verdict(linear_layer, "rematfn") == verdict(unsafe_view, "rematfn") == "same bits"
assert verdict(writes_through_a_view, Remat) == "same bits"
assert verdict(writes_through_a_view, "rematfn") == "same bits"

# %% [markdown]
# There is another kind of alias, which no operator makes. `numpy()` gives out the bytes themselves.
# If they go, whoever has the array does not notice, and writes where nobody reads.


# %%
def lends_to_numpy(m, x, evict):
    h = x.sin()
    array = h.numpy()
    evict(h)
    array += 1  # on the bytes of h
    return h * 2.0


class Careless(Remat):
    def may_go(self, version):
        return version.here and version.producer is not None  # lent or not


found = verdict(lends_to_numpy, Careless)
print(found)
assert found == "OTHER BITS"
assert verdict(lends_to_numpy, Remat) == verdict(lends_to_numpy, "rematfn") == "same bits"
quote("csrc/tensors/tensor_store.cpp", "// tensor.numpy() leaves", "tensors + queue ||")

# %% [markdown]
# What is lent stays. The toy's storage notes it. PyTorch's leaves a mark too: a storage that was
# lent cannot be resized any more. The last line of the C++ finds more than NumPy. It compares how
# many hold the storage with how many tensors the level knows on it. If there are more, somebody
# else has it, and it stays.
#
# **Question.** `x.data = y` makes the tensor `x` stand on the storage of `y`, without an operator.
# The handle in C++ hangs on the tensor. What has to be done?
#
# <details><summary>Answer</summary>
#
# The handle that hangs on `x` is that of the old storage. So `cell_of` compares the storage each
# time: `Note [A handle may outlive its storage]`.
#
# </details>

# %% [markdown]
# ## 8. All together
#
# Every program so far, under every level so far.

# %%
programs = [chain_of_five, long_chain, reads_a_view, *writers]
programs += [drops_out, writes_through_a_view, lends_to_numpy]
levels = {
    "recursive": Recursive,
    "nothing is written": NothingIsWritten,
    "nothing is random": NothingIsRandom,
    "careless": Careless,
    "toy.remat": Remat,
    "rematfn": "rematfn",
}
found = {p: [verdict(p, level) for level in levels.values()] for p in programs}
table(
    [(p.__name__, *("ok" if v == "same bits" else v for v in found[p])) for p in programs],
    ["program", *levels],
)
columns = list(zip(*found.values(), strict=True))
assert all(set(column) != {"same bits"} for column in columns[:4])
assert all(set(column) == {"same bits"} for column in columns[4:])

# %% [markdown]
# The hardest test there is: evict all that may go after each operator. Each version is then
# replayed each time that it is read.


# %%
class EvictEverything(Remat):
    def run(self, op, args):
        result = super().run(op, args)
        for version in filter(self.may_go, list(self.versions)):
            self.evict(version)
        return result


for p in [p for p in programs if p not in (long_chain, lends_to_numpy)]:
    assert verdict(p, EvictEverything) == "same bits"
    everything = rematfn.remat(
        lambda *args, p=p: p(OF_TORCH, *args, lambda tensor: None),
        policy=rematfn.testing.EvictEverything(),
    )
    plain = p(OF_TORCH, *arguments(p, torch.from_numpy), lambda tensor: None)
    assert contents(everything(*arguments(p, torch.from_numpy))) == contents(plain)

# %% [markdown]
# Two programs are left out. With everything evicted, the toy's `numpy()` finds nothing to lend: it
# calls no operator. `rematfn` knows the few ways in which a program asks for bytes: `Note [What is
# asked before bytes are read]`. And the long chain would take some 700 000 replays.
#
# Now a training step, with all of this in it: views of weights, dropout, and a backward that reads
# what the forward has saved. The level is active while both run.

# %%
LAYERS, SIZE = 12, 128
rng = np.random.default_rng(0)
weights = [rng.standard_normal((SIZE, SIZE)) / SIZE**0.5 for _ in range(LAYERS)]
batch = rng.standard_normal((SIZE, SIZE))


def training_step(m, make):
    x = make(batch)

    def loss(weights):
        h = x
        for w in weights:
            h = m.dropout((h @ w.t()).sin())
        return (h * h).sum()

    return m.grad(loss)


def gradients_of(f, make):
    arguments(chain_of_five, make)  # the generators
    return f(tuple(map(make, weights)))


def traced(f):
    tracemalloc.start()
    result = gradients_of(f, toy.Array)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return result, peak


def timed(f):
    with rematfn.testing.MemoryTimeline() as timeline:
        result = gradients_of(f, torch.from_numpy)
    return result, timeline


toy_step = training_step(OF_TOY, toy.Array)
torch_step = training_step(OF_TORCH, torch.from_numpy)
MIB = 2**20
BUDGET = 6 * MIB
expected, toy_plain = traced(toy_step)
ample = toy.remat(toy_step, kind=Watched)
gradients_of(ample, toy.Array)
bounded = toy.remat(toy_step, BUDGET, kind=Watched)
result, toy_peak = traced(bounded)
assert contents(result) == contents(expected)

expected, torch_plain = timed(torch_step)
local = rematfn.policies.reference.Local()
budgeted = rematfn.remat(torch_step, BUDGET, policy=local)
result, real = timed(budgeted)
assert contents(result) == contents(expected)
stats = rematfn.stats(budgeted)
rows = [
    ("toy", f"{toy_plain / MIB:.1f}", f"{toy_peak / MIB:.1f}", bounded.level.replays),
    ("rematfn", f"{torch_plain.peak / MIB:.1f}", f"{real.peak / MIB:.1f}", stats.replays),
]
table(rows, ["", "peak without a budget, MiB", "within 6 MiB", "replays"])
assert real.peak <= BUDGET < torch_plain.peak
assert bounded.level.peak <= BUDGET < toy_plain

# %% [markdown]
# These are bytes that NumPy and PyTorch's allocator have handed out, not those of our tables. The
# toy is above its budget there: `tracemalloc` counts Python's own objects too, such as the record.
# Here are the curves: of the toy by its own count, operator by operator, and of rematfn by the
# allocator, event by event.

# %%
# Alt: Two pictures of bytes in one training step, one for the toy and one for rematfn. Without a
# budget the curve rises far above the dashed budget. With one it rises to the budget and does not
# cross it.
figure, axes = plt.subplots(1, 2, figsize=(10, 3.2), sharey=True)
curves = {
    "toy": (ample.level.bytes, bounded.level.bytes),
    "rematfn": (torch_plain.bytes, real.bytes),
}
for axis, (name, (plain, within)) in zip(axes, curves.items(), strict=True):
    for curve, color, label in ((plain, "#555555", "no budget"), (within, "#0072B2", "in 6 MiB")):
        place = np.linspace(0, 1, len(curve))
        axis.plot(place, np.array(curve) / MIB, color=color, linewidth=1.2, label=label)
    axis.axhline(BUDGET / MIB, color="black", linestyle="--", linewidth=0.8)
    axis.set(title=name, xlabel="share of the step")
axes[0].set(ylabel="MiB")
axes[0].legend(loc="upper left")
figure.tight_layout()
plt.show()

# %% [markdown]
# No blue curve crosses its budget. (The toy needs more to begin with, and replays more: each node
# of its `grad` keeps all that its operator has read and made, needed or not.) How long is the toy's
# `remat`?

# %%
folder = Path(show.__file__).parent / "toy"
lines = [line for name in ("lineage.py", "remat.py") for line in (folder / name).open()]
print(sum(bool(line.strip()) for line in lines), "lines, without blank ones")

# %% [markdown]
# **What comes next.** The toy's level stands at a key of the toy's dispatcher. PyTorch's dispatcher
# has no key for us. Notebook 5 finds a place, and follows one operator through the C++.
#
# **Question.** Two levels, one inside the other, each with a budget. An operator runs in the inner
# one. Whose budget should its result count against?
#
# <details><summary>Answer</summary>
#
# Against both, because its bytes are in memory while both promise a bound. In the toy `around` has
# a level and all that enclose it, and `make_room` asks each of them. It is the same in `rematfn`:
# notebook 5, part 3.
#
# </details>
