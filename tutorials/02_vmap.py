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
# # 2. How vmap works
#
# We have a function of one example, and a thousand examples. A loop calls every operator a thousand
# times. `vmap` gives us a function that calls each operator once. At the end of this notebook we
# have written `vmap` ourselves, in less than a hundred lines. It nests, it stands beside `grad`,
# and we know where each of its parts is in PyTorch.
#
# We build on the dispatcher of notebook 1, which is `tutorials/toy/dispatcher.py`. The notebook
# owes its way of building things to JAX's
# [autodidax](https://docs.jax.dev/en/latest/autodidax.html), and its subject to functorch, which
# is now `torch.func`.

# %%
# SPDX-License-Identifier: Apache-2.0
import inspect
import itertools
import textwrap
from contextlib import contextmanager
from importlib import import_module
from operator import attrgetter

import matplotlib.pyplot as plt
import numpy as np
import torch
import toy
from show import quote, table
from torch import _C
from torch._C import _functorch
from torch._functorch.pyfunctorch import retrieve_all_functorch_interpreters
from torch.utils._python_dispatch import TorchDispatchMode
from toy import Array
from toy import operators as ops
from toy.dispatcher import Key, KeySet, Operator, fallbacks, keys_changed
from toy.levels import Level, Wrapper, active, leave, thread, tree_map, unwrapped

import rematfn

# %% [markdown]
# First look at PyTorch's. A function tells how often it is called, and with what.

# %%
told = []


def tells(row):
    told.append(tuple(row.shape))
    return row.sin().sum()


result = torch.func.vmap(tells)(torch.ones(1000, 3))
print(f"{len(told)} call, with shape {told[0]}, and a result of shape {tuple(result.shape)}")
assert told == [(3,)]

# %% [markdown]
# One call for a thousand examples, and the function believes that it has one of them. To see how, a
# reminder. An operator has a table of kernels, at most one for each key. A call has a set of keys:
# those of its arguments and those that the thread includes, without those that it excludes. The
# highest key decides which kernel runs. A kernel that is *boxed* takes the arguments as one tuple,
# so that it can serve all operators. (Part 4 tells what a *level* is.)

# %%
quote("tutorials/toy/dispatcher.py", "    def __call__", "return self.redispatch")
quote("tutorials/toy/dispatcher.py", "class Key(", "LEVELS = ")

# %% [markdown]
# `tutorials/toy/operators.py` has seventeen operators. At the key `CPU` each has a kernel, which
# hands NumPy's arrays to a function of NumPy. An `Array` is a tensor with numbers in it, and `CPU`
# is its only key.
#
# We want to see which operators arrive at the bottom, and how large their arrays are. For the toy
# we put something in front of the kernels for `CPU`. For PyTorch we use a dispatch mode: it sees
# each operator after functorch and autograd have dealt with it.

# %%
OPERATORS = [value for value in vars(ops).values() if isinstance(value, Operator)]


def shapes_in(args):
    return [tuple(arg.shape) for arg in args if isinstance(arg, (ops.Tensor, torch.Tensor))]


def calls_of_toy(f, *args):
    """The result of f, and the kernels that ran."""
    kernels, calls = {op: op.kernels[Key.CPU] for op in OPERATORS}, []

    def watched(op, keys, args):
        calls.append((op.name, shapes_in(args)))
        return kernels[op](op, keys, args)

    for op in OPERATORS:
        op.kernels[Key.CPU] = watched
    try:
        return f(*args), calls
    finally:
        for op in OPERATORS:
            op.kernels[Key.CPU] = kernels[op]


class Calls(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls.append((func._schema.name.split("::")[1], shapes_in(args)))
        return func(*args, **(kwargs or {}))


def calls_of_torch(f, *args):
    with Calls() as mode:
        return f(*args), mode.calls


def compare_calls(ours, theirs):
    rows = itertools.zip_longest(ours, theirs, fillvalue=("", ""))
    table([(*a, *b) for a, b in rows], ["toy", "shapes", "torch", "shapes"])


x = np.linspace(-1, 1, 12).reshape(4, 3)
w = np.linspace(0, 1, 3)
toy_x, toy_w = Array(x), Array(w)
torch_x, torch_w = torch.from_numpy(x), torch.from_numpy(w)


def loop(f, examples):
    return np.stack([f(Array(example)).data for example in examples])


def one_row(row):
    return ops.total(ops.sin(row), 0)


result, calls = calls_of_toy(loop, one_row, x)
print(len(calls), "kernels ran:", calls[0], calls[1], "...")
assert calls == [("sin", [(3,)]), ("sum", [(3,)])] * 4

# %% [markdown]
# `total` is the toy's `sum`, along one dimension; Python has a `sum` already. Four examples, and
# eight calls. We are after two calls.
#
# The toy module has its `vmap` already. We take its kernels out, so that what we write here is at
# work and nothing else.

# %%
for op in OPERATORS:
    op.kernels.pop(Key.VMAP, None)
del fallbacks[Key.VMAP]

# %% [markdown]
# ## 1. A tensor that hides a dimension
#
# The function is written for one row of shape `(3,)`. We have an array of shape `(4, 3)`. So we
# give the function a tensor that *says* it has shape `(3,)` and holds an array of shape `(4, 3)`.
# Such a tensor is called **batched**. Its key is `VMAP`, so that the dispatcher notices it.


# %%
class Batched(ops.Tensor):
    keys = KeySet.of(Key.VMAP)

    def __init__(self, value):
        self.value = value
        self.shape = value.shape[1:]  # the first dimension is hidden


batched = Batched(toy_x)
print("says", batched.shape, "and holds", batched.value.shape)
try:
    ops.sin(batched)
except NotImplementedError as error:
    message = str(error)
print(message)
assert message == "sin has no kernel for VMAP"

# %% [markdown]
# Inside `torch.func.vmap` we find the same. `maybe_get_bdim` says which dimension of a batched
# tensor is hidden, and `get_unwrapped` gives what it holds.

# %%
BATCHED = _C.DispatchKey.FuncTorchBatched
rows = []


def look(row):
    hidden = _functorch.maybe_get_bdim(row)
    held = tuple(_functorch.get_unwrapped(row).shape)
    rows.append((tuple(row.shape), held, hidden, _C._dispatch_keys(row).has(BATCHED)))
    return row


torch.func.vmap(look, in_dims=0)(torch_x)
torch.func.vmap(look, in_dims=1)(torch_x)
table(rows, ["says", "holds", "hidden dimension", "has the key FuncTorchBatched"])
assert rows == [((3,), (4, 3), 0, True), ((4,), (4, 3), 1, True)]

# %% [markdown]
# The key has the name `FuncTorchBatched`. In PyTorch any dimension can be the hidden one, and
# nothing is moved when `in_dims` says 1. Ours is always the first, so we shall have to move
# dimensions before we begin.
#
# **Question.** Can the function find out how many examples there are?
#
# <details><summary>Answer</summary>
#
# No. `row.shape` is `(3,)`, and `row.shape[0]` is the length of a row. The hidden dimension is not
# in the shape. That is what `vmap` promises: the function cannot tell whether it is called with one
# example or with many.
#
# </details>
#
# ## 2. Batching rules
#
# A **batching rule** says what an operator does with batched tensors. Here it is a function that
# gets the operator and its arguments, where every tensor has the hidden dimension in front.
#
# For an operator that works on each number by itself the rule is to do the same as ever. If a
# dimension is among its arguments, the rule adds 1 to that, since the hidden one comes first.


# %%
def elementwise(op, *xs):
    return op(*xs)


def rule_of_total(op, x, dim):
    return op(x, dim + 1)


# %% [markdown]
# A kernel for `VMAP` is made from a rule: take the values out, follow the rule, and wrap the
# result. When the rule calls `op`, the arguments are arrays. So that call goes to `CPU`.
#
# In `row + w` the tensor `w` is the same for all examples, and nobody has wrapped it. The kernel
# repeats it, so that rules have to deal with one case only.


# %%
def first_kernel(rule):
    def kernel(op, keys, args):
        size = next(arg.value.shape[0] for arg in args if isinstance(arg, Batched))
        values = []
        for arg in args:
            if isinstance(arg, Batched):
                values.append(arg.value)
            elif isinstance(arg, ops.Tensor):
                values.append(ops.expand(arg, (size, *arg.shape)))
            else:
                values.append(arg)
        return Batched(rule(op, *values))

    return kernel


def first_vmap(f):
    def transformed(*args):
        result = f(*(Batched(arg) for arg in args))
        if isinstance(result, Batched):
            return result.value
        return ops.expand(result, (args[0].shape[0], *result.shape))  # the same for all

    return transformed


for op in (ops.sin, ops.add, ops.mul):
    op.kernels[Key.VMAP] = first_kernel(elementwise)
ops.total.kernels[Key.VMAP] = first_kernel(rule_of_total)

result, ours = calls_of_toy(first_vmap(one_row), toy_x)
expected, theirs = calls_of_torch(torch.func.vmap(lambda row: row.sin().sum(0)), torch_x)
compare_calls(ours, theirs)
assert ours == theirs == [("sin", [(4, 3)]), ("sum", [(4, 3)])]
np.testing.assert_allclose(result.data, expected.numpy())

# %% [markdown]
# Two calls, and PyTorch makes the same two. Now the addition.

# %%
result, ours = calls_of_toy(first_vmap(lambda row: row + toy_w), toy_x)
expected, theirs = calls_of_torch(torch.func.vmap(lambda row: row + torch_w), torch_x)
compare_calls(ours, theirs)
assert [name for name, _ in ours] == ["expand", "add"]
assert theirs == [("add", [(4, 3), (3,)])]
np.testing.assert_allclose(result.data, expected.numpy())

# %% [markdown]
# PyTorch does not repeat `w`, because its addition broadcasts. Ours costs one more call, and in
# exchange our rules are short. (`expand` moves no bytes: its result is a view of `w`.)
#
# The other operators have rules of the same kind. Only `expand` needs more than a line. It can add
# dimensions at the front of a shape, and in a batched tensor they have to follow the hidden one.
# (`select` picks one place along a dimension. `embed` is its reverse: zeros, with a tensor at one
# place.)


# %%
def rule_of_expand(op, x, shape):
    ones = (1,) * (1 + len(shape) - len(x.shape))
    return op(ops.reshape(x, (x.shape[0], *ones, *x.shape[1:])), (x.shape[0], *shape))


quote("tutorials/toy/vmap.py", "rules = {", "}")

# %% [markdown]
# In PyTorch a rule is a kernel for the key `FuncTorchBatched`. Many operators need none: they are
# written in terms of other operators, and their kernel for this key takes them apart. PyTorch calls
# such operators *composite* (notebook 1). The dispatcher's tables say who has what. (An *overload*
# is one of several forms of an operator, such as `add.Tensor` and `add.Scalar`.)

# %%
names = [name for name in _C._dispatch_get_all_op_names() if name.startswith("aten::")]


def origin(name, key):
    """What an operator's table says of a key: where its kernel comes from."""
    lines = _C._dispatch_dump_table(name).splitlines()
    (line,) = [line for line in lines if line.startswith(f"{key}:")]
    return line


def what_vmap_does(name):
    kernel = origin(name, "FuncTorchBatched")
    if kernel.endswith("[backend fallback]"):
        return "nothing of its own: the fallback"
    if "BatchRulesDecompositions.cpp" in kernel or ".py:" in kernel:  # some are in Python
        return "is taken apart"
    return "has a rule"


found = {name: what_vmap_does(name) for name in names}
answers = ["has a rule", "is taken apart", "nothing of its own: the fallback"]
rows = [(answer, sum(value == answer for value in found.values())) for answer in answers]
table(rows, ["at `FuncTorchBatched`", "operators of `aten`, overloads counted"])
assert found["aten::sin"] == found["aten::sum.dim_IntList"] == "has a rule"
assert found["aten::linear"] == found["aten::nll_loss_forward"] == "is taken apart"
assert found["aten::randn"] == "nothing of its own: the fallback"
assert sum(count for _, count in rows) == len(names)


def schema(name):
    packet, _, overload = name.removeprefix("aten::").partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")._schema


writes = [schema(name).is_mutable for name in names if found[name] == answers[2]]
assert sum(writes) > len(writes) / 2

# %% [markdown]
# Most of the last row are operators that write into an argument, such as those with `out=`. Part 3
# is about that fallback.
#
# **Question.** What is the rule for `x.sum()`, the sum over all dimensions, when `x` is batched?
#
# <details><summary>Answer</summary>
#
# It is the sum over all dimensions but the hidden one. "All" is a case in which the operator with
# the same arguments would be wrong. The toy avoids it: `Tensor.sum` in
# `tutorials/toy/operators.py` first reshapes to one dimension, and then calls `total` along that.
# Both have simple rules.
#
# </details>
#
# ## 3. What has no rule
#
# Somebody adds an operator and writes no rule. Then we can do what a loop does: pick each example,
# call the operator, and stack the results. This works for every operator that returns a tensor. The
# kernel is boxed, so we write it once. It is the fallback at the key `VMAP`.


# %%
def one_by_one(op, *args):
    """Serve as the rule of any operator: call it for each example."""
    (size,) = {arg.shape[0] for arg in args if isinstance(arg, ops.Tensor)}
    picked = [
        [ops.select(arg, 0, i) if isinstance(arg, ops.Tensor) else arg for arg in args]
        for i in range(size)
    ]
    return ops.stack(0, *(op(*example) for example in picked))


fallbacks[Key.VMAP] = first_kernel(one_by_one)

toy_sorted, torch_sorted = [], []


def toy_sort(x):
    toy_sorted.append(x.shape)
    return np.sort(x)


def torch_sort(x: torch.Tensor) -> torch.Tensor:
    torch_sorted.append(tuple(x.shape))
    return x.sort().values


sort = ops.define("sort", toy_sort)
custom_sort = torch.library.custom_op("vmap_notebook::sort", torch_sort, mutates_args=())
_functorch._set_vmap_fallback_warning_enabled(False)
result = first_vmap(sort)(toy_x)
expected = torch.func.vmap(custom_sort)(torch_x)
print("toy:  ", toy_sorted)
print("torch:", torch_sorted)
assert toy_sorted == torch_sorted == [(3,)] * 4
assert np.array_equal(result.data, expected.numpy())

# %% [markdown]
# PyTorch falls back as well. It warns of the cost; we have switched the warning off, to keep the
# page short. It can also be told to refuse.

# %%
_functorch._set_vmap_fallback_enabled(False)
try:
    torch.func.vmap(custom_sort)(torch_x)
except RuntimeError as error:
    message = str(error)
_functorch._set_vmap_fallback_enabled(True)
print(message)
assert message.startswith("vmap_notebook::sort hit the vmap fallback")

# %% [markdown]
# Here is the price. We count the kernels that run for one program, by the number of examples. The
# second program has one more operator than the first, and no rule for it.

# %%
OPERATORS.append(sort)
sizes = [1, 8, 16, 32, 64]


def sorted_row(row):
    return one_row(sort(row))


programs = {
    "a loop": lambda data: loop(one_row, data),
    "vmap, one operator without a rule": lambda data: first_vmap(sorted_row)(Array(data)),
    "vmap, each operator with its rule": lambda data: first_vmap(one_row)(Array(data)),
}
counts = {
    name: [len(calls_of_toy(program, np.ones((size, 3)))[1]) for size in sizes]
    for name, program in programs.items()
}
# Alt: Kernels that ran, by the number of examples. Two straight lines rise together: a loop, and
# vmap with one operator that has no rule. vmap with rules for all is flat, at two.
figure, axes = plt.subplots(figsize=(6.4, 3.2))
for name, marker in zip(counts, "os^"):
    axes.plot(sizes, counts[name], marker=marker, label=name)
axes.set(xlabel="examples", ylabel="kernels that ran", xticks=sizes, ylim=0)
axes.legend(frameon=False)
plt.show()
assert counts["a loop"] == [2 * size for size in sizes]
assert counts["vmap, each operator with its rule"] == [2] * len(sizes)
assert counts["vmap, one operator without a rule"] == [2 * size + 3 for size in sizes]
OPERATORS.remove(sort)

# %% [markdown]
# The fallback costs two kernels for each example, `select` and `sort`, and one `stack`. So a single
# operator without a rule makes the program as long as a loop.
#
# **Question.** The fallback picks examples with the operators `select` and `stack`. Why not with
# NumPy, on the arrays inside?
#
# <details><summary>Answer</summary>
#
# What a batched tensor holds need not be an array. We are about to nest transforms. Then it may
# hold another batched tensor, or one that `grad` watches. Only operators work on all of these.
#
# </details>
#
# ## 4. Two at once
#
# Let us make a table of products: all `x` times all `y`. One `vmap` is for the `x`, and one inside
# it for the `y`.


# %%
def products(vmap, xs, ys):
    return vmap(lambda x: vmap(lambda y: x * y)(ys))(xs)


result = products(first_vmap, toy_w, toy_w)
right = products(torch.func.vmap, torch_w, torch_w)
print("ours: ", result.data.tolist())
print("right:", right.tolist())
assert result.shape == right.shape
assert np.array_equal(result.data, [w * w] * 3)  # that is not the table

# %% [markdown]
# No error, the right shape, and wrong numbers. In `x * y` both are batched, so our kernel took both
# values out and multiplied them number by number. But the dimension hidden in `x` is that of the
# outer `vmap`, and the one in `y` is that of the inner. They have nothing to do with each other.
#
# So each batched tensor has to know *whose* it is. One active application of a transform is called
# a **level**. The active levels form a **stack**, the innermost last, and a tensor that is wrapped
# knows its level. A kernel takes out only what its own level has wrapped. So for the inner level
# `x` is the same for all examples, like `w` above.
#
# It remains to say which level goes first, when several are active. It is the innermost. It has
# wrapped last, so its wrappers are what the program holds, and the wrappers of other levels are
# inside. What this level does, it does by calling operators, and those go to the level around it.
# `tutorials/toy/levels.py` is made that way.

# %%
quote("tutorials/toy/levels.py", "class Level:", "self.shape = value.shape")
quote("tutorials/toy/levels.py", "def front(", "fallbacks[Key.LEVELS] = front")

# %% [markdown]
# While a level is on the stack, the thread includes the key `LEVELS`. It is higher than all
# others, so every operator comes to `front` first, whatever its arguments are. `front` takes the
# innermost level from the stack, runs the kernel that the operator has for that level's key, and
# puts the level back. `active` makes the levels that it is given the stack, `thread.stack`, until
# its block ends. (The condition with `included` passes over levels that are not reached through
# `front`. Here there are none; notebook 8 has one.)
#
# The kernel begins by asking for the level that `front` has just taken down, which is *in charge*.
# It also empties `in_charge`, so that a kernel that did not come through `front` finds no level.

# %%
quote("tutorials/toy/levels.py", "def unwrapped(", "return level, mine")

# %% [markdown]
# Now `vmap` for good. The class is a level that knows the number of examples. The kernel differs
# from our first one in that it asks the level what belongs to it.


# %%
class Vmap(Level):
    key = Key.VMAP

    def __init__(self, size):
        self.size = size

    def wrap(self, value):
        return Wrapper(self, value, value.shape[1:])

    def repeated(self, value):
        """Give a tensor that is the same for all examples a dimension to hide."""
        return ops.expand(value, (self.size, *value.shape))


def batching_rule(rule):
    """Make a kernel from a rule, whose tensors have the hidden dimension in front."""

    def kernel(op, keys, args):
        level, mine, values = unwrapped(op, args)
        if not any(mine):
            return op(*args)  # nothing of this level
        batched = [
            level.repeated(value) if isinstance(value, ops.Tensor) and not own else value
            for value, own in zip(values, mine)
        ]
        return level.wrap(rule(op, *batched))

    return kernel


def to_front(x, dim):
    dims = list(range(len(x.shape)))
    return x if dim == 0 else ops.permute(x, (dims.pop(dim), *dims))


# %% [markdown]
# The function `vmap` puts a level on the stack, wraps the arguments, runs `f`, and takes the
# results out. A result that no batched tensor went into is repeated. (`tree_map` is for functions
# that return a tuple. `leave` tells whoever wants to know that a result leaves; here nobody does.)


# %%
def vmap(f, in_dims=0):
    """Return f for many examples; in_dims says where each argument has them."""

    def transformed(*args):
        dims = in_dims if isinstance(in_dims, tuple) else (in_dims,) * len(args)
        (size,) = {x.shape[d] for x, d in zip(args, dims) if d is not None}
        level = Vmap(size)
        inputs = [x if d is None else level.wrap(to_front(x, d)) for x, d in zip(args, dims)]
        with active(*thread.stack, level):
            result = f(*inputs)
        values = tree_map(lambda t: t.value if level.owns(t) else level.repeated(t), result)
        return tree_map(leave, values)

    return transformed


module = import_module("toy.vmap")  # the name toy.vmap is that of the function
for op, rule in module.rules.items():
    op.kernels[Key.VMAP] = batching_rule(rule)
fallbacks[Key.VMAP] = batching_rule(one_by_one)

result = products(vmap, toy_w, toy_w)
print(result.data.tolist())
assert np.array_equal(result.data, products(torch.func.vmap, torch_w, torch_w).numpy())

# %% [markdown]
# That is the table of products. What we have written in cells is what the module has. We compare
# the texts.

# %%
parts = [vmap, batching_rule, to_front, one_by_one, elementwise, rule_of_expand]
parts += [Vmap.__init__, Vmap.wrap, Vmap.repeated]
for part in parts:
    same = attrgetter(part.__qualname__)(module)
    assert inspect.getsource(part) == inspect.getsource(same)
length = len(inspect.getsource(module).splitlines())
print(len(parts), "functions of tutorials/toy/vmap.py, which has", length, "lines in all")
assert length < 100

# %% [markdown]
# We follow the product `x * y` on its way. Each row is a kernel that runs: its key, the level, and
# the shapes that the arguments say they have.

# %%
journey = []


@contextmanager
def watching_products():
    at_vmap, at_cpu = ops.mul.kernels[Key.VMAP], ops.mul.kernels[Key.CPU]

    def watched_vmap(op, keys, args):
        level = 1 + len(thread.stack)  # it has been taken from the stack
        journey.append(("VMAP", level, shapes_in(args)))
        return at_vmap(op, keys, args)

    def watched_cpu(op, keys, args):
        journey.append(("CPU", "", shapes_in(args)))
        return at_cpu(op, keys, args)

    ops.mul.kernels.update({Key.VMAP: watched_vmap, Key.CPU: watched_cpu})
    try:
        yield
    finally:
        ops.mul.kernels.update({Key.VMAP: at_vmap, Key.CPU: at_cpu})


with watching_products():
    products(vmap, Array(np.ones(5)), Array(np.ones(3)))
table(journey, ["key", "level", "shapes"])
assert [row[2] for row in journey] == [[(), ()], [(3,), (3,)], [(5, 3), (5, 3)]]

# %% [markdown]
# Level 2, the inner one, has 3 examples. It repeats `x` three times; `x` is still batched by the
# outer level. That has 5 examples, and repeats `y`. At the bottom there is one multiplication for
# all fifteen products.
#
# ```text
#   the program:    x * y                          stack: 1, 2
#      LEVELS  ->   front takes level 2 down
#      VMAP    ->   its rule: (x repeated) * y     stack: 1
#      LEVELS  ->   front takes level 1 down
#      VMAP    ->   its rule:  x * (y repeated)    stack: empty
#      CPU     ->   NumPy
# ```
#
# ### functorch's interpreter stack
#
# functorch says *interpreter* for what a level does. It has a stack of them, and a key that takes
# the part of our `LEVELS`: `FuncTorchDynamicLayerFrontMode`. A second key, lower than those
# of autograd, is `FuncTorchDynamicLayerBackMode`. The front one takes an operator to the innermost
# interpreter. That one may let autograd work on the operator, since a level of functorch's `grad`
# records with PyTorch's own autograd. After that the operator comes to the back one, which takes
# the level down and begins anew with the levels around it. In our toy a level's kernel calls the
# operator itself, so we need no second key.

# %%
FRONT = _C.DispatchKey.FuncTorchDynamicLayerFrontMode
BACK = _C.DispatchKey.FuncTorchDynamicLayerBackMode
keys = _C._dispatch_keys(torch_w) | _C.DispatchKeySet(FRONT) | _C.DispatchKeySet(BACK)
order = []
while (key := keys.highestPriorityTypeId()) != _C.DispatchKey.Undefined:
    order.append(key)
    keys = keys.remove(key)
print("the highest first:", *(key.name for key in order), sep="\n    ")
assert order[0] == FRONT
assert order.index(_C.DispatchKey.AutogradCPU) < order.index(BACK)
assert order[-1] == _C.DispatchKey.CPU

seen = {}


def of_toy(x):
    def inner(y):
        stack = [(type(level).__name__, i) for i, level in enumerate(thread.stack, 1)]
        seen["toy"] = stack, Key.LEVELS in thread.included
        return x * y

    return vmap(inner)(toy_w)


def of_torch(x):
    def inner(y):
        stack = [(i.key().name, i.level()) for i in retrieve_all_functorch_interpreters()]
        seen["torch"] = stack, _C._dispatch_tls_local_include_set().has(FRONT)
        return x * y

    return torch.func.vmap(inner)(torch_w)


vmap(of_toy)(toy_w)
torch.func.vmap(of_torch)(torch_w)
rows = [(name, *value) for name, value in seen.items()]
table(rows, ["", "stack", "the thread includes the front's key"])
assert seen["toy"] == seen["torch"] == ([("Vmap", 1), ("Vmap", 2)], True)
assert not _C._dispatch_tls_local_include_set().has(FRONT)  # no level is active here

# %% [markdown]
# `torch.func.vmap` is written in Python, and goes the way of ours. It begins a level, wraps, calls,
# takes out, and ends the level. With its own parts we can do that by hand. (The word `error` is
# about random numbers. Part 5 comes to that.)


# %%
def vmap_by_hand(f):
    def transformed(x):
        level = _functorch._vmap_increment_nesting(x.shape[0], "error")
        try:
            result = f(_functorch._add_batch_dim(x, 0, level))
            return _functorch._remove_batch_dim(result, level, x.shape[0], 0)
        finally:
            _functorch._vmap_decrement_nesting()

    return transformed


assert torch.equal(products(vmap_by_hand, torch_w, torch_w), right)
print("the table of products, by hand:", products(vmap_by_hand, torch_w, torch_w).tolist())

# %% [markdown]
# **Question.** In the first row of the journey both shapes are `()`. Could the kernel of level 2
# have looked at the shapes to find out what is batched by whom?
#
# <details><summary>Answer</summary>
#
# No. Both are batched, and both say `()`. Only the level that is written in the wrapper tells them
# apart. The shapes of the values are no help either: with as many `x` as `y` they are equal. That
# was our wrong result.
#
# </details>
#
# ## 5. Nothing to wrap
#
# Some operators make numbers from nothing, such as `randn`. Inside `vmap`, shall each example have
# random numbers of its own, or all the same? The operator has no tensor among its arguments. So no
# wrapper brings a key along, and a kernel for `FuncTorchBatched` would never be asked.
#
# Our toy can answer at once, since `front` gets *every* operator while a level is active. We give
# the operator a kernel of its own at `VMAP`. (At the bottom such a call has no key, so here the
# thread includes `CPU`. PyTorch has `BackendSelect` for that: notebook 1.)

# %%
generator = np.random.default_rng(0)
noise = ops.define("noise", lambda *shape: generator.standard_normal(shape))


def different(op, keys, args):
    level, _, shape = unwrapped(op, args)
    return level.wrap(op(level.size, *shape))


def add_noise(row):
    return row * 0.0 + noise(3)


with keys_changed(include=KeySet.of(Key.CPU)):
    same_for_all = vmap(add_noise)(toy_x).data  # the fallback finds nothing wrapped
    noise.kernels[Key.VMAP] = different
    one_for_each = vmap(add_noise)(toy_x).data
print("different rows without the kernel:", len(np.unique(same_for_all, axis=0)))
print("different rows with it:", len(np.unique(one_for_each, axis=0)))
assert len(np.unique(same_for_all, axis=0)) == 1
assert len(np.unique(one_for_each, axis=0)) == 4

# %% [markdown]
# ### What is the `VmapMode` key for today?
#
# functorch has two keys where we have one. `FuncTorchBatched` is on tensors. `FuncTorchVmapMode` is
# on no tensor: the thread includes it while an interpreter of `vmap` is at work. Such a key is
# called a *mode key*. Most operators fall through at it. Those that do not are there for random
# numbers.

# %%
at_mode = [name for name in names if "fallthrough" not in origin(name, "FuncTorchVmapMode")]
bases = sorted({name.removeprefix("aten::").split(".")[0] for name in at_mode})
print(len(at_mode), "overloads, of")
print(textwrap.fill(", ".join(name for name in bases if name[0] != "_"), 80))
assert {"randn", "bernoulli", "dropout", "randperm"} <= set(bases)
assert not {"sin", "add", "sum", "zeros"} & set(bases)

# %% [markdown]
# The kernels do what the argument `randomness` says. They refuse unless we have said what we want.


# %%
def torch_add_noise(row):
    return row * 0.0 + torch.randn(3, dtype=row.dtype)


rows = []
for randomness in ("error", "same", "different"):
    try:
        result = torch.func.vmap(torch_add_noise, randomness=randomness)(torch_x)
        rows.append((randomness, len(result.unique(dim=0))))
    except RuntimeError as error:
        rows.append((randomness, str(error).split(".")[0]))
table(rows, ["randomness", "different rows"])
assert rows[0][1] == "vmap: called random operation while in randomness error mode"
assert rows[1:] == [("same", 1), ("different", 4)]

# %% [markdown]
# And `VmapMode`, without `FuncTorch` in its name? PyTorch had a `vmap` before functorch. It has a
# key for tensors, `Batched`, and a mode key, `VmapMode`. `torch.autograd` still uses that `vmap`.
# One place is `torch.autograd.grad` with `is_grads_batched=True`, which runs one backward for many
# gradients. We look from inside such a backward.

# %%
seen = []


class LookInside(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        seen.append((_C._dispatch_keys(gradient), _C._dispatch_tls_local_include_set()))
        return 2 * gradient


leaf = torch.ones(3, requires_grad=True)
result = LookInside.apply(leaf)
(rows,) = torch.autograd.grad(result, leaf, torch.eye(3), is_grads_batched=True)
((keys, included),) = seen
print("the gradient's keys:", keys)
print("the thread includes:", included)
assert torch.autograd.functional._vmap is torch._vmap_internals._vmap  # another place
assert "Batched" in str(keys)
assert "VmapMode" in str(included)
assert "FuncTorch" not in str(keys) + str(included)
assert torch.equal(rows, 2 * torch.eye(3))

# %% [markdown]
# **Question.** `torch.zeros(3)` inside `vmap` has no tensor among its arguments either. Why does it
# need no kernel at the mode?
#
# <details><summary>Answer</summary>
#
# All examples get the same zeros, and that is right. The result is a plain tensor, the same for
# all, and rules know how to deal with such a tensor. Only where examples must be told apart does
# somebody have to step in.
#
# </details>
#
# ## 6. `grad` beside it
#
# Nothing in `levels.py` is about batches. A transform needs a key, a level, and a kernel for each
# operator at its key. Here is the kernel of `grad`, in `tutorials/toy/grad.py`.

# %%
quote("tutorials/toy/grad.py", "def differentiable(", "return kernel")
quote("tutorials/toy/grad.py", "    ops.sin: lambda", "    ops.mul: lambda")

# %% [markdown]
# It takes out what its level has wrapped, runs the operator, and wraps the result, as the kernel of
# `vmap` does. Beside that it makes a *node*: from which nodes the inputs came, and a function that
# pulls a gradient back through this operator. In the rules `g` is the gradient that comes in, and
# `r` the operator's result. When `f` has returned, `backward` goes through the nodes, the latest
# first. The rules compute with operators. So if there are levels around, those see the backward,
# too: they may record it, or run it for many examples at once. (A node also notes the
# stack of levels. Notebook 8 needs that.)
#
# The two transforms combine in any order.


# %%
def toy_loss(row):
    return ops.total(ops.sin(row) * toy_w, 0)


def torch_loss(row):
    return (row.sin() * torch_w).sum()


def combinations(vmap, grad, loss):
    """Gradients for each example; and the gradient of a sum over all examples."""
    return {
        "vmap(grad(f))": vmap(grad(loss)),
        "grad(vmap(f))": grad(lambda x: vmap(loss)(x).sum()),
        "vmap(grad(sum of grad(f)))": vmap(grad(lambda row: grad(loss)(row).sum())),
    }


mine = combinations(vmap, toy.grad, toy_loss)
theirs = combinations(torch.func.vmap, torch.func.grad, torch_loss)
rows = []
for name in mine:
    (result, ours), (expected, others) = (
        calls_of_toy(mine[name], toy_x),
        calls_of_torch(theirs[name], torch_x),
    )
    np.testing.assert_allclose(result.data, expected.numpy(), rtol=1e-12)
    counts = [
        [sum(called == op for called, _ in calls) for op in ("sin", "cos")]
        for calls in (ours, others)
    ]
    assert counts[0] == counts[1]
    of_interest = [shapes for called, shapes in ours + others if called in ("sin", "cos")]
    assert all(shape == (4, 3) for shapes in of_interest for shape in shapes)
    rows.append((name, *counts[0], *counts[1]))
table(rows, ["", "sin: toy", "cos: toy", "sin: torch", "cos: torch"])

# %% [markdown]
# The results agree, and so do the numbers of sines and cosines that were computed. Each of them was
# for all four examples, of shape `(4, 3)`.
#
# Levels also keep *derivatives* apart. Take a derivative inside another one, of a product of both
# variables. The derivative of *x y* by *y* is *x*. So the outer function is *x x*, and its
# derivative at 3 is 6. A `grad` that took the inner derivative for a constant would find 3.

# %%
in_toy = toy.grad(lambda x: x * toy.grad(lambda y: x * y)(Array(5.0)))(Array(3.0))
three, five = torch.tensor(3.0), torch.tensor(5.0)
in_torch = torch.func.grad(lambda x: x * torch.func.grad(lambda y: x * y)(five))(three)
print(in_toy.data, in_torch.item())
assert in_toy.data == in_torch.item() == 6.0

interpreters = []


def inside(row):
    interpreters.extend(i.key().name for i in retrieve_all_functorch_interpreters())
    return row.sum()


torch.func.vmap(torch.func.grad(inside))(torch_x)
print("inside vmap(grad(f)):", interpreters)
assert interpreters == ["Vmap", "Grad"]

# %% [markdown]
# **Question.** In `vmap(grad(f))`, which level sees an operator of `f` first? Which of them runs
# the backward?
#
# <details><summary>Answer</summary>
#
# `grad` is innermost, so it sees the operator first. It records `sin` of one row; the row is
# batched, but that is the business of the level around it. The backward is run by `grad`, when `f`
# has returned. By then its level has ended, and the level of `vmap` is still active. So each
# operator of the backward works on all examples.
#
# </details>
#
# ## 7. Dead wrappers
#
# A function may store a tensor somewhere outside. When the level has ended, the wrapper is still
# there. It has the key of its level, and no level that could be asked. We call it **dead**.

# %%
kept = {}


def toy_keeps(x):
    kept["toy"] = ops.sin(x)
    return kept["toy"]


def torch_keeps(name):
    def keeps(x):
        kept[name] = x.sin()
        return kept[name]

    return keeps


vmap(toy_keeps)(toy_w)
torch.func.vmap(torch_keeps("vmap"))(torch_w)
torch.func.grad(torch_keeps("grad"))(torch.tensor(1.0))

rows = []
for name in ("toy", "vmap", "grad"):
    try:
        sum_ = kept[name] + 1.0
        rows.append((name, f"a plain tensor: {sum_.item():.4f}"))
    except RuntimeError as error:
        rows.append((name, str(error).split(" (see")[0]))
table(rows, ["kept by", "kept + 1"])
assert "of a level that has ended" in rows[0][1]
assert rows[1][1].startswith("Either your tensor may have escaped")
assert rows[2][1] == f"a plain tensor: {np.sin(1.0) + 1:.4f}"

# %% [markdown]
# In the toy the stack is empty, so nobody includes `LEVELS`. The highest key is the wrapper's
# own. Its kernel runs, finds that no level is in charge, and says so. functorch's kernels for
# `FuncTorchBatched` do the same.
#
# For `grad` functorch does something else. The key of its wrappers is `FuncTorchGradWrapper`. There
# it has a fallback, which takes the values out of dead wrappers and goes on with those.

# %%
GRAD_WRAPPER = _C.DispatchKey.FuncTorchGradWrapper
wrapper = kept["grad"]
rows = [
    (name, _functorch.is_dead_tensor_wrapper(t), _C._dispatch_keys(t).has(GRAD_WRAPPER))
    for name, t in [("kept", wrapper), ("kept + 1", wrapper + 1)]
]
table(rows, ["", "is a dead wrapper", "has the key FuncTorchGradWrapper"])
assert rows == [("kept", True, True), ("kept + 1", False, False)]
assert origin("aten::add.Tensor", "FuncTorchGradWrapper").endswith("[backend fallback]")

# %% [markdown]
# **Question.** Why can a dead wrapper of `grad` be replaced by its value, and one of `vmap` cannot?
#
# <details><summary>Answer</summary>
#
# A wrapper of `grad` has the shape and the numbers of its value. It only says "watch this", and
# nobody watches any more. A wrapper of `vmap` stands for one example, and its value has all of
# them. The program would get a tensor of another shape than it has seen.
#
# </details>
#
# ## 8. Where `rematfn` stands
#
# We hold the whole against `torch.func.vmap`, with another dimension in front, an argument that is
# the same for all, and a matrix product.


# %%
def of_row(m, row, matrix):
    layer = m.sin(m.reshape(row, (1, 4)) @ matrix)
    return (layer * m.exp(-layer)).sum()


data, matrix = np.linspace(-1, 1, 20).reshape(4, 5), np.linspace(-1, 1, 12).reshape(4, 3)
for vmaps in (1, 2):
    in_toy = vmap(lambda row, m: of_row(ops, row, m), in_dims=(1, None))
    in_torch = torch.func.vmap(lambda row, m: of_row(torch, row, m), in_dims=(1, None))
    arguments = data, matrix
    if vmaps == 2:
        in_toy = vmap(in_toy, in_dims=(None, 0))
        in_torch = torch.func.vmap(in_torch, in_dims=(None, 0))
        arguments = data, np.stack([matrix, -matrix])
    result = in_toy(*map(Array, arguments))
    expected = in_torch(*map(torch.from_numpy, arguments))
    np.testing.assert_allclose(result.data, expected.numpy(), rtol=1e-12)
    print(vmaps, "of vmap:", result.shape, tuple(expected.shape))

# %% [markdown]
# What is `vmap` to `rematfn`? `rematfn` evicts tensors and makes them again. Its key is lower
# than all those we have met, except `CPU`: by the time it is its turn, the wrappers are off. So it
# sees the operators that our dispatch mode sees, with all examples in one tensor. (`rematfn.record`
# runs a function once, and notes the operators that its level sees.)

# %%
quote("csrc/tensors/dispatch_key.h", "// A level must see operators", "unwrap above us")


def last_program(row):
    return (row.sin() * torch_w).exp().sum(0)


def recorded(f, x):
    events = rematfn.record(f, x)._core.events()
    return [data[0].split("::")[1].split(".")[0] for kind, data in events if kind == "call"]


_, theirs = calls_of_torch(torch.func.vmap(last_program), torch_x)
ours = recorded(torch.func.vmap(last_program), torch_x)
table(itertools.zip_longest([name for name, _ in theirs], ours), ["below vmap", "recorded"])
assert ours == [name for name, _ in theirs] == ["sin", "mul", "exp", "sum"]

# %% [markdown]
# It does not matter which transform is inside and which around. The toy has a `remat` that is made
# in the same way: its key `REMAT` comes just before `CPU`. Notebook 8 shows it at work.
#
# **Question.** The levels of `vmap` and `grad` wrap tensors, and the innermost level has its turn
# first. Suppose that a level of `remat` did both as well. What would happen to memory in
# `grad(remat(f))`?
#
# <details><summary>Answer</summary>
#
# The level of `remat` would be innermost, and come first. It would hand each operator on to `grad`,
# and `grad` keeps the values that its backward needs. `remat` could then drop its own wrappers, and
# no byte would become free: the record of `grad` would hold all of them. So `remat` has to be below
# `grad`, whatever the order of the calls.
#
# </details>
#
# **What comes next.** Notebook 3 looks at what a backward keeps, and at the oldest way to keep
# less.
