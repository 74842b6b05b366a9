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
# A program keeps more tensors than memory holds, and most of them could be computed again. At the
# end of this notebook we have a *level*: some two hundred lines of Python that watch a program,
# throw tensors away when memory is short, and make them again when somebody reads them, with the
# same bits.
#
# The idea is that of *Dynamic Tensor Rematerialization* (Kirisame et al., ICLR 2021,
# [arXiv:2006.09616](https://arxiv.org/abs/2006.09616)), DTR for short. We write it first much as
# its authors describe it; that is the *toy*. Then we break it, with views, writes, random numbers
# and aliases, and fix it each time. After each step we ask `rematfn`, whose engine is in C++, for
# the same.

# %%
# SPDX-License-Identifier: Apache-2.0
import ast
import inspect
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import matplotlib.pyplot as plt
import show
import torch
import torch.nn.functional as F
from show import quote, table
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.weak import WeakIdKeyDictionary

import rematfn

x = torch.linspace(-1, 1, 64).reshape(8, 8)


def tensors_in(tree):
    """The tensors in a nest of tuples, lists and dicts."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


# %% [markdown]
# ## 1. A record
#
# Take a program of three lines.


# %%
def program(x):
    h = x.sin()
    y = h * h
    return y.sum()


# %% [markdown]
# Suppose that the bytes of `y` are gone, and somebody reads `y`. To make it again we have to know:
#
# - which operator made it: `mul`;
# - what that operator read: `h`, twice;
# - and its other arguments: here there are none.
#
# ### How is a tensor's making recorded, and where are its parents and its access time?
#
# We need somebody who sees each operator. In Python that is a `TorchDispatchMode`. While it is
# active, PyTorch calls its `__torch_dispatch__` for each operator, after autograd has had its turn.
# The method runs the operator itself, by calling `func`, and may do what it likes before and after.
#
# Three small classes hold what we write down.
#
# - A `Version` is the contents of a tensor: its **value**. It knows the call that made it, when it
#   was last used, and the *storage* that its bytes lie in. A storage is PyTorch's name for a block
#   of bytes; a tensor is a storage together with sizes, strides and an offset. (Part 5 tells why
#   this class is called so.)
# - An `Operation` is a recorded **call**: an operator with the arguments that it was given.
# - An `Input` stands in an operation in the place of a tensor. It is a value, and the sizes,
#   strides and offset by which the operator saw it.
#
# A value refers to its storage in one of two ways. `program` is weak: the program's tensors keep
# that storage alive, and can still drop it. `own` is strong: we keep it alive ourselves. (A weak
# reference to a storage is good for as long as the storage lives. PyTorch keeps one Python object
# for it, and `untyped_storage()` returns that one each time.)


# %%
class Version:
    """The contents of a tensor: what may be taken away, and made again."""

    def __init__(self, tensor, producer, now):
        storage = tensor.untyped_storage()
        self.producer = producer  # the call that made it; None: it came from outside
        self.nbytes = storage.nbytes()
        self.last_access = now
        self.evicted = False
        self.pins = 0  # so many need it to stay
        self.program = weakref.ref(storage)  # the program's storage, while the program has it
        self.own = storage if producer is None else None  # one that we keep alive

    @property
    def storage(self):
        return self.program() if self.own is None else self.own

    @property
    def here(self):
        return not self.evicted and self.storage is not None


@dataclass
class Input:
    value: Version
    dtype: torch.dtype
    view: tuple  # offset, sizes, strides

    def over(self, storage):
        if storage.nbytes() < self.value.nbytes:
            raise LookupError("a replay reads bytes that are gone")
        return torch.empty(0, dtype=self.dtype).set_(storage, *self.view)


@dataclass(eq=False)
class Operation:
    func: Callable
    given: tuple  # its arguments, positional and by name
    order: int  # its place in the program
    cost: float = 0.0
    outputs: list = field(default_factory=list)  # where each is found, and a weak reference
    random: torch.Tensor | None = None  # we come to that in part 6

    @property
    def parents(self):
        return [leaf.value for leaf in tree_leaves(self.given) if isinstance(leaf, Input)]


# %% [markdown]
# The mode fills them in. It has a table from tensors to values, whose keys are weak: an entry goes
# with its tensor. A tensor that is not in the table came from outside. Nobody can make that one
# again, so its value keeps its storage alive.
#
# Time is counted in costs, not in seconds: the clock advances by the cost of each call. Our
# estimate of a cost is the bytes that the call reads and makes. So two runs of a program have the
# same access times.
#
# PyTorch switches a mode off while its `__torch_dispatch__` runs. So what the level computes for
# itself in there is not recorded.


# %%
class Recorder(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.table = WeakIdKeyDictionary()
        self.values = weakref.WeakSet()  # all that the program has made
        self.clock = 0.0
        self.order = 0

    def value_of(self, tensor):
        if tensor not in self.table:
            self.table[tensor] = Version(tensor, None, self.clock)
        return self.table[tensor]

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = (args, kwargs or {})
        call = self.record(func, given)
        result = self.run(call, given)
        self.take(call, given, result)
        return result

    def record(self, func, given):
        def noted(t):
            view = (t.storage_offset(), t.size(), t.stride())
            return Input(self.value_of(t), t.dtype, view)

        self.order += 1
        return Operation(func, tree_map_only(torch.Tensor, noted, given), self.order)

    def run(self, call, given):
        return call.func(*given[0], **given[1])

    def take(self, call, given, result):
        self.account(call, result)
        for i, tensor in enumerate(tensors_in(result)):
            self.table[tensor] = self.output(call, tensor, ("result", i))

    def account(self, call, result):
        made = sum(tensor.untyped_storage().nbytes() for tensor in tensors_in(result))
        call.cost = float(sum(value.nbytes for value in call.parents) + made)
        self.clock += call.cost
        for value in call.parents:
            value.last_access = self.clock

    def output(self, call, tensor, place):
        value = Version(tensor, call, self.clock)
        call.outputs.append((place, weakref.ref(value)))
        self.values.add(value)
        return value


# %% [markdown]
# `rematfn.record` writes down a program as well. We put the two records side by side. The names of
# values are the numbers of the calls that made them; 0 is what came from outside.


# %%
class Listing(Recorder):
    def __init__(self):
        super().__init__()
        self.calls = []

    def take(self, call, given, result):
        super().take(call, given, result)
        parents = [value.producer.order if value.producer else 0 for value in call.parents]
        self.calls.append((call.func._schema.name, parents))


def recorded_by_toy(f, x):
    with Listing() as listing:
        f(x)
    return listing.calls


def recorded_by_rematfn(f, x):
    events = rematfn.record(f, x)._core.events()
    calls = [data for kind, data in events if kind == "call"]
    return [(call[0], [value for value, _ in call[-2]]) for call in calls]


ours, theirs = recorded_by_toy(program, x), recorded_by_rematfn(program, x)
table(
    [(i + 1, *a, *b) for i, (a, b) in enumerate(zip(ours, theirs, strict=True))],
    ["call", "toy", "its parents", "rematfn", "its parents"],
)
assert ours == theirs == [("aten::sin", [0]), ("aten::mul", [1, 1]), ("aten::sum", [2])]

# %% [markdown]
# The record is a graph whose arrows lead back in time.
#
# ```
#    x  <---------  h  <=========  y  <---------  the sum
#         sin            mul            sum
# ```
#
# A value refers to the call that made it, and a call to the values that it read. What leads
# forward, from a call to its outputs, is weak. So the last value that needs a part of the record
# takes that part with it when it dies. The C++ keeps to the same rule, with the same names.

# %%
quote("csrc/engine/lineage.h", "// Note [Lineage owns inputs, never outputs]", "each link.")
quote("csrc/engine/lineage.h", "Ref<Operation> producer;  // none")
quote("csrc/engine/lineage.h", "double last_access")

# %% [markdown]
# Through `producer` one comes to the parents, and `last_access` is the access time.
#
# We can look at the access times of `rematfn`, too. Three words are needed for that; part 3 comes
# back to them.
#
# - A **budget** is the number of bytes that a level may hold. What it makes counts. What comes from
#   outside, as `x`, does not.
# - A **candidate** is a value that may go when there is no room for the next one.
# - A **policy** says which candidate goes. It can be a function of Python that gives each candidate
#   a number, its *score*. The lowest goes first.
#
# `rematfn.remat(f, budget, policy=...)` is `f` under such a level. The policy is told each
# candidate's `age`, the time since its last use. All calls below cost the same, so an age divided
# by a cost is a number of calls.


# %%
def four_values(x):
    h = x.sin()
    y = h.exp()
    z = h.tanh()
    w = y.cos()
    return h, y, z, w


def and_a_fifth(x):
    kept = four_values(x)
    return kept[-1] + x


with Recorder() as recorder:
    values = [recorder.value_of(tensor) for tensor in four_values(x)]
ages = [(recorder.clock - value.last_access) / value.producer.cost for value in values]

asked = {}


def ask(candidate):
    asked[candidate.producer] = round(candidate.age / candidate.cost)
    return -candidate.age


room_for_four = 4 * x.untyped_storage().nbytes()
rematfn.remat(and_a_fifth, room_for_four, policy=ask)(x)

rows = [
    (name, value.producer.func._schema.name, age, asked.get(value.producer.func._schema.name, "-"))
    for name, value, age in zip("hyzw", values, map(int, ages), strict=True)
]
table(rows, ["value", "made by", "calls since its last use: toy", "rematfn"])
assert [row[2:] for row in rows] == [(1, 1), (0, 0), (1, 1), (0, "-")]

# %% [markdown]
# `w` is missing on the right: the addition is about to read it, so it may not go, and nobody asks
# about it.
#
# **Question.** A call could simply keep the tensors that it was given. Why does it keep values and
# sizes instead?
#
# <details><summary>Answer</summary>
#
# A tensor keeps its storage alive. If calls kept tensors, a program could drop whatever it liked
# and no byte would become free: the record alone would hold all that was ever computed. `Note [A
# recorded call holds no tensors]` in `csrc/operators/call.h` says the same. The next cell shows it
# of the toy.
#
# </details>

# %%
with Recorder():
    h = x.sin()
    bytes_of_h = weakref.ref(h.untyped_storage())
    z = h * h
    del h
assert bytes_of_h() is None  # the call `mul` is recorded, and yet the bytes of h are gone

# %% [markdown]
# ## 2. Away and back
#
# Now we take bytes away. A storage can be resized. Resized to nothing it gives its memory back, and
# all tensors on it stay what they were: the same objects, with their sizes and strides.

# %%
h = x.sin()
print(h.untyped_storage().nbytes(), "bytes, shape", tuple(h.shape))
h.untyped_storage().resize_(0)
print(h.untyped_storage().nbytes(), "bytes, shape", tuple(h.shape))
assert h.shape == (8, 8)
assert h.untyped_storage().nbytes() == 0

# %% [markdown]
# Do not read `h` now. PyTorch's kernels trust a tensor's sizes. They would read at address zero,
# and the process would end, or the result would be made of whatever lies there. So before each
# operator our level looks for arguments without bytes, and a replay does so in `over`. If the level
# believed them to be here, it raises a `LookupError`. We are going to need that alarm.
#
# ### When is it made again?
#
# When an operator is about to read it, and no sooner. To make a value again is to run its call
# again; but first the parents have to be here. So the obvious way is a recursion.


# %%
class Lineage(Recorder):
    def __init__(self):
        super().__init__()
        self.evictions = self.replays = 0

    def may_go(self, value):
        return value.here and value.pins == 0 and value.nbytes > 0 and value.producer is not None

    def evict(self, value):
        if value.own is None:
            value.program().resize_(0)
        value.own = None
        value.evicted = True
        self.evictions += 1

    def run(self, call, given):
        self.bring_back(call.parents)
        for tensor in tensors_in(given):
            if tensor.numel() > 0 and tensor.untyped_storage().nbytes() == 0:
                raise LookupError(f"{call.func} reads bytes that are gone")
        self.make_room(call, given)
        result = super().run(call, given)
        self.let_go(call.parents)
        return result

    def make_room(self, call, given):
        pass  # we come to that in part 3

    def bring_back(self, values):
        for value in values:
            self.materialize(value)
            value.pins += 1  # until whoever asked has read it

    def let_go(self, values):
        for value in values:
            value.pins -= 1

    def materialize(self, value):
        if value.here:
            return
        self.bring_back(value.producer.parents)
        self.replay(value.producer)
        self.let_go(value.producer.parents)

    def replay(self, call):
        given = self.arguments(call)
        results = call.func(*given[0], **given[1])
        made = {"result": tensors_in(results), "argument": tensors_in(given)}
        for (kind, i), reference in call.outputs:
            value = reference()
            if value is not None and not value.here:
                self.refill(value, made[kind][i].untyped_storage())
        self.replays += 1

    def arguments(self, call):
        return tree_map_only(Input, lambda a: a.over(a.value.storage), call.given)

    def refill(self, value, storage):
        place = value.program()
        if place is None:
            value.own = storage  # the program has dropped it; a replay wants it all the same
        elif place is not storage:
            place.resize_(value.nbytes)
            place.copy_(storage)
        value.evicted = False


def under(level, program, *args):
    """Run a program of tensors, and of a function that evicts one, under a level."""

    def evict(tensor):
        value = level.value_of(tensor)
        if level.may_go(value):
            level.evict(value)

    with level:
        result = program(*args, evict)
    level.bring_back([level.value_of(tensor) for tensor in tensors_in(result)])
    return result


# %% [markdown]
# `under` brings the results back at the end, since whoever gets them is going to read them.
#
# Programs in this notebook have one more argument, a function that evicts a tensor. So we choose
# ourselves what goes, and when. `verdict` runs a program plainly and under a level, and compares
# bits. Without a level the function does nothing. For `rematfn` it is one of its hooks for tests.


# %%
def keep(tensor):
    pass


def inputs(program):
    torch.manual_seed(0)
    count = len(inspect.signature(program).parameters) - 1
    return [x.clone() for _ in range(count)]


def same_bits(actual, expected):
    pairs = zip(tensors_in(actual), tensors_in(expected), strict=True)
    return all(torch.equal(a, e) for a, e in pairs)


def verdict(program, level):
    expected = program(*inputs(program), keep)
    try:
        if level == "rematfn":
            evict = rematfn._C.testing.evict
            actual = rematfn.remat(program)(*inputs(program), evict)
        else:
            actual = under(level, program, *inputs(program))
    except (LookupError, RecursionError, RuntimeError) as error:
        return type(error).__name__
    return "same bits" if same_bits(actual, expected) else "OTHER BITS"


def chain_of_five(x, evict):
    chain = [x]
    for _ in range(5):
        chain.append(chain[-1].sin())
    for h in chain[1:]:
        evict(h)
    return chain[-1] + 1


level = Lineage()
assert verdict(chain_of_five, level) == "same bits"
print(level.evictions, "evictions,", level.replays, "replays")
assert (level.evictions, level.replays) == (5, 5)
assert verdict(chain_of_five, "rematfn") == "same bits"

# %% [markdown]
# All five are gone. The addition reads the last. That one needs the fourth, which needs the third,
# and so on: five replays.
#
# In `rematfn` eviction is not a resize. It takes the pointer out of the storage, and leaves there a
# message for whoever reads the bytes without asking the dispatcher; so nobody reads at address
# zero. And a replay that has made the bytes again moves the pointer back in, where our `refill`
# copies, and has two copies for a moment.

# %%
FILE = "csrc/tensors/tensor_store.cpp"
quote(FILE, "storage->set_data_ptr_noswap(instead_of", "forbid(*storage")
quote(FILE, "allow_access(*storage);", "storage->device())));")


def reads_behind_the_dispatcher(x):
    h = x.sin()
    rematfn._C.testing.evict(h)
    return torch._C.TensorBase.data_ptr(h)  # as C++ code asks: nobody is told


try:
    rematfn.remat(reads_behind_the_dispatcher)(x)
except RuntimeError as error:
    message = str(error)
print(message)
assert "evicted" in message

# %% [markdown]
# **The first program that breaks it** is a long chain.


# %%
def long_chain(x, evict):
    h = x
    for _ in range(2000):
        h = h + 1  # the one before is dropped
    evict(h)
    return h * 2


found = verdict(long_chain, Lineage())
print(found)
assert found == "RecursionError"

# %% [markdown]
# The program has dropped all but the last `h`. To make that again takes all 2000 calls, and the
# recursion is as deep. The fix: first collect the calls, without a recursion; then run them in the
# order of the program. Each comes after those that it needs, because the program ran them in that
# order.
#
# A value that a collected call reads is pinned until the last such call has run. After that, if the
# program does not hold the value, it goes at once. So the chain of 2000 needs room for two
# values at a time.


# %%
class InOrder(Lineage):
    def materialize(self, value):
        plan, todo = {}, [value]
        while todo:
            missing = todo.pop()
            if not missing.here and missing.producer.order not in plan:
                plan[missing.producer.order] = missing.producer
                todo += missing.producer.parents
        for call in plan.values():
            for parent in call.parents:
                parent.pins += 1
        for _, call in sorted(plan.items()):
            self.replay(call)
            self.let_go(call.parents)
            for parent in call.parents:
                if parent.pins == 0 and parent.program() is None and parent.producer is not None:
                    parent.own = None


assert verdict(long_chain, InOrder()) == verdict(long_chain, "rematfn") == "same bits"
quote("csrc/engine/replayer.h", "//   1. Collect the closure", "found missing when its reader")

# %% [markdown]
# Rules 1 and 2 are ours, without the "unless". (The heap is a priority queue.) Rule 3 says what
# `rematfn` does instead of our pins: what a planned replay will read goes last, but it can go. Our
# pins hold all that a plan will read, and if that is more than the budget the plan fails.
#
# **Question.** In `rematfn` a value can be evicted again between its replay and the call that it
# was replayed for. Why is that not an endless loop?
#
# <details><summary>Answer</summary>
#
# It could be one. Rule 4 of the same Note ends it: whoever finds an input missing pins the inputs
# that it still has, and plans again. With each new plan one more input is pinned, so the plans for
# one call come to an end. Rules 5 and 6 say what happens if those pins leave no room.
#
# </details>

# %% [markdown]
# ## 3. A budget
#
# So far we said ourselves what goes. Now the level is to decide, and to keep the bytes of its
# values within a budget. Three questions:
#
# - **When?** Before an operator runs. Afterwards would be too late, as its results are there then.
# - **How much room?** As much as the results will take. The operator is run first on *meta
#   tensors*, which have sizes and no bytes; what comes out has the sizes of the results.
# - **Who goes?** DTR gives each value a score, and the lowest goes first. What is costly to make
#   again should stay; what is large, or was not used for long, should go. The simplest score that
#   says so is called h_local in the paper:
#
# ```
# score = cost / (bytes * time since the last access)
# ```
#
# Notebook 6 is about better ones.


# %%
class DTR(InOrder):
    def __init__(self, budget=None):
        super().__init__()
        self.budget = budget

    @property
    def resident(self):
        return sum(value.nbytes for value in self.values if value.here)

    def score(self, value):
        age = self.clock - value.last_access
        return value.producer.cost / (value.nbytes * (age + 1))

    def room_for(self, nbytes):
        while self.budget is not None and self.resident + nbytes > self.budget:
            candidates = [value for value in self.values if self.may_go(value)]
            if not candidates:
                raise MemoryError(f"{self.resident} bytes cannot go, and {nbytes} are needed")
            self.evict(min(candidates, key=lambda v: (self.score(v), v.producer.order)))

    def make_room(self, call, given):
        def meta(t):
            return torch.empty_strided(t.size(), t.stride(), dtype=t.dtype, device="meta")

        given = tree_map_only(torch.device, lambda _: torch.device("meta"), given)
        given = tree_map_only(torch.Tensor, meta, given)
        known = {tensor.untyped_storage() for tensor in tensors_in(given)}
        made = {t.untyped_storage() for t in tensors_in(call.func(*given[0], **given[1]))}
        self.room_for(sum(storage.nbytes() for storage in made - known))

    def replay(self, call):
        outputs = [reference() for _, reference in call.outputs]
        self.room_for(2 * sum(value.nbytes for value in outputs if value is not None))
        super().replay(call)


# %% [markdown]
# Two things to note. What the running operator reads is brought back and pinned before room is
# made, so that it is not what goes. And a replay makes room for its results twice, because `refill`
# copies.
#
# Here is a program with the shape of a training step. It computes a chain, and then goes back over
# it, reading the values of the chain in reverse order. (A real training step has
# views of tensors in it; they come in part 4.)


# %%
def there_and_back(x, evict):
    chain = [x]
    for _ in range(16):
        chain.append(chain[-1].sin())
    chain.pop()
    gradient = torch.ones_like(x)
    while chain:
        gradient = gradient * chain.pop().cos()
    return gradient


unit = x.untyped_storage().nbytes()
expected = there_and_back(x, keep)
rows = []
for units in (20, 12, 8):
    level = DTR(budget=units * unit)
    assert same_bits(under(level, there_and_back, x), expected)

    local = rematfn.policies.reference.Local()
    transformed = rematfn.remat(there_and_back, units * unit, policy=local)
    assert same_bits(transformed(x, keep), expected)
    stats = rematfn.stats(transformed)
    assert stats.peak_bytes <= units * unit
    rows.append((units, level.evictions, level.replays, stats.evictions, stats.replays))
table(
    rows,
    ["budget, in values", "toy: evictions", "replays", "rematfn: evictions", "replays"],
)
assert all(row[1:3] == row[3:5] for row in rows)
assert rows[0][1] == 0 < rows[1][1] < rows[2][1]

# %% [markdown]
# `rematfn` was given the same score; it calls it `policies.reference.Local`. All results have the
# bits of the plain program. The picture shows which values the toy had, operator by operator. Each
# value has a row, which is blue while the value is here. The sixteen lowest rows are the chain; the
# others are cosines and gradients, which are soon dropped. The program reads the chain backwards.
# So where a row is blue, then white, then blue again, its value went and came back.


# %%
class Watched(DTR):
    def __init__(self, budget):
        super().__init__(budget)
        self.seen, self.known = [], []

    def output(self, call, tensor, place):
        value = super().output(call, tensor, place)
        self.known.append(weakref.ref(value))
        return value

    def take(self, call, given, result):
        super().take(call, given, result)
        refs = enumerate(self.known)
        self.seen.append({i for i, value in refs if value() is not None and value().here})


# Alt: Three pictures, for room for 20, 12 and 8 values. Each value has a row that is blue while
# the value is here. The less room, the more rows are blue, then white, then blue again.
figure, axes = plt.subplots(1, 3, figsize=(10, 3.2), sharey=True)
drawn = {}
for axis, units in zip(axes, (20, 12, 8), strict=True):
    level = Watched(units * unit)
    under(level, there_and_back, x)
    drawn[units] = max(map(len, level.seen))
    for now, here in enumerate(level.seen):
        axis.bar([now] * len(here), [0.8] * len(here), 1, bottom=list(here), color="#0072B2")
    axis.set(title=f"room for {units} values", xlabel="operators of the program")
axes[0].set(ylabel="value, in the order of making")
figure.tight_layout()
plt.show()
assert drawn[20] <= 20
assert drawn[12] <= 12
assert drawn[8] <= 8

# %% [markdown]
# **Question.** A level could as well run the operator first, and then evict until it is within the
# budget again. By how much would it exceed the budget, and when would that matter most?
#
# <details><summary>Answer</summary>
#
# By the results of the running operator, each time. That matters most when they are large: the peak
# is then the budget plus the largest results. If the machine has no memory left for them, the
# operator does not run at all. `Note [Before, not after]` in
# `csrc/engine/step.h` has the whole argument. `rematfn` also makes room for what a kernel takes for
# the while and gives back, its *scratch*; meta tensors say nothing of that, and our toy does not
# count it.
#
# </details>

# %% [markdown]
# ## 4. Views
#
# Two tensors may stand on one storage. `h.t()` moves no bytes: it is `h`'s storage with other
# strides. PyTorch calls that a *view*.


# %%
def reads_a_view(x, evict):
    h = x.sin()
    v = h.t()
    evict(h)
    return v + 1


found = verdict(reads_a_view, DTR())
print(found)
assert found == "LookupError"

# %% [markdown]
# Our table has two values, one for `h` and one for `v`, each with an `evicted` of its own. When `h`
# goes, the bytes of `v` go too, and nobody says so. Our alarm went off. In a real network it is
# worse: a linear layer reads its weight through a view, and a level that evicts the view has thrown
# away the weight.
#
# **The fix.** What goes and comes is not a tensor. It is the contents of a storage. We put
# something between tensors and values: a **cell** is one storage as the level knows it, and all
# tensors on the storage share it.
#
# But which tensors share a storage? An operator's *schema* tells. It marks what belongs together
# with the same letter, and what is written with a `!`, which part 5 is about.

# %%
for func in (torch.ops.aten.t.default, torch.ops.aten.mul.Tensor, torch.ops.aten.add_.Tensor):
    print(func._schema)


# %%
class Cell:
    """One storage, as the level knows it."""

    def __init__(self, value):
        self.value = value


class Views(DTR):
    def key(self, tensor):
        return tensor

    def cell_of(self, tensor):
        key = self.key(tensor)
        if key not in self.table:
            self.table[key] = Cell(Version(tensor, None, self.clock))
        return self.table[key]

    def value_of(self, tensor):
        return self.cell_of(tensor).value

    def take(self, call, given, result):
        self.account(call, result)
        for i, tensor in enumerate(tensors_in(result)):
            base = self.base_of(call, given, i, tensor)
            if base is not None:
                self.table[self.key(tensor)] = self.cell_of(base)
            else:
                self.table[self.key(tensor)] = Cell(self.output(call, tensor, ("result", i)))

    def base_of(self, call, given, i, tensor):
        """The argument that result i is a view of, by the schema."""
        schema = call.func._schema
        mark = schema.returns[i if len(schema.returns) > 1 else 0].alias_info
        for argument, value in zip(schema.arguments, given[0], strict=False):
            theirs = argument.alias_info
            if mark is not None and theirs is not None and mark.before_set & theirs.before_set:
                return tensors_in(value)[0]
        return None


assert verdict(reads_a_view, Views()) == verdict(reads_a_view, "rematfn") == "same bits"

# %% [markdown]
# What about the strides? They belong to the tensor, and not to the bytes. A call has always noted
# them beside the value, in its `Input`. So a replay of `v + 1` gets the bytes of `h`, and the
# strides of `v`.
#
# The C++ has a `Cell`, too. It hangs on every tensor of its storage (the *backend meta* is a place
# on a tensor that PyTorch leaves to others), and it has the storage's current contents: the
# version. The next part tells why contents are called versions.

# %%
quote("csrc/tensors/level_tensor.h", "// One storage as its level", "struct Cell final")
quote("csrc/tensors/level_tensor.h", "Ref<TensorVersion> version;", "weak_intrusive_ptr<c10")

# %% [markdown]
# **Question.** The program drops `h` and keeps `v`. Do the bytes stay, and can they still be
# evicted and made again?
#
# <details><summary>Answer</summary>
#
# They stay, since `v` holds the storage. And they can go and come back: the table leads from `v` to
# the same cell, the value refers to the storage, and nobody asks whether `h` is still alive.
#
# </details>

# %% [markdown]
# ## 5. Writes
#
# A record says what an operator read. It is of use only while what was read stays what it was.


# %%
def overwrites_its_own(x, evict):
    h = x.sin()
    y = h * 2
    h.add_(1)  # after y was computed from h
    evict(y)
    return y + h


def overwrites_an_argument(x, evict):
    h = x.sin()
    x.add_(1)
    evict(h)
    return h + x


def moves_statistics(x, evict):
    mean, variance = torch.zeros(8), torch.ones(8)
    y = F.batch_norm(x, mean, variance, training=True)
    evict(y)
    return y + 1, mean, variance


writers = [overwrites_its_own, overwrites_an_argument, moves_statistics]
found = [verdict(program, Views()) for program in writers]
print(found)
assert found == ["OTHER BITS"] * 3

# %% [markdown]
# No alarm this time, and wrong numbers: the worst that can happen. The first replays `h * 2` with
# the `h` of after the write. The second has lost the old `x` altogether. The third has its batch
# norm run twice, and each run moves the running statistics.
#
# **The fix** has four parts.
#
# 1. *A write makes a new value.* The cell gets it; calls that were recorded before keep the old
#    one. The old one has lost its bytes to the write, but it still has its producer, so it can be
#    made again, into a storage of its own. These values of one cell, one after the other, are its
#    *versions*.
# 2. *What came from outside is copied before it is overwritten*, for it has no producer. The copy
#    takes the place of the old value in the record. Its bytes count, and it cannot be evicted.
# 3. *A replay writes to a copy.* It is not to write the program's tensors a second time.
# 4. *Not every write is in the schema.* `add_` has its `!`; `native_batch_norm` has none. There is
#    no rule for that; there is a list.

# %%
print(torch.ops.aten.native_batch_norm.default._schema)
HIDDEN_WRITES = {torch.ops.aten.native_batch_norm.default: {"running_mean", "running_var"}}


def nobody():
    return None


class Versions(Views):
    def written(self, func, given):
        names = [argument.name for argument in func._schema.arguments]
        named = {**dict(zip(names, given[0], strict=False)), **given[1]}
        marked = {a.name for a in func._schema.arguments if a.alias_info and a.alias_info.is_write}
        marked |= HIDDEN_WRITES.get(func, set())
        return [tensor for name in named if name in marked for tensor in tensors_in(named[name])]

    def run(self, call, given):
        for tensor in self.written(call.func, given):
            value = self.value_of(tensor)
            if value.producer is None:  # 2: a copy
                value.own, value.program = value.storage.clone(), nobody
                self.values.add(value)
        return super().run(call, given)

    def take(self, call, given, result):
        places = [id(tensor) for tensor in tensors_in(given)]
        for tensor in self.written(call.func, given):
            cell = self.cell_of(tensor)
            if cell.value.producer is None:  # the caller's tensor: its new contents stay, too
                cell.value = Version(tensor, None, self.clock)
            else:  # 1: a new version; the old one has lost the program's storage
                cell.value.program = nobody
                cell.value.evicted = cell.value.own is None
                cell.value = self.output(call, tensor, ("argument", places.index(id(tensor))))
        super().take(call, given, result)

    def arguments(self, call):
        given = super().arguments(call)
        written = {tensor.untyped_storage() for tensor in self.written(call.func, given)}
        copies = {storage: storage.clone() for storage in written}  # 3

        def moved(t):
            storage, view = t.untyped_storage(), (t.storage_offset(), t.size(), t.stride())
            return torch.empty(0, dtype=t.dtype).set_(copies.get(storage, storage), *view)

        return tree_map_only(torch.Tensor, moved, given)


for program in writers:
    assert verdict(program, Versions()) == verdict(program, "rematfn") == "same bits"

# %% [markdown]
# In C++ the journey of an operator has the same stops. Before the kernel runs,
# `save_what_is_overwritten` copies what has no producer; afterwards, `record_write` makes the new
# version. `prepare_writes` gives a replay storages that it may overwrite. And there is the same
# kind of list: an operator, the places of the arguments that it writes, and the place of the flag
# without which it does not write them.

# %%
quote("csrc/engine/step.cpp", "void Step::save_what_is_overwritten", "is_saved(*version)) continue")
quote("csrc/engine/step.cpp", "domain_.snapshot(*version, level_)")
quote("csrc/operators/operator_facts.cpp", "constexpr std::array<HiddenWrite", "rrelu_with_noise_")

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
# The copy takes memory from the write until the last call that read it is forgotten, whether or not
# anything is ever replayed. Without a copy nothing is paid until somebody needs the old `h`; then
# the sine is computed once more. So one pays in memory at once, the other in time, perhaps.
#
# </details>

# %% [markdown]
# ## 6. Random numbers


# %%
def drops_out(x, evict):
    h, _ = torch.native_dropout(x, 0.5, train=True)  # on a GPU, F.dropout calls this
    evict(h)
    return h * 2, torch.rand(3)


found = verdict(drops_out, Versions())
print(found)
assert found == "OTHER BITS"

# %% [markdown]
# A kernel reads more than its arguments. A random one reads the state of a generator, and moves it
# on. So the replay draws other numbers, and then the program itself does, since the generator has
# been moved once more.
#
# **The fix.** A random operator has the tag `nondeterministic_seeded`. The call keeps the state
# that its generator had. The replay puts that back, draws, and puts the present back.


# %%
class Seeded(Versions):
    def record(self, func, given):
        call = super().record(func, given)
        if torch.Tag.nondeterministic_seeded in func.tags:
            call.random = (given[1].get("generator") or torch.default_generator).get_state()
        return call

    def replay(self, call):
        if call.random is None:
            return super().replay(call)
        generator = call.given[1].get("generator") or torch.default_generator
        present = generator.get_state()
        generator.set_state(call.random)
        super().replay(call)
        generator.set_state(present)


assert verdict(drops_out, Seeded()) == verdict(drops_out, "rematfn") == "same bits"
assert torch.Tag.nondeterministic_seeded in torch.ops.aten.native_dropout.default.tags

# %% [markdown]
# `rematfn` restores whatever else a kernel can see: whether gradients are recorded, the default
# dtype, whether deterministic algorithms are asked for.

# %%
quote("csrc/operators/call.h", "// Note [Replay restores what", "restores the present.")

# %% [markdown]
# **Question.** `torch.utils.checkpoint` runs a function a second time, and restores the generator
# before. It keeps one state for each function; we keep one for each random operator. Is ours a
# waste?
#
# <details><summary>Answer</summary>
#
# It costs 5 KB a call on a CPU. But we do not run a function again, we run single calls, in
# whatever order they are needed. The state before the function does not tell what the third dropout
# in it drew. There is a second gain. The function may draw from a generator of its own. Checkpoint
# does not restore that one, and its second run draws another mask, with no error. A replay knows
# which generator the operator was given.
#
# </details>

# %% [markdown]
# ## 7. Aliases
#
# Part 4 believed the schema. Here are three programs on which it is wrong, or has nothing to say.


# %%
def linear_layer(x, evict):
    batch = torch.stack([x, x])
    y = batch @ x  # matrices times a matrix: mm, then _unsafe_view
    y.mul_(3)
    evict(y)
    return y + 1


def unsafe_view(x, evict):
    h = x.sin()
    z = torch.ops.aten._unsafe_view(h, (4, 16))
    z.mul_(3)  # writes the bytes of h, too
    evict(h)
    return h + 1, z + 1


def lends_to_numpy(x, evict):
    h = x.sin()
    array = h.numpy()  # on the same bytes
    evict(h)
    return h + torch.from_numpy(array)


aliases = [linear_layer, unsafe_view, lends_to_numpy]
print(torch.ops.aten._unsafe_view.default._schema)
found = [verdict(program, Seeded()) for program in aliases]
print(found)
assert found == ["LookupError", "OTHER BITS", "RuntimeError"]

# %% [markdown]
# No letter stands in the schema of `_unsafe_view`, and its result is on the storage of its argument
# all the same. The name means: who calls it promises to forget the argument. `batch @ x` does. But
# our level has not forgotten. It has two cells for one storage. In the first program it evicts what
# is in one of them, believes that the other still has its bytes, and the alarm goes off. In the
# second nobody notices: `h` comes back as the sine, and `z`, on the same bytes, has lost its factor
# of 3.
#
# The third is another kind of alias. No operator made it: NumPy holds the bytes. PyTorch knows
# that, and raised an error when we resized the storage.
#
# **The fix** is to delete a rule. Do not ask the schema who shares a storage. Ask the storage. The
# key of the table becomes the storage, and a result is a view if it stands on an argument's
# storage. `numpy()` leaves a mark on the storage that it lends: it cannot be resized any more. So
# what cannot be resized stays.


# %%
class Storages(Seeded):
    def key(self, tensor):
        return tensor.untyped_storage()

    def base_of(self, call, given, i, tensor):
        storage = tensor.untyped_storage()
        return next((t for t in tensors_in(given) if t.untyped_storage() is storage), None)

    def may_go(self, value):
        return super().may_go(value) and value.storage.resizable()


for program in aliases:
    assert verdict(program, Storages()) == verdict(program, "rematfn") == "same bits"
quote("csrc/operators/level_results.cpp", "// Puts handles on results", "never off the schema.")
quote("csrc/tensors/tensor_store.cpp", "// tensor.numpy() leaves", "tensors + queue ||")

# %% [markdown]
# The last line of the C++ finds more than NumPy. It compares how many hold the storage with how
# many tensors the level knows on it. If there are more, somebody else has it, and it stays.
#
# **Question.** `x.data = y` makes the tensor `x` stand on the storage of `y`, without an operator.
# Which of our tables survives that, the one of part 4 or the one of part 7?
#
# <details><summary>Answer</summary>
#
# The one of part 7. It never believed that a tensor stays on its storage: it asks for the storage
# each time. The table of part 4 goes on to find the old cell under the tensor. In `rematfn` the
# cell hangs on the tensor, since that is fast to find, and `cell_of` compares the storage each
# time: `Note [A handle may outlive its storage]`.
#
# </details>

# %% [markdown]
# ## 8. All together
#
# Every program so far, under every level so far, in the order in which we wrote them.

# %%
programs = [chain_of_five, long_chain, reads_a_view, *writers, drops_out, *aliases]
levels = [Lineage, InOrder, DTR, Views, Versions, Seeded, Storages]
found = {p: [verdict(p, make()) for make in levels] + [verdict(p, "rematfn")] for p in programs}
table(
    [(p.__name__, *("ok" if v == "same bits" else v for v in found[p])) for p in programs],
    ["program", *(make.__name__ for make in levels), "rematfn"],
)
for p in programs:
    assert found[p][-2:] == ["same bits", "same bits"]
assert [sum(v == "same bits" for v in column) for column in zip(*found.values(), strict=True)] == [
    1, 2, 2, 3, 6, 7, 10, 10,
]  # fmt: skip

# %% [markdown]
# The hardest test there is: evict all that may go after each operator. Each value is then replayed
# each time that it is read.


# %%
class EvictEverything(Storages):
    def take(self, call, given, result):
        super().take(call, given, result)
        for value in [value for value in self.values if self.may_go(value)]:
            self.evict(value)


for p in [p for p in programs if p not in (long_chain, lends_to_numpy)]:
    assert verdict(p, EvictEverything()) == "same bits"
    everything = rematfn.remat(p, policy=rematfn.testing.EvictEverything())
    assert same_bits(everything(*inputs(p), keep), p(*inputs(p), keep))

# %% [markdown]
# Two programs are left out. With everything evicted, `numpy()` finds no bytes to lend: it asks the
# dispatcher only for a `detach`, and does not say that it is about to read. `rematfn` knows these
# few operators: `Note [What is asked before bytes are read]`. And the long chain would take
# two million replays.
#
# Now a training step, with all that we have fixed in it: views of weights, writes, dropout, and
# autograd, whose backward reads what the forward has saved. The level is active while both run.

# %%
torch.manual_seed(0)
weights = [torch.randn(256, 256) / 16 for _ in range(12)]
batch = torch.randn(256, 256)


def training_step(weights, x, evict):
    leaves = [w.detach().requires_grad_() for w in weights]
    for w in leaves:
        x = F.dropout(torch.relu_((x @ w).add_(0.1)).t(), 0.1)
    loss = x.square().mean()
    return loss.detach(), *torch.autograd.grad(loss, leaves)


def measured(step):
    torch.manual_seed(1)
    with rematfn.testing.MemoryTimeline() as timeline:
        result = step()
    return result, timeline


expected, plain = measured(lambda: training_step(weights, batch, keep))
budget = plain.peak // 2 + 1024  # a little for numbers, which become tensors of a few bytes

level = Storages(budget)
by_toy, toy = measured(lambda: under(level, training_step, weights, batch))
transformed = rematfn.remat(training_step, budget, policy=rematfn.policies.reference.Local())
by_rematfn, real = measured(lambda: transformed(weights, batch, keep))
stats = rematfn.stats(transformed)
counts = (stats.evictions, stats.replays)

MIB = 2**20
table(
    [
        ("plain", "-", f"{plain.peak / MIB:.2f}", 0, 0),
        ("toy", f"{budget / MIB:.2f}", f"{toy.peak / MIB:.2f}", level.evictions, level.replays),
        ("rematfn", f"{budget / MIB:.2f}", f"{real.peak / MIB:.2f}", *counts),
    ],
    ["", "budget, MiB", "peak, MiB", "evictions", "replays"],
)
assert same_bits(by_toy, expected)
assert same_bits(by_rematfn, expected)
assert real.peak <= budget
assert toy.peak - len(weights) * torch.get_rng_state().nbytes <= budget  # see below
assert stats.replays > 0
assert abs(level.replays - stats.replays) <= 0.2 * stats.replays

# %%
# Alt: Live bytes over the allocations of one training step. The plain step rises to a peak of
# twice the budget. The toy and rematfn rise to the budget and stay at it until the backward is
# near its end.
figure, axis = plt.subplots(figsize=(8, 3.2))
lines = [("plain", plain, "#555555"), ("toy", toy, "#D55E00"), ("rematfn", real, "#0072B2")]
for name, timeline, colour in lines:
    axis.plot([n / MIB for n in timeline.bytes], label=name, color=colour, linewidth=1.2)
axis.axhline(budget / MIB, color="black", linestyle="--", linewidth=0.8, label="budget")
axis.set(xlabel="allocations and frees so far", ylabel="live bytes, MiB")
axis.legend(loc="upper right")
figure.tight_layout()
plt.show()

# %% [markdown]
# These are bytes of the allocator, not of our tables. Under a level there are more allocations,
# since it replays. Where its curve falls, the backward uses up the values that stayed; then it has
# the others made again.
#
# `rematfn` stays within the budget. The toy is a little above it. The states of the generator that
# its calls keep are tensors, one for each dropout, and its own table does not count them.
#
# How long is it?

# %%
source = Path(show.__file__).with_name("04_lineage.py").read_text()
classes = {n.name: n for n in ast.parse(source).body if isinstance(n, ast.ClassDef)}


def count_lines(node):
    lines = source.splitlines()[node.lineno - 1 : node.end_lineno]
    return sum(bool(line.strip()) and not line.strip().startswith('"""') for line in lines)


def length_of(level):
    """The lines of a level, without methods that a later class replaces altogether."""
    parts = [classes[cls.__name__] for cls in level.__mro__ if cls.__name__ in classes]
    counted = [classes[name] for name in ("Version", "Input", "Operation")]
    replaced = set()
    for part in parts:
        for method in [node for node in part.body if isinstance(node, ast.FunctionDef)]:
            if method.name not in replaced:
                counted.append(method)
                if f"super().{method.name}" not in ast.unparse(method):
                    replaced.add(method.name)
    return len(parts) + sum(map(count_lines, counted))


whole = length_of(Storages) + count_lines(classes["Cell"])
print("DTR:", length_of(DTR), "lines; with all fixes:", whole)
assert length_of(DTR) < 170

# %% [markdown]
# **What breaks next.** Put the level inside of a transform of `torch.func`.


# %%
def loss(x, evict):
    return x.sin().exp().sum()


try:
    torch.func.grad(lambda x: under(Storages(), loss, x))(x)
except NotImplementedError as error:
    message = str(error)
print(message)
assert "TensorWrapper" in message

gradient = torch.func.grad(rematfn.remat(loss))(x, keep)
assert torch.equal(gradient, torch.func.grad(loss)(x, keep))

# %% [markdown]
# The result is a wrapper of functorch's, and a wrapper has no storage. That is one of four things
# that a mode in Python is not good at. It takes hundreds of microseconds for each operator. It
# sees operators only while it is active, so a backward that comes later reads what was evicted, and
# nobody makes it again. And the scratch of kernels is known to the allocator alone, which is C++.
# Notebook 5 leaves modes, and makes the level a kernel of the dispatcher.
#
# **Question.** Two levels, one inside the other, each a `Storages()` with a budget. An operator
# runs in the inner one. Which of them sees it, and whose budget should its result count against?
#
# <details><summary>Answer</summary>
#
# With modes, the inner one sees it and runs it, and the outer one sees all that the inner one runs:
# the operator, but also replays, as if they were the program's. The result should count
# against both, because its bytes are in memory while both promise a bound. `rematfn` has one
# journey for each operator, through the innermost level; the bytes count in each level around, and
# all share one record. Notebook 5, part 3.
#
# </details>
