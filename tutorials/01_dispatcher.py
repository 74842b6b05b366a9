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
# # 1. The dispatcher on one page
#
# You write `x.sin()`. Somebody has to compute the sine on the right device. But before that,
# autograd may have to record the operator, `vmap` may have to turn it into another, and a profiler
# may want to count it. What decides who gets a turn, and in which order, is PyTorch's *dispatcher*.
#
# **Let's build ourselves a dispatcher.** At the end of this notebook we have one, in some three
# hundred lines of Python, checks included. After each step we look at the same thing in PyTorch,
# and compare. The last part shows where `rematfn` stands in it.
#
# The way of telling, one problem after the other, is that of *How does the dispatcher work?* on
# [dev-discuss.pytorch.org](https://dev-discuss.pytorch.org/t/how-does-the-dispatcher-work/3358).
# Another good text is Edward Yang's [Let's talk about the PyTorch
# dispatcher](https://blog.ezyang.com/2020/09/lets-talk-about-the-pytorch-dispatcher/).

# %%
# SPDX-License-Identifier: Apache-2.0
import functools
import math
import threading
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from show import quote, table
from torch import _C
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

x = torch.linspace(-1, 1, 4).reshape(2, 2)

# %% [markdown]
# ## 1. Two lists that grow
#
# An **operator** is what a program can ask for: `sin`, `mul`, `view`. PyTorch has thousands, and
# each library may add more. A **kernel** is a function that does what an operator asks for, in one
# setting. There are kernels for the CPU, for CUDA, for sparse tensors and so on, and new devices
# come up.
#
# So there are two lists, and both grow. A class with a method for each operator does not do:
# whoever adds an operator would have to change each class. A chain of `if` in each operator does
# not do, either: whoever adds a device would have to change each operator. A **table** does. It has
# a row for each operator and a column for each setting, and anybody can fill in a cell.
#
# In our toy a tensor is a list of numbers, and the settings are devices. Operators get their
# methods by way of `method`, so that later cells can replace one by a better one.


# %%
class Operator:
    def __init__(self, schema):
        self.schema = schema
        self.name = schema.partition("(")[0]
        self.kernels = {}  # its row of the table

    def __call__(self, *args):
        return self.call(*args)


def method(function):
    setattr(Operator, function.__name__, function)
    return function


@dataclass(eq=False)
class Numbers:
    data: list
    device: str


operators = {}


def define(schema):
    op = Operator(schema)
    operators[op.name] = op
    return op


def impl(name, setting):
    """Fill in a cell of the table."""

    def decorate(function):
        operators[name].kernels[setting] = function
        return function

    return decorate


@method
def call(op, *args):
    setting = next(a.device for a in args if isinstance(a, Numbers))
    return op.kernels[setting](*args)


sin = define("sin(Tensor x) -> Tensor")


@impl("sin", "CPU")
def sin_cpu(x):
    return Numbers([math.sin(number) for number in x.data], "CPU")


@impl("sin", "CUDA")
def sin_cuda(x):
    return Numbers([math.sin(number) for number in x.data], "CUDA")  # let us pretend


for device in ("CPU", "CUDA"):
    print(sin(Numbers([0.0, 1.0], device)))
assert sin(Numbers([0.0], "CUDA")).device == "CUDA"

# %% [markdown]
# The text that `define` is given is the operator's **schema**: its name, and the types of its
# arguments and results. We come back to it in part 4.
#
# PyTorch has the same two calls. In C++ one writes `TORCH_LIBRARY(name, m) { m.def(schema); }` and
# `TORCH_LIBRARY_IMPL(name, key, m) { m.impl(operator, function); }`. In Python a
# `torch.library.Library` has both. `_dispatch_dump` prints what has been filled in for an operator.


# %%
def dumped(name):
    """What torch's dispatcher knows of an operator, without files and line numbers."""
    lines = _C._dispatch_dump(name).splitlines()
    rows = [line.partition(": ") for line in lines if line]
    return {key: text[text.find("[ ") :] if " :: " in text else text for key, _, text in rows}


library = torch.library.Library("notebook1", "DEF")
library.define("scale(Tensor x, float by) -> Tensor")
library.impl("scale", lambda x, by: x * by, "CPU")
print(torch.ops.notebook1.scale(x, 2.0))
ours, sine = dumped("notebook1::scale"), dumped("aten::sin")
some = ["CPU", "SparseCPU", "Meta", "FuncTorchBatched"]  # and there are more
count = len(_C._dispatch_get_all_op_names())
print(count, "operators; each overload, such as mul.Tensor and mul.Scalar, is one")
print("scale:", ours["schema"], "|", *(key for key in some if key in ours))
print("sin:  ", sine["schema"], "|", *(key for key in some if key in sine))
assert torch.equal(torch.ops.notebook1.scale(x, 2.0), 2 * x)
assert [key for key in some if key in ours] == ["CPU"]
assert set(some) <= set(sine)
assert count > 2000

# %% [markdown]
# (`aten` is the library of PyTorch's own operators.) What we called a setting is a **dispatch key**
# there. The first three of these keys are a device or a kind of tensor. `FuncTorchBatched` is
# something else: it is `vmap`. So a dispatch key is a reason to treat an operator in a way of its
# own. The device is one such reason among several.
#
# **Question.** Suppose that our toy had a `mul` of two tensors. What would happen if one of them is
# on the CPU and the other on CUDA?
#
# <details><summary>Answer</summary>
#
# The first tensor decides. So the CPU's kernel might read an address of the GPU. We need a rule
# that looks at all arguments. That is the next part.
#
# </details>

# %% [markdown]
# ## 2. More than one reason
#
# Take a tensor on the CPU whose operators autograd has to record. So there are two reasons to treat
# its operators in a way of their own: autograd and the device. Autograd comes first: it records the
# operator, and then wants it to be computed. So a tensor has a **set of keys**, and the keys have
# an **order**. The highest key in the set gets its turn first.
#
# The toy has nine keys. PyTorch has all of them, in this order, as the cell after the next checks.
# There the names of the last two begin with `TESTING_ONLY_`.

# %%
KEYS = [
    "CPU",  # compute; this is the lowest
    "CUDA",
    "BackendSelect",  # find out the device, where no tensor tells it
    "ADInplaceOrView",  # keep account of writes and views
    "AutogradCPU",  # record
    "AutogradCUDA",
    "AutocastCPU",  # cast to a smaller type
    "GenericWrapper",  # free, for part 6
    "GenericMode",  # free; this is the highest
]


@dataclass(frozen=True)
class KeySet:
    """A set of keys, as the bits of a number: the highest key is the highest bit."""

    bits: int = 0

    @staticmethod
    def of(*keys):
        return KeySet(sum(1 << KEYS.index(key) for key in set(keys)))

    def __or__(self, other):
        return KeySet(self.bits | other.bits)

    def __and__(self, other):
        return KeySet(self.bits & other.bits)

    def __sub__(self, other):
        return KeySet(self.bits & ~other.bits)

    def __iter__(self):
        """From high to low."""
        return (key for key in reversed(KEYS) if self.bits >> KEYS.index(key) & 1)

    @property
    def highest(self):
        return KEYS[self.bits.bit_length() - 1] if self.bits else None

    def below(self, key):
        """Those lower than `key`."""
        return KeySet(self.bits & ((1 << KEYS.index(key)) - 1))

    def __repr__(self):
        return f"KeySet({', '.join(self)})"


@dataclass(eq=False)
class Tensor:
    data: list
    keys: KeySet
    made_by: str = ""  # as autograd has recorded it


PLAIN_CPU = KeySet.of("CPU", "ADInplaceOrView", "AutogradCPU", "AutocastCPU")


def tensor(*numbers):
    return Tensor(list(numbers), PLAIN_CPU)


print(tensor(1.0).keys)
print("highest:", tensor(1.0).keys.highest)
print("below autograd:", tensor(1.0).keys.below("AutogradCPU"))
assert tensor(1.0).keys.highest == "AutocastCPU"

# %% [markdown]
# PyTorch does it with bits, too. That is why the choice is cheap: to join two sets is one
# instruction, and to find the highest bit is another. The next cell shows the keys of some tensors.


# %%
def key_named(name):
    return _C._parse_dispatch_key(name)


def names_in(keys):
    """The names in a key set of torch's, from high to low."""
    inside = str(keys).removeprefix("DispatchKeySet(").removesuffix(")")
    return [name for name in reversed(inside.split(", ")) if name]


tensors = {
    "x": x,
    "x.requires_grad_()": x.clone().requires_grad_(),
    "x.to_sparse()": x.to_sparse(),
    "x.to('meta')": x.to("meta"),
    "a complex tensor's conj()": x.to(torch.complex64).conj(),
}
with torch.inference_mode():
    tensors["made in inference mode"] = torch.ones(2)


def look_at(name, tensor):
    tensors[name] = tensor
    return tensor.sum()


torch.func.vmap(lambda row: look_at("inside vmap", row))(x)
torch.func.grad(lambda y: look_at("inside torch.func.grad", y))(x)
torch_names = {key: key.replace("Generic", "TESTING_ONLY_Generic") for key in KEYS}
all_nine = [_C.DispatchKeySet(key_named(name)) for name in torch_names.values()]
in_order = names_in(functools.reduce(lambda one, other: one | other, all_nine))
assert in_order == [torch_names[key] for key in reversed(KEYS)]
rows = [(name, ", ".join(names_in(_C._dispatch_keys(t)))) for name, t in tensors.items()]
table(rows, ["tensor", "its keys, from high to low"])
found = dict(rows)
assert found["x"] == found["x.requires_grad_()"] == ", ".join(PLAIN_CPU)
assert found["made in inference mode"] == "AutocastCPU, CPU"
assert found["inside vmap"].startswith("FuncTorchBatched")
assert found["inside torch.func.grad"].startswith("FuncTorchGradWrapper")

# %% [markdown]
# Three things to see in this table.
#
# - `x` has autograd's key although it does not require a gradient. The key says that autograd is
#   *asked*. It finds out itself whether there is anything to record.
# - A tensor that was made in inference mode lacks autograd's key. Autograd is not even asked.
# - `SparseCPU`, `Conjugate`, `FuncTorchBatched`: a tensor has such a key if a kernel of the CPU
#   cannot just take its bytes as they stand. (`Conjugate` says that they are not conjugated yet.)
#   `FuncTorchGradWrapper` says that `torch.func.grad` watches this tensor.
#
# One more detail, which we leave out of the toy. `AutogradCPU` and `AutogradCUDA` are not two bits
# in PyTorch. There is one bit for *autograd* and one for each *device*, and the two together give a
# column of the table. In the same way *dense* and *CPU* give the column `CPU`. So the four keys of
# `x` are five bits: autocast, `ADInplaceOrView`, *autograd*, *dense* and *CPU*. And 64 bits are
# enough for more than a hundred columns.

# %%
bits = _C._dispatch_keys(x).raw_repr()
filled = [line for line in _C._dispatch_dump_table("aten::linear").splitlines() if line]
print("x:", bin(bits).count("1"), "bits - linear has", len(filled), "cells that are filled")
assert len(filled) > 100
assert bin(bits).count("1") == 5

# %% [markdown]
# Now we choose by the keys of **all** arguments. (With a tensor of the CPU and one of CUDA that is
# CUDA's kernel, which can look at both and refuse.) Here are two operators, and autograd's kernel
# for one of them:


# %%
def keys_of(args):
    found = KeySet()
    for a in args:
        if isinstance(a, Tensor):
            found |= a.keys
    return found


@method
def call(op, *args):  # noqa: F811
    keys = keys_of(args) & op.mask()
    return op.kernels[keys.highest](keys, *args)


@method
def mask(op):
    return KeySet.of(*op.kernels)


sin = define("sin(Tensor x) -> Tensor")
mul = define("mul(Tensor x, Tensor y) -> Tensor")
journey = []  # who had a turn


@impl("sin", "CPU")
def sin_cpu(keys, x):  # noqa: F811
    journey.append("sin at CPU")
    return tensor(*map(math.sin, x.data))


@impl("mul", "CPU")
def mul_cpu(keys, x, y):
    journey.append("mul at CPU")
    return tensor(*(a * b for a, b in zip(x.data, y.data)))


@impl("sin", "AutogradCPU")
def sin_autograd(keys, x):
    journey.append("sin at AutogradCPU")
    result = sin(x)  # somebody else computes
    result.made_by = "sin"
    return result


try:
    sin(tensor(0.0, 1.0))
except RecursionError:
    print("the journey:", ", ".join(journey[:3]), "and so on: too deep")
assert set(journey) == {"sin at AutogradCPU"}

# %% [markdown]
# Kernels get the key set of the call as their first argument. We need it in a moment. And `op.mask`
# leaves out the keys for which nobody has filled in a cell. (That is for the time being; part 5
# does better.)
#
# The autograd kernel asks for the sine of `x`. The tensor is the same, so its keys are the same, so
# it is autograd's turn, again and again.
#
# **Question.** Which key would you give a tensor whose values are not computed before somebody
# reads them, a lazy one: a high or a low one?
#
# <details><summary>Answer</summary>
#
# One below autograd. Autograd then records operators of lazy tensors just as it does others, and
# what it saves is lazy, too. That is where PyTorch's lazy device stands. `rematfn` is in the same
# position: part 7.
#
# </details>

# %% [markdown]
# ## 3. Going on
#
# A kernel that has done its part calls the operator again, but for lower keys only. That is to
# **redispatch**. It needs no look at the arguments: the key set of this call is known already, and
# the kernel takes its own key and all higher ones out.


# %%
@method
def redispatch(op, keys, *args):
    keys &= op.mask()
    return op.kernels[keys.highest](keys, *args)


@impl("sin", "AutogradCPU")
def sin_autograd(keys, x):  # noqa: F811
    journey.append("sin at AutogradCPU")
    result = sin.redispatch(keys.below("AutogradCPU"), x)
    result.made_by = "sin"
    return result


@impl("mul", "AutogradCPU")
def mul_autograd(keys, x, y):
    journey.append("mul at AutogradCPU")
    result = mul.redispatch(keys.below("AutogradCPU"), x, y)
    result.made_by = "mul"
    return result


def travelled(op, *args):
    journey.clear()
    op(*args)
    return list(journey)


print(travelled(sin, tensor(0.0, 1.0)))
assert travelled(sin, tensor(0.0, 1.0)) == ["sin at AutogradCPU", "sin at CPU"]

# %% [markdown]
# The next problem: a kernel that calls **other** operators. Here is a cube. Its kernel for the CPU
# multiplies twice.

# %%
cube = define("cube(Tensor x) -> Tensor")


@impl("cube", "CPU")
def cube_cpu(keys, x):
    journey.append("cube at CPU")
    return mul(mul(x, x), x)


@impl("cube", "AutogradCPU")
def cube_autograd(keys, x):
    journey.append("cube at AutogradCPU")
    result = cube.redispatch(keys.below("AutogradCPU"), x)
    result.made_by = "cube"
    return result


print("\n".join(travelled(cube, tensor(2.0))))
assert travelled(cube, tensor(2.0)).count("mul at AutogradCPU") == 2

# %% [markdown]
# The two multiplications are calls of their own, and begin at the top. So autograd records them
# although it has recorded the cube. What autograd's kernel wants to say is: *until I return, nobody
# on this thread is to be served at autograd.* That is no property of a tensor, and none of one
# call. It belongs to the **thread**, which has two sets of keys:
#
# - the keys that it **excludes**: they are taken out of each call's set;
# - the keys that it **includes**: they are added to each call's set, whatever the tensors are.
#
# This is the whole rule. With it the cube's kernel can exclude autograd's keys, and with them
# `ADInplaceOrView`, which keeps its account for autograd.
#
# The included keys help with another case. An operator that has no tensor among its arguments is a
# **factory**. The key `BackendSelect` is there for factories, and the thread includes it. Its
# kernel looks at the `device` argument, and redispatches to the key of that device.


# %%
class thread:  # noqa: N801 - the toy has only one
    included = KeySet.of("BackendSelect", "ADInplaceOrView")  # so it is in torch, too
    excluded = KeySet.of("AutocastCPU")  # until somebody switches autocast on


def keys_of_call(args):
    return (keys_of(args) | thread.included) - thread.excluded


@method
def call(op, *args):  # noqa: F811
    return op.redispatch(keys_of_call(args), *args)


NO_KEYS = KeySet()


@contextmanager
def keys_changed(include=NO_KEYS, exclude=NO_KEYS):
    """Until the end of the block the thread includes, or excludes, these as well."""
    before = thread.included, thread.excluded
    thread.included, thread.excluded = before[0] | include, before[1] | exclude
    try:
        yield
    finally:
        thread.included, thread.excluded = before


AUTOGRAD = KeySet.of("AutogradCPU", "AutogradCUDA", "ADInplaceOrView")


@impl("cube", "AutogradCPU")
def cube_autograd(keys, x):  # noqa: F811
    journey.append("cube at AutogradCPU")
    with keys_changed(exclude=AUTOGRAD):
        result = cube.redispatch(keys.below("AutogradCPU"), x)
    result.made_by = "cube"
    return result


zeros = define("zeros(int size, str device) -> Tensor")


@impl("zeros", "BackendSelect")
def zeros_select(keys, size, device):
    journey.append("zeros at BackendSelect")
    return zeros.redispatch(KeySet.of(device), size, device)


@impl("zeros", "CPU")
def zeros_cpu(keys, size, device):
    journey.append("zeros at CPU")
    return tensor(*[0.0] * size)


print(travelled(cube, tensor(2.0)))
print(travelled(zeros, 2, "CPU"))
assert travelled(cube, tensor(2.0)) == ["cube at AutogradCPU", "cube at CPU"] + 2 * ["mul at CPU"]
assert travelled(zeros, 2, "CPU") == ["zeros at BackendSelect", "zeros at CPU"]

# %% [markdown]
# Redispatch and exclusion are two things, and a kernel often does both. Redispatch is about *this
# call*: go on with the next key. Exclusion is about *the calls that are made until I return*.
#
# In PyTorch, `_dispatch_tls_local_include_set` and `..._exclude_set` tell the two sets of the
# thread. (TLS is *thread-local storage*.) An operator of our own, with a kernel for the CPU and one
# for autograd, can look at the keys that it is given: `with_keyset=True` asks for them.
# `_dispatch_keyset_full_after(key)` is the set of all keys below one.

# %%
library.define("twice(Tensor x) -> Tensor")
twice = torch.ops.notebook1.twice.default
given = {}


def twice_autograd(keys, x):
    given["AutogradCPU"] = keys
    return twice.redispatch(keys & _C._dispatch_keyset_full_after(key_named("AutogradCPU")), x)


def twice_cpu(keys, x):
    given["CPU"] = keys
    return x + x


library.impl("twice", twice_autograd, "AutogradCPU", with_keyset=True)
library.impl("twice", twice_cpu, "CPU", with_keyset=True)
assert torch.equal(twice(x), 2 * x)

included, excluded = _C._dispatch_tls_local_include_set(), _C._dispatch_tls_local_exclude_set()


def keys_of_new_call(*args):
    """By the rule: the keys with which a call on this thread would begin now."""
    keys = functools.reduce(lambda one, other: one | other, map(_C._dispatch_keys, args))
    return (keys | _C._dispatch_tls_local_include_set()) - _C._dispatch_tls_local_exclude_set()


rows = [
    ("the keys of x", names_in(_C._dispatch_keys(x))),
    ("the thread includes", names_in(included)),
    ("the thread excludes", ["AutocastCPU", f"{len(names_in(excluded)) - 1} more for autocast"]),
    ("by the rule", names_in(keys_of_new_call(x))),
    ("given to the kernel at AutogradCPU", names_in(given["AutogradCPU"])),
    ("given to the kernel at CPU", names_in(given["CPU"])),
]
table([(what, ", ".join(names)) for what, names in rows], ["", "keys, from high to low"])
assert names_in(included) == list(thread.included)
assert all(name.startswith("Autocast") for name in names_in(excluded))
assert names_in(keys_of_new_call(x)) == ["AutogradCPU", "ADInplaceOrView", "BackendSelect", "CPU"]
assert names_in(given["AutogradCPU"]) == ["AutogradCPU", "CPU"]
assert names_in(given["CPU"]) == ["CPU"]

# %% [markdown]
# The rule's set has two keys that our kernels are not given: `ADInplaceOrView` and `BackendSelect`.
# For `twice` there is nothing to do at these two, and the dispatcher knows. Part 5 tells how.
#
# Does PyTorch's autograd exclude, as our `cube_autograd` does? To see it we need somebody to look
# from below autograd. We put a *spy* there: a kernel for `aten::sin` at a key that nobody uses in
# this process, `FPGA`, and the thread includes that key. `_IncludeDispatchKeyGuard` is PyTorch's
# name for our `keys_changed(include=...)`.

# %%
aten = torch.library.Library("aten", "IMPL")
seen_by_spy = {}


def spy(keys, x):
    seen_by_spy["this call, below autograd"] = names_in(keys)
    seen_by_spy["a new call, below autograd"] = names_in(keys_of_new_call(x))
    lower = keys & _C._dispatch_keyset_full_after(key_named("FPGA"))
    return torch.ops.aten.sin.default.redispatch(lower, x)


aten.impl("sin", spy, "FPGA", with_keyset=True)
leaf = x.clone().requires_grad_()
with _C._IncludeDispatchKeyGuard(key_named("FPGA")):
    seen_by_spy["a new call, before"] = names_in(keys_of_new_call(leaf))
    result = leaf.sin()
for name, keys in seen_by_spy.items():
    print(f"{name + ':':28}", *keys)
assert "AutogradCPU" in seen_by_spy["a new call, before"]
assert seen_by_spy["this call, below autograd"] == ["FPGA", "CPU"]
assert seen_by_spy["a new call, below autograd"] == ["BackendSelect", "FPGA", "CPU"]
assert torch.equal(result, x.sin())
assert result.grad_fn is not None  # autograd has had its turn

# %% [markdown]
# Below autograd the rest of this call has lower keys only: that is redispatch. And a new call, for
# example of `mul`, would not come to autograd either: that is exclusion.
#
# Some switches that you know from Python change these two sets.

# %%
rows = []


def family(key):
    return "all of autograd's keys" if key.startswith("Autograd") else key


def note(name):
    now = _C._dispatch_tls_local_include_set(), _C._dispatch_tls_local_exclude_set()
    changes = [
        f"{verb} {key}"
        for verb, one, other in (
            ("includes", now[0], included),
            ("no longer includes", included, now[0]),
            ("excludes", now[1], excluded),
            ("no longer excludes", excluded, now[1]),
        )
        for key in dict.fromkeys(map(family, names_in(one - other)))
    ]
    rows.append((f"`{name}`", ", ".join(changes) or "nothing"))


class Mode(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


with torch.autocast("cpu"):
    note("torch.autocast('cpu')")
with torch.inference_mode():
    note("torch.inference_mode()")
    assert "AutogradCPU" not in names_in(keys_of_new_call(x))
with Mode():
    note("a TorchDispatchMode")
with torch.no_grad():
    note("torch.no_grad()")
table(rows, ["inside", "what the thread does"])
assert dict(rows)["`torch.autocast('cpu')`"] == "no longer excludes AutocastCPU"
assert dict(rows)["`a TorchDispatchMode`"] == "includes PythonTLSSnapshot, includes Python"
assert dict(rows)["`torch.no_grad()`"] == "nothing"
assert "no longer includes ADInplaceOrView" in dict(rows)["`torch.inference_mode()`"]

# %% [markdown]
# `torch.no_grad()` changes nothing here. It is a flag that autograd's kernels look at, when it is
# their turn. (`PythonTLSSnapshot` helps the `Python` key: its kernel saves a copy of the thread's
# two sets.)
#
# **Question.** Autograd's kernel for `cube` redispatches while it excludes autograd's keys. It
# could also call `cube(x)` anew while it excludes them. What would be different?
#
# <details><summary>Answer</summary>
#
# Here, nothing. But the new call begins at the top. If a key above autograd is in the set,
# autocast's for example, its kernel gets a second turn. A kernel that calls anew must exclude those
# keys as well.
#
# </details>

# %% [markdown]
# ## 4. One kernel for all operators
#
# We want to count the operators of a program, whichever they are. The key `GenericMode` is above
# all others, and the thread can include it. What kernel is to stand there?
#
# In Python that is easy: a function of `*args`. In C++ it is not. There each function has a type,
# and the kernels of `sin`, `mul` and `zeros` have three different ones. Whoever calls a function
# has to know its type when the program is compiled. So with plain types there is no function that
# fits all operators.
#
# `*args` is a tuple of values of any type. C++ can have that as well, if we make it by hand: a
# **stack**, on which a caller puts the arguments, and from which the kernel takes them. It leaves
# its result there. All that lies on a stack has one C++ type, which can hold a value of any kind.
# (PyTorch calls it `IValue`.) To put a value into one is to **box** it. A kernel with a stack is
# **boxed**, and one with typed arguments is **unboxed**.
#
# A boxed kernel needs to know how many values on the stack are its own. The operator's **schema**
# says so. That is why `define` wants one.


# %%
@dataclass
class Kernel:
    function: object
    boxed: bool = False

    def call(self, op, keys, args):
        """A call with typed arguments."""
        if not self.boxed:
            return self.function(keys, *args)
        stack = list(args)
        self.function(op, keys, stack)
        return stack.pop()

    def call_boxed(self, op, keys, stack):
        """A call with a stack."""
        if self.boxed:
            self.function(op, keys, stack)
        else:
            stack.append(self.function(keys, *pop(stack, op.arity())))


def pop(stack, count):
    taken = stack[len(stack) - count :]
    del stack[len(stack) - count :]
    return taken


@method
def arity(op):
    return op.schema.partition("(")[2].partition(")")[0].count(",") + 1


@method
def kernel_at(op, key):
    found = op.kernels[key]
    return found if isinstance(found, Kernel) else Kernel(found)


@method
def redispatch(op, keys, *args):  # noqa: F811
    keys &= op.mask()
    return op.kernel_at(keys.highest).call(op, keys, args)


@method
def redispatch_boxed(op, keys, stack):
    keys &= op.mask()
    op.kernel_at(keys.highest).call_boxed(op, keys, stack)


counted = []


def count(op, keys, stack):
    counted.append(op.name)
    op.redispatch_boxed(keys.below("GenericMode"), stack)


for op in operators.values():
    op.kernels["GenericMode"] = Kernel(count, boxed=True)
with keys_changed(include=KeySet.of("GenericMode")):
    cube(sin(zeros(2, "CPU")))
print(counted)
assert counted == ["zeros", "sin", "cube", "mul", "mul"]

# %% [markdown]
# One function, registered for each operator there is. And each pair fits: either kind of call, with
# either kind of kernel.
#
# | | the kernel is unboxed | the kernel is boxed |
# |---|---|---|
# | **a call with typed arguments** | a plain call | put on a stack, call, take the result off |
# | **a call with a stack** | take off the stack, call, put the result on | a plain call |
#
# PyTorch does the same. `_dispatch_dump` tells of each kernel which calls it takes directly. For a
# C++ kernel a template makes the boxed version from the unboxed one. A kernel that is written in
# Python is boxed only: it gets what is on the stack as Python objects. And when Python calls an
# operator by its name under `torch.ops`, that is a call with a stack.

# %%
rows = [
    (name, key, dumped(name)[key].strip("[ ]").replace(" ", ", "))
    for name, key in (("aten::sin", "CPU"), ("aten::sin", "FPGA"), ("notebook1::scale", "CPU"))
]
table(rows, ["operator", "kernel for", "takes calls that are"])
assert [row[2] for row in rows] == ["boxed, unboxed", "boxed", "boxed"]
handle = _C._dispatch_find_schema_or_throw("aten::sin", "")
assert torch.equal(_C._dispatch_call_boxed(handle, x), x.sin())

# %% [markdown]
# ### Why boxed fallbacks?
#
# Our loop over `operators` has one fault left: it has seen the operators that there are. One that
# is defined later is not counted. What we mean is a kernel for a **column** of the table: it serves
# each operator that has nothing better at this key. That is a **fallback**.
#
# A fallback must be boxed: it serves operators of any type, also those of libraries that were not
# written when it was compiled. There are two other ways to serve all operators at a key, and
# PyTorch has both.
#
# - *Write a program that writes the kernels*, one for each operator. Most of autograd's kernels are
#   made so. (The files in which they are registered lie in a folder called `generated`.) But the
#   program knows only PyTorch's own operators.
# - *A template over the signature*: one text, from which the compiler makes a function for each
#   type that occurs. It has to be told each type.
#
# A boxed fallback is one function, knows the schema of what it is called for, and needs no list of
# operators. The price is the boxing itself. So it is for work that is the same for each operator:
# to count, to record, to unwrap.

# %%
fallbacks = {}  # a row of the table that serves all operators


def fallback(key, function, boxed=True):
    fallbacks[key] = Kernel(function, boxed)


@method
def mask(op):  # noqa: F811
    return KeySet.of(*op.kernels, *(key for key in fallbacks if key not in op.kernels))


@method
def kernel_at(op, key):  # noqa: F811
    found = op.kernels.get(key) or fallbacks[key]
    return found if isinstance(found, Kernel) else Kernel(found)


for op in operators.values():
    del op.kernels["GenericMode"]
fallback("GenericMode", count)

add = define("add(Tensor x, Tensor y) -> Tensor")  # defined later


@impl("add", "CPU")
def add_cpu(keys, x, y):
    return tensor(*(a + b for a, b in zip(x.data, y.data)))


def counted_in(f, *args):
    counted.clear()
    with keys_changed(include=KeySet.of("GenericMode")):
        f(*args)
    return list(counted)


assert counted_in(lambda: add(cube(tensor(2.0)), tensor(1.0))) == ["cube", "mul", "mul", "add"]
print(counted_in(lambda: add(cube(tensor(2.0)), tensor(1.0))))

# %% [markdown]
# ### What does `TORCH_LIBRARY_IMPL(_, key, m)` mean?
#
# In C++ a fallback is registered so:
#
# ```cpp
# TORCH_LIBRARY_IMPL(_, SomeKey, m) {
#   m.fallback(torch::CppFunction::makeFromBoxedFunction<&f>());
# }
# ```
#
# Where a library's name would stand, there is an underscore: *for every library*. In Python it is a
# `Library("_", "IMPL")`. There can be one fallback for a key and no more. We take PyTorch's own
# `GenericMode`, which is free, and count a program of PyTorch's.

# %%
GENERIC_MODE = key_named("TESTING_ONLY_GenericMode")
assert not _C._dispatch_has_backend_fallback(GENERIC_MODE)
everything = torch.library.Library("_", "IMPL")
seen = []


def short(op):
    return str(op).partition(".")[2].removesuffix(".default")


def torch_count(op, *args, **kwargs):
    seen.append(short(op))
    with _C._ExcludeDispatchKeyGuard(_C.DispatchKeySet(GENERIC_MODE)):
        return op(*args, **kwargs)


everything.fallback(torch_count, "TESTING_ONLY_GenericMode")


def seen_in(f, *args):
    seen.clear()
    with _C._IncludeDispatchKeyGuard(GENERIC_MODE):
        f(*args)
    return list(seen)


def program():
    return torch.nn.functional.linear(torch.zeros(2), x).sin()


_, _, at_autograd = _C._dispatch_dump_table("aten::sin").partition("AutogradCPU: ")
assert "/generated/" in at_autograd.splitlines()[0]
library.define("later(Tensor x) -> Tensor")
library.impl("later", lambda x: x + 1, "CPU")
print(seen_in(program), seen_in(lambda: torch.ops.notebook1.later(x)))
assert seen_in(program) == ["zeros", "linear", "sin"]
assert seen_in(lambda: torch.ops.notebook1.later(x)) == ["later"]
again = torch.library.Library("_", "IMPL")
try:
    again.fallback(torch_count, "TESTING_ONLY_GenericMode")
except RuntimeError as error:
    print(str(error).partition("; ")[0])
    assert "multiple backend fallbacks" in str(error)

# %% [markdown]
# Our toy's `count` redispatches, and `torch_count` calls the operator anew with its key excluded.
# So it saw `linear`, but none of the operators that `linear` is made of: these were called while
# the key was excluded. In the toy the two multiplications of the cube were counted. That is the
# difference from part 3 again.
#
# **Question.** How would you make the toy's `count` see only what the program itself calls?
#
# <details><summary>Answer</summary>
#
# `with keys_changed(exclude=KeySet.of("GenericMode"))` around the `redispatch_boxed`. Then the
# multiplications within `cube` are new calls on a thread that excludes the key.
#
# </details>

# %% [markdown]
# ## 5. Cells that nobody has filled
#
# Now there are two ways to fill a cell: a kernel for the operator at this key, and a fallback for
# all operators at this key. PyTorch has more. Each of them answers a complaint.
#
# **"I do not want to write the same kernel for each device."** Autograd's kernel for `sin` is the
# same for the CPU and for CUDA. So there are **alias keys**, which stand for several keys. A kernel
# for `Autograd` serves `AutogradCPU`, `AutogradCUDA` and so on. No tensor has an alias among its
# keys.
#
# **"My operator is made of others."** Then it can have a **default kernel**, which serves every
# device. There are two main kinds, which are alias keys, too.
#
# - `CompositeExplicitAutograd`: the kernel serves all devices, and not autograd. Autograd treats
#   the operator as one step, with a kernel of its own. `sum` is of this kind.
# - `CompositeImplicitAutograd`: the kernel serves all devices **and autograd**. So when autograd's
#   turn comes, the operator falls into its parts, and autograd records the parts. `linear` is of
#   this kind. PyTorch's tables call such a kernel a *math kernel*.
#
# **"At this key there is nothing to do for most operators."** `ADInplaceOrView` keeps account of
# writes and views, and `sin` is neither. A kernel that only goes on would take time for nothing. So
# a cell can say **fallthrough**: take this key out of the set, and look for the next. A call pays
# nothing for that. Whenever a kernel is registered, the dispatcher works out the operator's
# **mask**: the keys that do not say *fallthrough*. A call takes from its keys those in the mask.
# Our `mask` becomes just that. So a cell that is *empty* is no longer skipped: a call that arrives
# there ends with an error.
#
# The order of these is fixed. A kernel for the key itself comes first, then a default kernel
# (*explicit* before *implicit*), then one for `Autograd`, and a fallback last. We write it down, in
# the words that PyTorch prints.

# %%
BACKENDS = ("CPU", "CUDA")
AUTOGRADS = {"AutogradCPU": "CPU", "AutogradCUDA": "CUDA"}
FALLTHROUGH = Kernel(None)


@method
def entry(op, key):
    """What stands in an operator's row at a key, and why."""
    backend = AUTOGRADS.get(key)  # None, unless this is a key of autograd's
    explicit, implicit = "CompositeExplicitAutograd", "CompositeImplicitAutograd"
    if key in op.kernels:
        return op.kernels[key], "[kernel]"
    if key in BACKENDS and explicit in op.kernels:
        return op.kernels[explicit], "[default backend kernel]"
    # Autograd leaves an operator whole if its device has a kernel.
    has_own = backend in op.kernels or explicit in op.kernels
    if key in (*BACKENDS, *AUTOGRADS) and implicit in op.kernels and not has_own:
        return op.kernels[implicit], "[math kernel]"
    if backend and "Autograd" in op.kernels:
        return op.kernels["Autograd"], "[autograd kernel]"
    if key in fallbacks:
        return fallbacks[key], "[backend fallback]"
    return None, ""


@method
def dump_table(op):
    lines = {}
    for key in KEYS:
        kernel, why = op.entry(key)
        if kernel is not None:
            lines[key] = "fallthrough " * (kernel is FALLTHROUGH) + why
    return lines


@method
def mask(op):  # noqa: F811
    return KeySet.of(*(key for key in KEYS if op.entry(key)[0] is not FALLTHROUGH))


@method
def kernel_at(op, key):  # noqa: F811
    found = op.entry(key)[0]
    if found is None:
        raise NotImplementedError(f"could not run {op.name} at {key}")
    return found if isinstance(found, Kernel) else Kernel(found)


def not_differentiable(op, keys, stack):
    op.redispatch_boxed(keys - AUTOGRAD, stack)


for key in ("BackendSelect", "ADInplaceOrView", "AutocastCPU"):
    fallbacks[key] = FALLTHROUGH
for key in AUTOGRADS:
    fallback(key, not_differentiable)
assert counted_in(lambda: add(cube(tensor(2.0)), tensor(1.0))) == ["cube", "mul", "mul", "add"]

# %% [markdown]
# (`not_differentiable` is our fallback at autograd's keys: it goes on below autograd. PyTorch's
# does so, too. It also warns in the backward, if it turns out that nobody knew the operator's
# gradient.)
#
# A fallthrough can also be registered for one operator at a key that has a fallback. Then nobody
# counts that operator. In PyTorch the name for it is `torch.library.fallthrough_kernel`.

# %%
mul.kernels["GenericMode"] = FALLTHROUGH
aten.impl("mul.Tensor", torch.library.fallthrough_kernel, "TESTING_ONLY_GenericMode")
print("toy:  ", counted_in(lambda: mul(sin(tensor(2.0)), tensor(2.0))))
print("torch:", seen_in(lambda: x.sin() * x))
assert counted_in(lambda: mul(sin(tensor(2.0)), tensor(2.0))) == ["sin"]
assert seen_in(lambda: x.sin() * x) == ["sin"]

# %% [markdown]
# Now the comparison. We define six operators, each with other cells filled, in the toy and in
# PyTorch. Then we print the two tables. `_dispatch_dump_table` is PyTorch's; it gives the file and
# line of each registration, too, which we leave out.


# %%
def torch_table(name):
    lines = {}
    for line in _C._dispatch_dump_table(name).splitlines():
        key, _, text = line.partition(": ")
        if text:
            fallen = "fallthrough " * text.startswith("fallthrough")
            lines[key] = fallen + text[text.rindex("[") :]
    return lines


def in_short(text):
    return "fallthrough" if text.startswith("fall") else text.strip("[]").replace("backend ", "")


cells = {
    "plain": ["CPU"],
    "recorded": ["CPU", "CUDA", "Autograd"],
    "explicit": ["CompositeExplicitAutograd", "CPU"],
    "implicit": ["CompositeImplicitAutograd"],
    "both": ["CompositeImplicitAutograd", "CPU"],
    "special": ["CPU", "Autograd", "AutocastCPU", "ADInplaceOrView"],
}
for name, keys in cells.items():
    schema = f"{name}(Tensor x) -> Tensor"
    define(schema)
    library.define(schema)
    for key in keys:
        impl(name, key)(lambda keys, x: x)
        library.impl(name, lambda x: x.clone(), key)

del fallbacks["GenericMode"]
real = {name: torch_table(f"notebook1::{name}") for name in cells}
ours = {name: operators[name].dump_table() for name in cells}
table(
    [
        (key, *(in_short(ours[name].get(key, "")) for name in cells))
        for key in reversed(KEYS)
        if not key.startswith("Generic")
    ],
    ["key", *(f"`{name}`" for name in cells)],
)
for name in cells:
    assert ours[name] == {key: text for key, text in real[name].items() if key in KEYS}
print("the same in torch:", sum(map(len, ours.values())), "cells")

# %% [markdown]
# (The tables of this notebook leave out the brackets and the word *backend*.)
#
# Look at `implicit` and `both`. `implicit` falls into its parts when autograd has its turn. `both`
# does so on CUDA, but the CPU has a kernel of its own, and so autograd must treat it as one step
# there. Nobody has said how: its cell is the fallback.
#
# And look at `explicit`: at `CUDA` it has the default kernel. If somebody registered a fallback at
# `CUDA`, the default kernel would still come first. Notebook 5 runs into that.
#
# The empty cells are errors. The toy and PyTorch, asked for `plain` at `CUDA`:


# %%
def error_of(f):
    try:
        f()
    except NotImplementedError as error:
        return str(error)
    raise AssertionError("somebody ran it")


in_toy = error_of(lambda: operators["plain"](Tensor([1.0], KeySet.of("CUDA"))))
with _C._IncludeDispatchKeyGuard(key_named("CUDA")):  # as if `x` were there
    in_torch = error_of(lambda: torch.ops.notebook1.plain(x))
print("toy:  ", in_toy)
print("torch:", in_torch.partition(". ")[0])
assert "plain" in in_toy
assert "from the 'CUDA' backend" in in_torch

# %% [markdown]
# ### An operator's way down
#
# Here is a piece of PyTorch's own table. Keys go from high to low, and each column is an operator.
# The line is the way of a call whose tensors are plain tensors of the CPU; a ring is a stop.
#
# - A *full* box is at a key that this call has. Grey ones say *fallthrough*, and the mask takes
#   them out.
# - A *hollow* box is at a key that this call does not have. Other calls may stop there: one on a
#   sparse tensor, or one inside of `vmap`.
# - *No box*: nobody has filled in this cell.
# - A *batched kernel* comes from one more alias key. It takes an operator apart for `vmap`.
# - The line of `linear` ends at autograd, where it falls into its parts.

# %%
ops = {
    "sin": "aten::sin",
    "mul_": "aten::mul_.Tensor",
    "view": "aten::view",
    "mm": "aten::mm",
    "linear": "aten::linear",
    "silu_backward": "aten::silu_backward",
    "scale": "notebook1::scale",
}
column_keys = [
    "FuncTorchDynamicLayerFrontMode",
    "FuncTorchBatched",
    "AutocastCPU",
    "AutogradCPU",
    "ADInplaceOrView",
    "Python",
    "BackendSelect",
    "SparseCPU",
    "CPU",
]
palette = {
    "[kernel]": "#0072B2",
    "[autograd kernel]": "#009E73",
    "[math kernel]": "#D55E00",
    "[batched kernel]": "#56B4E9",
    "[backend fallback]": "#CC79A7",
    "fallthrough [backend fallback]": "#DDDDDD",
}


def stops(name):
    """Where a call on `x` stops, by the rule."""
    line, found = torch_table(name), []
    for key in names_in(keys_of_new_call(x)):
        if not line.get(key, "").startswith("fallthrough"):
            found.append(key)
        if line[key] == "[math kernel]":
            break  # it falls into its parts, which begin anew
    return found


in_set = names_in(keys_of_new_call(x))
ways = {label: stops(name) for label, name in ops.items()}
figure, axes = plt.subplots(figsize=(7, 5))
for column, (label, name) in enumerate(ops.items()):
    line = torch_table(name)
    for row, key in enumerate(column_keys):
        kind = line.get(key)
        if kind is not None:
            face = palette[kind] if key in in_set else "none"
            box = plt.Rectangle(
                (column - 0.4, row - 0.38), 0.8, 0.76, facecolor=face, edgecolor=palette[kind], lw=2
            )
            axes.add_patch(box)
    rows = [column_keys.index(key) for key in ways[label]]
    axes.plot([column] * (len(rows) + 1), [-1, *rows], color="black", lw=2)
    axes.plot([column] * len(rows), rows, "o", color="black", ms=7, mfc="white", mew=2)
axes.set_xlim(-0.6, len(ops) - 0.4)
axes.set_ylim(len(column_keys) - 0.4, -1.1)
axes.set_xticks(range(len(ops)), [label.replace("_b", "_\nb") for label in ops])
axes.set_yticks(range(len(column_keys)), column_keys)
axes.tick_params(length=0)
kinds = {kind: plt.Rectangle((0, 0), 1, 1, color=color) for kind, color in palette.items()}
figure.legend(kinds.values(), map(in_short, kinds), loc="lower center", ncols=3, frameon=False)
figure.tight_layout(rect=(0, 0.1, 1, 1))
plt.show()
assert in_set == ["AutogradCPU", "ADInplaceOrView", "BackendSelect", "CPU"]
assert ways["sin"] == ways["mm"] == ["AutogradCPU", "CPU"]
assert ways["mul_"] == ways["view"] == ["AutogradCPU", "ADInplaceOrView", "CPU"]
assert ways["linear"] == ["AutogradCPU"]
with torch.autocast("cpu"):  # for the question below
    assert stops("aten::mm") == ["AutocastCPU", "AutogradCPU", "CPU"]
    assert stops("aten::sin") == ["AutogradCPU", "CPU"]

# %% [markdown]
# `sin` has two stops. `mul_` writes, and `view` makes a view: both have three. `linear` has one:
# its parts, `mm` among them, begin anew at the top. `silu_backward` falls into its parts for a
# sparse tensor, and has a kernel for the CPU. `scale` is ours, of part 1: at autograd's key it has
# the fallback. (`FuncTorchDynamicLayerFrontMode` is where the transforms of `torch.func` begin:
# notebook 2.)
#
# **Question.** `AutocastCPU` has a kernel for `mm` and a fallthrough for `sin`. Inside of
# `torch.autocast("cpu")`, what are the stops of `mm` and of `sin`? And why is the order of
# `AutocastCPU` and `AutogradCPU` as it is?
#
# <details><summary>Answer</summary>
#
# `mm`: AutocastCPU, AutogradCPU, CPU. `sin`: AutogradCPU, CPU, as before. Autocast is above
# autograd, so its casts are operators that autograd records, and what autograd saves is in the
# smaller type.
#
# </details>
#
# ### The toy as a module
#
# The notebooks' toy is also a module, `tutorials/toy/`, and this dispatcher is its first file. It
# is smaller. For *highest* it says *most urgent*. All its kernels are boxed, and the box is a
# tuple. It has no default kernels, since it has no second device. It does without a mask, and
# passes by a fallthrough as it meets it. Here is how it chooses:

# %%
quote("tutorials/toy/dispatcher.py", "def __call__(self", "return kernel(self")

# %% [markdown]
# ## 6. A mode and a wrapper
#
# A key gets into the set of a call in two ways: the thread includes it, or a tensor has it. We
# write one fallback for each way. Both do nothing but go on.
#
# - A **mode** is a key that the thread includes. Its kernel excludes the key while it goes on.
# - A **wrapper** is a tensor that has the key, and has another tensor inside. Its kernel takes the
#   inner tensors out of their wrappers, goes on with these, and wraps the result. It need not
#   exclude its key, since the inner tensors do not have it.


# %%
class Wrapper(Tensor):
    def __init__(self, inner):
        super().__init__([], KeySet.of("GenericWrapper"))
        self.inner = inner


def mode_kernel(op, keys, stack):
    seen.append(("mode", op.name))
    with keys_changed(exclude=KeySet.of("GenericMode")):
        stack.append(op(*pop(stack, op.arity())))


def wrapper_kernel(op, keys, stack):
    seen.append(("wrapper", op.name))
    inner = [a.inner if isinstance(a, Wrapper) else a for a in pop(stack, op.arity())]
    stack.append(Wrapper(op(*inner)))


fallback("GenericMode", mode_kernel)
fallback("GenericWrapper", wrapper_kernel)
seen.clear()
with keys_changed(include=KeySet.of("GenericMode")):
    plain = sin(zeros(2, "CPU"))
print("while the thread includes the mode's key:", seen)
assert seen == [("mode", "zeros"), ("mode", "sin")]

seen.clear()
wrapped = sin(Wrapper(zeros(2, "CPU")))
result = cube(wrapped)
print("with a wrapper:", seen, "- result:", type(result).__name__, "of", result.inner.data)
assert seen == [("wrapper", "sin"), ("wrapper", "cube")]
assert result.inner.made_by == "cube"

# %% [markdown]
# Autograd has recorded the cube, as the last assertion says, at the inner tensor. A wrapper has no
# key of autograd's. It stands above autograd, and all keys below have their turn with what it has
# inside.
#
# ### What were `TESTING_ONLY_GenericMode` and `TESTING_ONLY_GenericWrapper` for?
#
# For a test of just this. When boxed fallbacks came into PyTorch, in September 2019, [pull request
# #26719](https://github.com/pytorch/pytorch/pull/26719) by Edward Yang added two tests that do what
# our last cell does. Each got a key of its own. The description names what the two are models of:
# wrappers such as lazy or nested tensors, and modes such as profiling or tracing. It also says that
# a mode turned out to be much simpler to write than a wrapper. That a thread can include a key was
# new with that request.
#
# Both keys are still there, close to the top. The comments at them say that they are for tests
# within one process, and PyTorch itself registers nothing at them. (The comment on the mode tells
# of a function `TESTING_ONLY_tls_generic_mode_set_enabled`. There is no such function any more.
# Today one includes this key like any other.)
#
# Here are the two tests in Python. For the mode we have the fallback of part 4. The wrapper is a
# tensor subclass, since that is how Python makes a tensor with a key of its choice. A subclass has
# the `Python` key besides, which is lower than ours. (One detail: with such a subclass among the
# arguments, torch 2.13 fails to find a fallback that is written in Python. So we register the
# wrapper's kernel by name, for the four operators that we are going to call.)


# %%
GENERIC_WRAPPER = key_named("TESTING_ONLY_GenericWrapper")
assert not _C._dispatch_has_backend_fallback(GENERIC_WRAPPER)


class TorchWrapper(torch.Tensor):
    @staticmethod
    def __new__(cls, inner):
        key = _C.DispatchKeySet(GENERIC_WRAPPER)
        like = {"dtype": inner.dtype, "device": inner.device}
        self = cls._make_wrapper_subclass(cls, inner.shape, **like, _extra_dispatch_keys=key)
        self.inner = inner
        return self

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise AssertionError("our key is above Python's")


def wrapper(op, *args, **kwargs):
    seen.append(short(op))
    args, kwargs = tree_map_only(TorchWrapper, lambda t: t.inner, (args, kwargs))
    return tree_map_only(torch.Tensor, TorchWrapper, op(*args, **kwargs))


for name in ("sin", "cos", "exp", "batch_norm"):
    op = getattr(torch.ops.aten, name).default
    aten.impl(name, functools.partial(wrapper, op), "TESTING_ONLY_GenericWrapper")


def batch_norm(a):
    return torch.batch_norm(a, None, None, None, None, True, 0.1, 1e-5, False)


seen_by_mode = seen_in(lambda: batch_norm(torch.ones(5, 5)))
seen.clear()
result = batch_norm(TorchWrapper(torch.ones(5, 5)))
seen_by_wrapper = list(seen)
print("mode:   ", seen_by_mode)
print("wrapper:", seen_by_wrapper)
assert seen_by_mode == ["ones", "batch_norm"]
assert seen_by_wrapper == ["batch_norm"]
assert isinstance(result, TorchWrapper)
headers = Path(torch.__file__).parent / "include" / "c10"
removed = "TESTING_ONLY_tls_generic_mode_set_enabled"
named_in = [file.name for file in headers.rglob("*.h") if removed in file.read_text()]
assert named_in == ["DispatchKey.h"]  # in a comment
assert names_in(_C._dispatch_keys(result))[0] == "TESTING_ONLY_GenericWrapper"

# %% [markdown]
# Two operators for the mode and one for the wrapper: those are the numbers that PyTorch's tests
# expect as well. (They are in `aten/src/ATen/test/backend_fallback_test.cpp`.)
#
# ### Why are a mode and a wrapper two things?
#
# The mode has seen `ones`, a factory. The wrapper has not: among the arguments of a factory there
# is no tensor that could be a wrapper. Let us look for more differences. The same four operators
# run, once with a mode that is on in a block, and once on a wrapper.


# %%
def four_operators(value, block):
    with block():
        torch.ones(2)
        value.sin()
    value.cos()
    with block():
        other = threading.Thread(target=value.exp)
        other.start()
        other.join()


def seen_of(value, block):
    seen.clear()
    four_operators(value, block)
    return list(seen)


seen_by_mode = seen_of(x, lambda: _C._IncludeDispatchKeyGuard(GENERIC_MODE))
seen_by_wrapper = seen_of(TorchWrapper(x), nullcontext)
rows = [
    ("a factory, in the block", "ones"),
    ("an operator on the value, in the block", "sin"),
    ("the same, after the block", "cos"),
    ("the same, in another thread, during the block", "exp"),
]
table(
    [
        (what, name, *("yes" if name in by else "" for by in (seen_by_mode, seen_by_wrapper)))
        for what, name in rows
    ],
    ["what", "operator", "the mode sees it", "the wrapper sees it"],
)
assert seen_by_mode == ["ones", "sin"]
assert seen_by_wrapper == ["sin", "cos", "exp"]

# %% [markdown]
# A mode belongs to a **stretch of a program**, on one thread. It sees all that happens there, and
# nothing afterwards. A wrapper belongs to a **value**. It goes where the value goes: out of the
# block, into other threads, into a backward much later. It can also carry something of its own with
# each value.
#
# Neither can do the other's work, and so what wants both has both. `vmap` is a pair:
# `FuncTorchBatched` is a wrapper, which says which dimension is the batch; `FuncTorchVmapMode` is a
# mode, which sees the operators that draw random numbers. (Notebook 2.) The `Python` key is used in
# both ways:
#
# - a tensor subclass with `__torch_dispatch__` has the key: a wrapper;
# - a `TorchDispatchMode` makes the thread include it, as the table in part 3 shows: a mode.
#
# So today these two are what the `GenericWrapper` and the `GenericMode` were models of.
#
# **Question.** Which of the two is a profiler to be, and which a lazy tensor?
#
# <details><summary>Answer</summary>
#
# A profiler is asked about a stretch of a program: a mode. A lazy tensor has not been computed yet
# wherever it goes, and each has a computation of its own: a wrapper.
#
# </details>

# %% [markdown]
# ## 7. Where does `rematfn` stand?
#
# `rematfn` runs a function within a memory budget: it *evicts* tensors, that is, it takes their
# bytes away, and makes them again when somebody reads them. One run of such a function is a
# *level*. It has to see every operator before a kernel reads bytes. It needs what we have built
# here: a key, and a boxed fallback for it. Here is its registration. `kLevelKey` is the key
# `CustomRNGKeyId`, which was made for other people's random generators. `rematfn` borrows it.

# %%
quote("csrc/operators/boxed_kernel.cpp", "void register_kernels() {", "getAllOpNames());")

# %% [markdown]
# - `registerFallback` is what `m.fallback` in a `TORCH_LIBRARY_IMPL(_, ...)` comes to. It is called
#   by hand, so that a check can come first: there can be only one fallback at a key.
# - `makeFromBoxedFunction` makes a kernel of a function with a stack.
# - `register_operators` gives some operators a kernel of their own at the key: those whose default
#   kernel would come before a fallback (part 5), such as `sin`, and a choice of frequent ones, such
#   as `view`, for which there is an unboxed kernel. (PyTorch counts `CustomRNGKeyId` among the
#   devices. That is why default kernels serve it.)
#
# The table before and after the import. (`linear` keeps its math kernel: it falls into its parts,
# and the level sees these.)

# %%
LEVEL_KEY = "CustomRNGKeyId"
chosen = ["aten::sin", "aten::view", "aten::linear", "notebook1::scale"]


def cells_at_level_key():
    return [in_short(torch_table(name).get(LEVEL_KEY, "")) for name in chosen]


assert not _C._dispatch_has_backend_fallback(key_named(LEVEL_KEY))
before = cells_at_level_key()
import rematfn

after = cells_at_level_key()
assert _C._dispatch_has_backend_fallback(key_named(LEVEL_KEY))
table(
    [(f"`{name}`", *pair) for name, *pair in zip(chosen, before, after)],
    ["operator", f"at `{LEVEL_KEY}`, without `rematfn`", "with `rematfn`"],
)
assert before == ["default kernel", "", "math kernel", ""]
assert after == ["kernel", "kernel", "math kernel", "fallback"]

# %% [markdown]
# ### Is it a mode or a wrapper?
#
# It is both, with one key. We look at the keys of the thread and of some tensors, within and after
# a call of a function under `remat`.

# %%
rows = []
has_key = {}
kept = []


def look_for_key(name, tensor):
    has_key[name] = LEVEL_KEY in names_in(_C._dispatch_keys(tensor))


def f(x):
    note("f, under remat")
    look_for_key("in f: x, from outside", x)
    h = x.sin()
    look_for_key("in f: h, made there", h)
    kept.append(h)
    return h.exp()


y = rematfn.remat(f)(x)
note("the program, afterwards")
look_for_key("afterwards: h, which the program has kept", kept[0])
look_for_key("afterwards: the result", y)
table(rows, ["inside", "what the thread does"])
table(
    [(name, "yes" if has else "") for name, has in has_key.items()],
    ["tensor", f"has `{LEVEL_KEY}`"],
)
assert dict(rows)["`f, under remat`"] == f"includes {LEVEL_KEY}, no longer includes BackendSelect"
assert dict(rows)["`the program, afterwards`"] == "nothing"
assert list(has_key.values()) == [False, True, True, False]
assert torch.equal(y, x.sin().exp())

# %% [markdown]
# - **A mode**: while `f` runs, the thread includes the key. So `rematfn` sees factories, and
#   operators on tensors from outside.
# - **A wrapper**, in that the tensors that `f` makes have the key, and keep it when `f` has
#   returned. What autograd saves of them is read in the backward. Then the thread no longer
#   includes the key, and `rematfn` sees these operators all the same. But nothing is wrapped: it is
#   the kernel's own tensor, with a key added.
#
# Notebook 5 tells why `BackendSelect` is taken out, how the key comes off a result, and what the
# kernel does in between.
#
# **Question.** The key is below autograd. What would go wrong if it were above?
#
# <details><summary>Answer</summary>
#
# Autograd would have its turn below the level. What it saves would then be tensors that the level
# has not made and does not know. The level could not evict them, and these are the tensors that
# fill the memory of a training step.
#
# </details>
#
# **What comes next.** We have a dispatcher, and keys that do nothing but go on. Notebook 2 puts
# something behind such a pair: `vmap`, as a wrapper and a mode.
