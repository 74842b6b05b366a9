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
# You write `x.sin()`. One function has to compute the sine. Before that, autograd may record the
# call, autocast may change its type, and `vmap` may turn it into a call on a batch. PyTorch's
# *dispatcher* decides which of these functions run, and in which order.
#
# This page shows how it decides: first in pictures of real calls, then in a toy dispatcher of about
# sixty lines that follows the same rule. Each heading is a question, so you can also look one up.
#
# To run the page you need a notebook and PyTorch (`pip install torch`). Nothing has to be compiled.
# It was written with torch 2.13; names that begin with an underscore may change.

# %%
# SPDX-License-Identifier: Apache-2.0
import math
import threading
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from enum import IntEnum

import torch
from IPython.display import SVG, Markdown, display
from torch import _C

x = torch.linspace(-1, 1, 4).reshape(2, 2)

# %% tags=["hide-input"]
# Helpers of this page: they read PyTorch's tables, and draw.


def key_named(name):
    return _C._parse_dispatch_key(name)


def names_in(keys):
    """The names in a key set of PyTorch's, from high to low."""
    inside = str(keys).removeprefix("DispatchKeySet(").removesuffix(")")
    return [name for name in reversed(inside.split(", ")) if name]


def row_of(name):
    """An operator's row of PyTorch's table: what stands at each key."""
    row = {}
    for line in _C._dispatch_dump_table(name).splitlines():
        key, _, text = line.partition(": ")
        if text:
            kind = text[text.rindex("[") :].strip("[]").replace("backend ", "")
            row[key] = "fallthrough" if text.startswith("fallthrough") else kind
    return row


def show_table(rows, headers):
    lines = [headers, ["---"] * len(headers), *rows]
    display(Markdown("\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)))


COLORS = {
    "kernel": "#0072B2", "autograd kernel": "#009E73", "math kernel": "#D55E00",
    "default kernel": "#56B4E9", "batched kernel": "#E69F00", "fallback": "#CC79A7",
    "fallthrough": "#BBBBBB",
}  # fmt: skip


def box(x, y, width, text="", color="#0072B2", full=True):
    ink = "#FFFFFF" if full and color != "#BBBBBB" else "#222222"
    return (
        f'<rect x="{x}" y="{y}" width="{width}" height="26" rx="4" stroke="{color}" '
        f'stroke-width="1.5" fill="{color if full else "#FFFFFF"}"/>'
        + words(x + width / 2, y + 17, text, "middle", ink)
    )


def words(x, y, text, anchor="start", ink="#222222", weight="normal"):
    return (
        f'<text x="{x}" y="{y}" text-anchor="{anchor}" fill="{ink}" font-size="12" '
        f'font-weight="{weight}" font-family="sans-serif">{text}</text>'
    )


def picture(width, height, title, *parts):
    display(
        SVG(
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'width="{width}" role="img"><title>{title}</title>'
            f'<rect width="{width}" height="{height}" fill="#FFFFFF"/>{"".join(parts)}</svg>'
        )
    )


# %% [markdown]
# ## What does the dispatcher choose from?
#
# - An **operator** is what a program asks for: `sin`, `mul`, `view`. PyTorch has more than two
#   thousand, whose full names begin with `aten::`, and a library can add its own.
# - A **kernel** is a function that does one part of an operator's work. For `sin` there is one that
#   computes on a CPU, one that computes on CUDA, one that records for autograd, and others.
# - A **dispatch key** is the name of one part: `CPU`, `CUDA`, `AutogradCPU`, `AutocastCPU`. A
#   kernel is registered for one operator and one key.
#
# ## What is a key set?
#
# Every tensor carries a set of dispatch keys: the parts that may have something to do when an
# operator reads this tensor. Keys have a fixed order. The picture has the keys of our `x`, the
# highest first.

# %% tags=["hide-input"]
# Alt: The four keys of x in a row, from high to low: AutocastCPU, AutogradCPU, ADInplaceOrView,
# CPU, each with its task below it.
TASKS = {
    "AutocastCPU": "change the type",
    "AutogradCPU": "record for backward",
    "ADInplaceOrView": "note writes and views",
    "BackendSelect": "find the device",
    "CPU": "compute",
}
keys_of_x = names_in(_C._dispatch_keys(x))
parts = [words(10, 20, "high"), words(630, 20, "low", "end")]
parts.append(
    '<path d="M45 16 H600" stroke="#888888"/><path d="M600 11 l10 5 l-10 5z" fill="#888"/>'
)
for i, key in enumerate(keys_of_x):
    parts.append(box(10 + 157 * i, 34, 147, key))
    parts.append(words(83 + 157 * i, 80, TASKS[key], "middle"))
picture(640, 95, "The key set of x", *parts)

# %% [markdown]
# In PyTorch a key set is a number of 64 bits, with the highest key as the highest bit. Joining two
# sets and finding the highest key take an instruction or two each. So this costs little, although
# it happens at every call.
#
# Here are more tensors and their keys:


# %%
def keys_of(tensor):
    return ", ".join(names_in(_C._dispatch_keys(tensor)))


rows = [
    ("`x`", keys_of(x)),
    ("`x.clone().requires_grad_()`", keys_of(x.clone().requires_grad_())),
    ("`x.to_sparse()`", keys_of(x.to_sparse())),
    ("`x.to(torch.complex64).conj()`", keys_of(x.to(torch.complex64).conj())),
]
with torch.inference_mode():
    rows.append(("`torch.ones(2)` in `inference_mode`", keys_of(torch.ones(2))))
torch.func.vmap(lambda row: rows.append(("`row` inside `vmap`", keys_of(row))) or row)(x)
show_table(rows, ["tensor", "its keys, from high to low"])

# %% [markdown]
# - `x` has autograd's key although it requires no gradient. The key only says that autograd is
#   *asked*. Its kernel finds out whether there is something to record.
# - A tensor that was made in inference mode has no key of autograd's, so autograd is not asked.
# - `SparseCPU`, `Conjugate` and `FuncTorchBatched` (this is `vmap`) tell that an ordinary CPU
#   kernel could not use the tensor's bytes as they are.
#
# ## Which kernel runs?
#
# The kernel at the highest key *of the call*. The dispatcher works out the keys of a call in three
# steps:
#
# 1. It joins the keys of all tensors among the arguments.
# 2. It adds the keys that the current thread **includes**, and removes those that the thread
#    **excludes**. Each thread has these two sets, whatever the tensors are.
# 3. It keeps only the keys in the operator's **mask**. The mask has all keys but those at which
#    this operator has nothing to do.
#
# The picture shows the three steps for `x.sin()`. A full box means "the key is in this set".

# %% tags=["hide-input"]
# Alt: Five keys as rows, five sets as columns. x has AutocastCPU, AutogradCPU, ADInplaceOrView
# and CPU. The thread includes ADInplaceOrView and BackendSelect, and excludes AutocastCPU. The
# mask of sin has AutogradCPU and CPU, and so has the call: AutogradCPU has the first turn, CPU
# the second.
included = _C._dispatch_tls_local_include_set()
excluded = _C._dispatch_tls_local_exclude_set()


def keys_of_thread_and(*tensors):
    """The keys of a call after step 2."""
    keys = included
    for tensor in tensors:
        keys = keys | _C._dispatch_keys(tensor)
    return names_in(keys - excluded)


def stops(name, *tensors):
    """The keys of a call after step 3: where kernels run, if each goes on to the next."""
    row = row_of(name)
    return [key for key in keys_of_thread_and(*tensors) if row.get(key) != "fallthrough"]


sets = {
    "x has": keys_of_x,
    "thread includes": names_in(included),
    "thread excludes": names_in(excluded),
    "mask of sin": [key for key in TASKS if row_of("aten::sin").get(key) != "fallthrough"],
    "keys of the call": stops("aten::sin", x),
}
parts = []
for column, (name, members) in enumerate(sets.items()):
    last = column == 4
    parts.append(words(196 + 116 * column, 20, name, "middle", weight="bold" if last else "normal"))
    for row, key in enumerate(TASKS):
        turn = f"turn {members.index(key) + 1}" if last and key in members else ""
        color = "#D55E00" if last else "#999999" if "excludes" in name else "#0072B2"
        left, top = 146 + 116 * column, 32 + 34 * row
        if key in members:
            parts.append(box(left, top, 100, turn, color))
        else:
            parts.append(box(left, top, 100, "", "#DDDDDD", full=False))
for row, key in enumerate(TASKS):
    parts.append(words(136, 49 + 34 * row, key, "end"))
picture(730, 210, "From the keys of x to the keys of the call", *parts)

# %% [markdown]
# Two keys are left for `x.sin()`. Autograd's kernel runs first. It then asks for the rest of the
# call, and the CPU's kernel computes. Three keys dropped out on the way:
#
# - `AutocastCPU`: the thread excludes it, because autocast is off.
# - `ADInplaceOrView`: the thread includes it, but `sin` neither writes nor makes a view.
# - `BackendSelect`: the thread includes it, but `sin` knows its device from its argument.
#
# Now the same rule as Python. The toy has six keys, with the names and the order of PyTorch.


# %%
class Key(IntEnum):
    CPU = 0  # compute
    BackendSelect = 1  # find the device of an operator without tensors
    ADInplaceOrView = 2  # note writes and views
    AutogradCPU = 3  # record
    AutocastCPU = 4  # change the type
    TESTING_ONLY_GenericMode = 5  # free: we shall use it


@dataclass(frozen=True)
class KeySet:
    """A set of keys: one bit for each."""

    bits: int = 0

    @staticmethod
    def of(*keys):
        return KeySet(sum(1 << key for key in set(keys)))

    def __or__(self, other):
        return KeySet(self.bits | other.bits)

    def __and__(self, other):
        return KeySet(self.bits & other.bits)

    def __sub__(self, other):
        return KeySet(self.bits & ~other.bits)

    def __iter__(self):
        """From the highest to the lowest."""
        return (key for key in reversed(Key) if self.bits >> key & 1)

    def below(self, key):
        """Those lower than `key`."""
        return KeySet(self.bits & ((1 << key) - 1))


class Thread(threading.local):
    """What a thread adds to the keys of each call, and what it takes away."""

    included = excluded = KeySet()


thread = Thread()
thread.included = KeySet.of(Key.BackendSelect, Key.ADInplaceOrView)
thread.excluded = KeySet.of(Key.AutocastCPU)


class Tensor:
    keys = KeySet.of(Key.CPU, Key.ADInplaceOrView, Key.AutogradCPU, Key.AutocastCPU)
    made_by = None  # autograd writes here

    def __init__(self, number):
        self.number = number


keys = (Tensor(1.0).keys | thread.included) - thread.excluded
print("after step 2:", *(key.name for key in keys))

# %% [markdown]
# (One detail is left out. In PyTorch `AutogradCPU` and `AutogradCUDA` are two columns of the table,
# but not two bits. There is a bit for *autograd* and one for each *device*, and the two together
# name the column. So 64 bits are enough for more than a hundred columns.)
#
# ## What does fallthrough do?
#
# It says: **this operator has nothing to do at this key; skip the key**.
#
# At most keys, most operators have nothing to do. A kernel there that only passes the call on would
# cost time at every call. So an operator's place in the table can say `fallthrough`. That is not a
# function that runs. It removes the key from the operator's mask. The dispatcher keeps the mask up
# to date whenever something is registered. At a call, step 3 is one *and* of two numbers.
#
# A fallthrough is not the same as an empty place. At a key with `fallthrough` the dispatcher goes
# on to the next key. At a key with *nothing* it stops, with an error.
#
# In C++ one registers it in two ways:
#
# ```cpp
# m.impl("sin", torch::CppFunction::makeFallthrough());   // sin has nothing to do at this key
# m.fallback(torch::CppFunction::makeFallthrough());      // nor has any operator without a kernel
# ```
#
# In Python it is `torch.library.fallthrough_kernel`. Here are three operators of our own, each with
# a kernel for the CPU. At `AutogradCPU` the first has a kernel and the second a fallthrough. The
# third is called with a sparse tensor, and at `SparseCPU` its place is empty. (With `with_keyset` a
# kernel is given the keys of the call; what it does with them is told below.)

# %%
library = torch.library.Library("page", "DEF")
ran = []

for name in ("recorded", "skipped", "empty"):
    library.define(f"{name}(Tensor x) -> Tensor")
    library.impl(name, lambda x: ran.append("CPU") or x + x, "CPU")


def at_autograd(keys, x):
    ran.append("AutogradCPU")
    rest = keys & _C._dispatch_keyset_full_after(key_named("AutogradCPU"))  # the lower keys
    return torch.ops.page.recorded.default.redispatch(rest, x)


library.impl("recorded", at_autograd, "AutogradCPU", with_keyset=True)
library.impl("skipped", torch.library.fallthrough_kernel, "AutogradCPU")
for name in ("recorded", "skipped"):
    ran.clear()
    getattr(torch.ops.page, name)(x)
    print(f"{name}: kernels ran at", ", ".join(ran))
try:
    torch.ops.page.empty(x.to_sparse())  # there is nothing at SparseCPU
except NotImplementedError as error:
    print("empty:", str(error).split(". ")[0])

# %% [markdown]
# ## Where does the dispatcher find the kernel?
#
# In a table. It has a row for each operator and a column for each key. Here is a piece of
# PyTorch's, turned so that keys go down from high to low. Each column is an operator.
#
# - A **full** box is at a key that a call on our `x` has after step 2. Grey ones say `fallthrough`.
# - A **hollow** box is at a key that such a call does not have.
# - **No box**: nothing is registered.
# - The black line is the path of the call, and each ring is a kernel that runs.

# %% tags=["hide-input"]
# Alt: A table of seven operators and seven keys. The line of sin and mm has rings at AutogradCPU
# and CPU; that of mul_ and view also at ADInplaceOrView; that of linear ends at AutogradCPU; that
# of zeros goes through BackendSelect to CPU.
OPERATORS = {
    "sin": "aten::sin",
    "mm": "aten::mm",
    "mul_": "aten::mul_.Tensor",
    "view": "aten::view",
    "linear": "aten::linear",
    "zeros": "aten::zeros",
    "recorded": "page::recorded",
}
KEYS = ["FuncTorchBatched", *TASKS]
KEYS.insert(KEYS.index("CPU"), "SparseCPU")


def way(label):
    name = OPERATORS[label]
    found = stops(name) if label == "zeros" else stops(name, x)
    parts = [key for key in found if row_of(name).get(key) == "math kernel"]
    found = found[: found.index(parts[0]) + 1] if parts else found
    return [*found, "CPU"] if label == "zeros" else found  # BackendSelect goes on to the device


parts = []
for column, (label, name) in enumerate(OPERATORS.items()):
    left = 136 + 96 * column
    parts.append(words(left + 42, 18, label, "middle", weight="bold"))
    for line, key in enumerate(KEYS):
        kind = row_of(name).get(key)
        if kind:
            reached = keys_of_thread_and(*[] if label == "zeros" else [x])
            full = key in reached or (label == "zeros" and key == "CPU")
            parts.append(box(left, 28 + 34 * line, 84, "", COLORS[kind], full))
    path = [(left + 42, 41 + 34 * KEYS.index(key)) for key in way(label)]
    line = " ".join(f"L{a} {b}" for a, b in path)
    parts.append(
        f'<path d="M{left + 42} 22 {line}" stroke="#000000" stroke-width="2" fill="none"/>'
    )
    parts += [
        f'<circle cx="{a}" cy="{b}" r="5" fill="#FFFFFF" stroke="#000000" stroke-width="2"/>'
        for a, b in path
    ]
for line, key in enumerate(KEYS):
    parts.append(words(128, 45 + 34 * line, key, "end"))
for i, (kind, color) in enumerate(COLORS.items()):
    parts.append(box(136 + 165 * (i % 4), 278 + 32 * (i // 4), 24, "", color))
    parts.append(words(168 + 165 * (i % 4), 295 + 32 * (i // 4), kind))
picture(810, 345, "A piece of PyTorch's table", *parts)

# %% [markdown]
# - `sin` and `mm` have two stops: record, compute.
# - `mul_` writes into its argument and `view` makes a view. So `ADInplaceOrView` has a kernel
#   there.
# - `linear` has one stop. It is made of other operators, and its kernel at autograd's key calls
#   those. They are new calls, which begin at the top.
# - `zeros` has no tensor among its arguments. The key `BackendSelect`, which the thread includes,
#   is what brings it to a kernel. That one reads the argument `device` and goes on to the CPU.
#
# For the toy, the table is a dictionary in each operator. Only its class is missing:

# %%
fallbacks = {}  # for operators without a kernel of their own at a key


def fallthrough(op, keys, args):
    """Stand in a table for "nothing to do at this key"; it is never run."""


class Operator:
    """A name, and a table with at most one kernel for each key."""

    def __init__(self, name):
        self.name = name
        self.kernels = {}

    def entry(self, key):
        """Return what stands in the table at a key, or None."""
        return self.kernels.get(key) or fallbacks.get(key)

    def mask(self):
        """Return the keys at which the table does not say `fallthrough`."""
        return KeySet.of(*(key for key in Key if self.entry(key) is not fallthrough))

    def __call__(self, *args):
        """Work out the keys of this call, and run the kernel of the highest one."""
        keys = thread.included
        for arg in args:
            keys |= getattr(arg, "keys", KeySet())
        return self.redispatch((keys - thread.excluded) & self.mask(), args)

    def redispatch(self, keys, args):
        """Run the kernel of the highest of these keys."""
        for key in keys:
            kernel = self.entry(key)
            if kernel is None:
                raise NotImplementedError(f"{self.name} has no kernel for {key.name}")
            return kernel(self, keys, args)
        raise NotImplementedError(f"this call of {self.name} has no key")


# %% [markdown]
# `__call__` is the three steps. `redispatch` is the subject of the next question. `fallbacks` serve
# operators that have nothing of their own at a key. For now there are three, and all of them are
# fallthroughs.

# %%
for key in (Key.AutocastCPU, Key.ADInplaceOrView, Key.BackendSelect):
    fallbacks[key] = fallthrough

sin = Operator("sin")
print("in the mask of sin:", *(key.name for key in sin.mask()))

# %% [markdown]
# (Nothing is registered at these three yet. An empty place stays in the mask, so a call that gets
# there ends with an error.)
#
# ## How does the next kernel get its turn?
#
# The kernel that has its turn calls the operator again, with lower keys only. This is a
# **redispatch**. It does not look at the arguments again: a kernel is given the keys of its call,
# and takes its own key and all higher ones out. If it does not redispatch, the call ends with it.
#
# The toy's autograd kernel notes who made a tensor, and leaves the computing to the next key.

# %%
mul, cube = Operator("mul"), Operator("cube")
journey = []  # who had a turn


def computes(f):
    def kernel(op, keys, args):
        journey.append(f"{op.name} at CPU")
        return Tensor(f(*(arg.number for arg in args)))

    return kernel


def record(op, keys, args):
    journey.append(f"{op.name} at AutogradCPU")
    result = op.redispatch(keys.below(Key.AutogradCPU), args)
    result.made_by = op.name
    return result


def cube_at_cpu(op, keys, args):
    journey.append("cube at CPU")
    (x,) = args
    return mul(mul(x, x), x)  # two new calls


sin.kernels[Key.CPU] = computes(math.sin)
mul.kernels[Key.CPU] = computes(lambda a, b: a * b)
cube.kernels[Key.CPU] = cube_at_cpu
for op in (sin, mul, cube):
    op.kernels[Key.AutogradCPU] = record


def travelled(f, *args):
    journey.clear()
    f(*args)
    return list(journey)


print(*travelled(sin, Tensor(1.0)), sep=", ")
print(*travelled(cube, Tensor(2.0)), sep=", ")

# %% [markdown]
# The first line is what we want. The second is not. Autograd has recorded the cube, and then each
# multiplication inside it as well. Why? `mul(x, x)` is a **new call**. It begins at the top, and
# knows nothing of the cube.
#
# ## How does autograd keep from recording twice?
#
# By the thread's excluded keys. What autograd's kernel wants to say is: *until I return, no call on
# this thread comes to autograd*. So it excludes the key while it runs.


# %%
@contextmanager
def keys_changed(include=KeySet(0), exclude=KeySet(0)):
    """Until the block ends, include these keys in all calls of this thread, or exclude them."""
    before = thread.included, thread.excluded
    thread.included, thread.excluded = before[0] | include, before[1] | exclude
    try:
        yield
    finally:
        thread.included, thread.excluded = before


def record_once(op, keys, args):
    with keys_changed(exclude=KeySet.of(Key.AutogradCPU, Key.ADInplaceOrView)):
        return record(op, keys, args)


for op in (sin, mul, cube):
    op.kernels[Key.AutogradCPU] = record_once
print(*travelled(cube, Tensor(2.0)), sep=", ")

# %% [markdown]
# Redispatching and excluding are two things, and many kernels do both.
#
# | | is about |
# |---|---|
# | **redispatch** | *this* call: which key is next |
# | **exclude** | *new* calls, until the kernel returns |
#
# PyTorch's autograd does both, too. To see it we need an observer below autograd. We put a kernel
# for `sin` at `FPGA`, a key for a device that we do not have, and let the thread include that key.

# %%
aten = torch.library.Library("aten", "IMPL")
seen = {}


def observe(keys, x):
    seen["this call, below autograd"] = names_in(keys)
    now = _C._dispatch_keys(x) | _C._dispatch_tls_local_include_set()
    seen["a new call from there"] = names_in(now - _C._dispatch_tls_local_exclude_set())
    rest = keys & _C._dispatch_keyset_full_after(key_named("FPGA"))
    return torch.ops.aten.sin.default.redispatch(rest, x)


aten.impl("sin", observe, "FPGA", with_keyset=True)
with _C._IncludeDispatchKeyGuard(key_named("FPGA")):
    x.clone().requires_grad_().sin()
show_table([(name, ", ".join(keys)) for name, keys in seen.items()], ["", "keys, from high to low"])

# %% [markdown]
# In this call only lower keys are left: that is the redispatch. A new call would not come to
# autograd either: that is the exclusion. (`BackendSelect` is there after step 2, and most masks
# take it out.)
#
# ## What do `autocast`, `inference_mode` and `no_grad` change?
#
# The first two change the thread's sets. So does a `TorchDispatchMode`. `no_grad` changes neither:
# it sets a flag, which autograd's kernel reads when it has its turn.


# %%
class Mode(torch.utils._python_dispatch.TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def family(key):
    return "all of autograd's keys" if key.startswith("Autograd") else f"`{key}`"


def changes():
    now = _C._dispatch_tls_local_include_set(), _C._dispatch_tls_local_exclude_set()
    found = {
        "includes": now[0] - included,
        "no longer includes": included - now[0],
        "excludes": now[1] - excluded,
        "no longer excludes": excluded - now[1],
    }
    found = {verb: dict.fromkeys(map(family, names_in(keys))) for verb, keys in found.items()}
    return "; ".join(f"{verb} {', '.join(keys)}" for verb, keys in found.items() if keys) or "-"


rows = []
for text in ("torch.autocast('cpu')", "torch.inference_mode()", "torch.no_grad()", "Mode()"):
    with eval(text):
        rows.append((f"`with {text}`", changes()))
show_table(rows, ["inside", "the thread"])

# %% [markdown]
# `AutocastCPU` is above `AutogradCPU`. So autograd records the casts that autocast makes, and saves
# what has the smaller type. (`PythonTLSSnapshot` belongs to the `Python` key: it keeps a copy of
# the thread's two sets for it.)
#
# ## What is a boxed kernel?
#
# In C++ every function has a type. A kernel of `sin` takes a tensor, one of `mul` takes two, one of
# `zeros` takes sizes and a device. A caller must know that type when it is compiled. Such a kernel
# is **unboxed**.
#
# A **boxed** kernel takes the operator and a *stack*. On the stack lie the arguments. Each of them
# is an `IValue`, a C++ type that can hold a value of any kind. The kernel takes its arguments off
# the stack and puts its results there. So all boxed kernels have *one* type, and one of them can
# serve every operator. The operator's *schema* tells it how many arguments it has, and which types.
#
# ```text
# unboxed:   Tensor  mul(Tensor a, Tensor b)
# boxed:     void    kernel(operator, stack)          stack before: [a, b]   after: [result]
# ```
#
# Boxing costs time: each argument is wrapped and unwrapped. PyTorch calls a kernel unboxed where it
# can. For a C++ kernel it has both forms. Of a kernel written in Python it has the boxed one only:


# %%
def forms(name, key):
    """Which forms of a kernel there are, as `_dispatch_dump` tells."""
    lines = _C._dispatch_dump(name).splitlines()
    (line,) = [line for line in lines if line.startswith(f"{key}:") or line.startswith(f"{key} ")]
    return line[line.rindex("[") :].strip("[ ]").replace(" ", " and ")


show_table(
    [(f"`{n}`", k, forms(n, k)) for n, k in (("aten::sin", "CPU"), ("page::recorded", "CPU"))],
    ["operator", "kernel at", "forms"],
)

# %% [markdown]
# In the toy all kernels are boxed: `kernel(op, keys, args)`, with the arguments as one tuple.
#
# ## What is a fallback, and why is it boxed?
#
# A **fallback** is a kernel for a whole column of the table: at its key it serves every operator
# that has nothing better there, also operators that are registered later. It has to be boxed,
# because those operators have arguments of any number and type.
#
# A fallback fits work that is the same for every operator: count it, record it, unwrap its
# arguments. Here we count. `TESTING_ONLY_GenericMode` is above all other keys of the toy.

# %%
counted = []


def count(op, keys, args):
    counted.append(op.name)
    with keys_changed(exclude=KeySet.of(Key.TESTING_ONLY_GenericMode)):
        return op.redispatch(keys.below(Key.TESTING_ONLY_GenericMode), args)


fallbacks[Key.TESTING_ONLY_GenericMode] = count
with keys_changed(include=KeySet.of(Key.TESTING_ONLY_GenericMode)):
    cube(sin(Tensor(1.0)))
print(counted)

# %% [markdown]
# The same in PyTorch, at the same key. A `Library` whose namespace is `_` is for every operator.

# %%
GENERIC_MODE = key_named("TESTING_ONLY_GenericMode")
everything = torch.library.Library("_", "IMPL")
torch_counted = []


def torch_count(op, *args, **kwargs):
    torch_counted.append(op.name())
    with _C._ExcludeDispatchKeyGuard(_C.DispatchKeySet(GENERIC_MODE)):
        return op(*args, **kwargs)


everything.fallback(torch_count, "TESTING_ONLY_GenericMode")
with _C._IncludeDispatchKeyGuard(GENERIC_MODE):
    torch.nn.functional.linear(torch.zeros(2), x).sin()
print(torch_counted)

# %% [markdown]
# It saw `zeros`, although no tensor was among its arguments, because the key came from the thread.
# It did not see the parts of `linear`: they ran while the key was excluded.
#
# ## What does `TORCH_LIBRARY_IMPL(_, key, m)` mean?
#
# The underscore stands where a library's name would stand, and means *every library*. With
# `m.fallback(...)` inside it is how C++ registers a fallback for `key`. A key has at most one.
#
# ```cpp
# TORCH_LIBRARY_IMPL(_, SomeKey, m) {
#   m.fallback(torch::CppFunction::makeFromBoxedFunction<&kernel>());
# }
# ```
#
# ## Is `m.impl(op, makeFromBoxedFunction)` a fallback?
#
# No. `makeFromBoxedFunction` says *how the kernel takes its arguments*: boxed. `m.impl` or
# `m.fallback` says *whom it serves*.
#
# | | serves |
# |---|---|
# | `m.impl("sin", makeFromBoxedFunction<&f>())` | `sin` at this key: a kernel that is boxed |
# | `m.fallback(makeFromBoxedFunction<&f>())` | every operator that has nothing better at this key |
# | `m.impl("sin", makeFallthrough())` | `sin` skips this key |
# | `m.fallback(makeFallthrough())` | every operator that has nothing better skips this key |
#
# The difference shows in the order of the next answer: a kernel from `impl` comes first, and a
# fallback comes last.
#
# ## Which kernel gets a place that several could fill?
#
# PyTorch has a few keys that stand for many. They are called **alias keys**. You register at them,
# but no tensor has them.
#
# - `Autograd` stands for `AutogradCPU`, `AutogradCUDA` and so on.
# - `CompositeExplicitAutograd` stands for all devices. Such a *default kernel* is written in terms
#   of other operators. Autograd still sees the operator as one step.
# - `CompositeImplicitAutograd` stands for all devices and for autograd. So the operator falls into
#   its parts *before* autograd records, and autograd records the parts. `linear` is one. PyTorch's
#   tables call such a kernel a *math kernel*.
#
# For each place PyTorch takes the first of these that exists:
#
# 1. the operator's kernel for this very key;
# 2. its default kernel, if the key is a device (`CompositeExplicitAutograd`);
# 3. its math kernel, if the key is a device or autograd's (`CompositeImplicitAutograd`). At
#    autograd's key there is a condition: the device must have no kernel of its own from 1 or 2;
# 4. its kernel for `Autograd`, if the key is autograd's;
# 5. the fallback of the key.
#
# If there is none of these, the place is empty. We define five operators and look.

# %%
cells = {
    "plain": ["CPU"],
    "with_autograd": ["CPU", "Autograd"],
    "explicit": ["CompositeExplicitAutograd", "CPU"],
    "implicit": ["CompositeImplicitAutograd"],
    "both": ["CompositeImplicitAutograd", "CPU"],
}
for name, keys in cells.items():
    library.define(f"{name}(Tensor x) -> Tensor")
    for key in keys:
        library.impl(name, lambda x: x.clone(), key)
at = ["AutogradCUDA", "AutogradCPU", "ADInplaceOrView", "CUDA", "CPU"]
show_table(
    [(f"`{n}`", *(row_of(f"page::{n}").get(key, "") for key in at)) for n in cells],
    ["operator", *at],
)

# %% [markdown]
# (The real list has two more special cases, for batched and for nested tensors.)
#
# Look at `both`. On CUDA it falls into its parts. On the CPU it has a kernel of its own, so
# autograd has to treat it as one step. Nobody said how, so its place at `AutogradCPU` is the
# fallback. It passes the call on, and warns later if a gradient is asked for.
#
# ## What is the difference between a mode and a wrapper?
#
# A key gets into a call in two ways: the thread includes it, or a tensor has it.
#
# - A **mode** is a key that the thread includes. It belongs to a *stretch of a program* on one
#   thread. It sees every operator there, also those without tensors, and nothing afterwards.
# - A **wrapper** is a tensor that has the key, and has another tensor inside. It belongs to a
#   *value*, and goes where the value goes: into other threads, and into a later backward.
#
# In Python the first is a `TorchDispatchMode`, the second a tensor subclass with
# `__torch_dispatch__`. Both use the key `Python`. We let each of them see four operators.


# %%
class Wrapper(torch.Tensor):
    @staticmethod
    def __new__(cls, inner):
        return cls._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        noticed.append(func._schema.name)
        inner = [arg.inner if isinstance(arg, Wrapper) else arg for arg in args]
        return Wrapper(func(*inner, **(kwargs or {})))


class NoticingMode(torch.utils._python_dispatch.TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        noticed.append(func._schema.name)
        return func(*args, **(kwargs or {}))


def four_operators(value, block):
    with block:
        torch.ones(2)
        value.sin()
        other = threading.Thread(target=value.exp)
        other.start()
        other.join()
    value.cos()


found = {}
for who, value, block in (("mode", x, NoticingMode()), ("wrapper", Wrapper(x), nullcontext())):
    noticed = []
    four_operators(value, block)
    found[who] = [name.partition("::")[2] for name in noticed]
rows = [
    ("`torch.ones(2)`, which has no tensor", "ones"),
    ("`value.sin()`", "sin"),
    ("`value.exp()` on another thread", "exp"),
    ("`value.cos()` after the block", "cos"),
]
show_table(
    [(text, *("yes" if name in found[who] else "no" for who in found)) for text, name in rows],
    ["operator", *(f"the {who} sees it" for who in found)],
)

# %% [markdown]
# Some transforms need both. `vmap` has a wrapper, `FuncTorchBatched`, which knows the dimension of
# the batch. It also has a mode, `FuncTorchVmapMode`, which sees the operators that draw random
# numbers.
#
# ## What are `TESTING_ONLY_GenericMode` and `TESTING_ONLY_GenericWrapper` for?
#
# For a test of these two ways. They came with boxed fallbacks, in [pull request
# #26719](https://github.com/pytorch/pytorch/pull/26719) of September 2019. Its tests register a
# fallback at each of the two. One behaves as a mode and one as a wrapper. PyTorch itself registers
# nothing at these keys, and their comments say that they are for tests within one process. That is
# why this page could use one.
#
# ## How do I look at my own program?
#
# | to see | call |
# |---|---|
# | the keys of a tensor | `torch._C._dispatch_keys(tensor)` |
# | the thread's two sets | `torch._C._dispatch_tls_local_include_set()`, `..._exclude_set()` |
# | an operator's row; the file of each kernel | `torch._C._dispatch_dump_table("aten::sin")` |
# | what was registered for it | `torch._C._dispatch_dump("aten::sin")` |
# | operators as they run, below autograd | a `TorchDispatchMode` |
#
# In C++ the rule stands in three headers that come with PyTorch. `c10/core/DispatchKey.h` has the
# keys in their order. `ATen/core/dispatch/DispatchKeyExtractor.h` has the three steps, in
# `computeDispatchKeySet`. `ATen/core/dispatch/Dispatcher.h` has `call` and `redispatch`.
#
# ## Try yourself
#
# **Question.** A tensor's values are computed only when somebody reads them: it is *lazy*. Should
# its key be above or below autograd's?
#
# <details><summary>Answer</summary>
#
# Below. Then autograd records operators on lazy tensors as it does others, and what it saves for
# the backward is lazy as well. With a key above autograd, autograd would only see the values that
# were computed in the end.
#
# </details>
#
# **Question.** A kernel at autograd's key could call `cube(x)` again while autograd's key is
# excluded. What would be different from a redispatch?
#
# <details><summary>Answer</summary>
#
# The new call begins at the top. If a key above autograd is in the set, such as autocast's, its
# kernel gets a second turn.
#
# </details>
#
# **Where to go on.** [Notebook 2](02_vmap.ipynb) builds `vmap` on this toy dispatcher. The library
# that these notebooks belong to, `rematfn`, is one boxed fallback at a key below autograd. It sees
# every operator before a kernel reads bytes. So it can free tensors and compute them again
# ([notebook 5](05_boxed_kernel.ipynb)). Two other good texts are Edward Yang's [Let's talk about
# the PyTorch dispatcher](https://blog.ezyang.com/2020/09/lets-talk-about-the-pytorch-dispatcher/)
# and [How does the dispatcher
# work?](https://dev-discuss.pytorch.org/t/how-does-the-dispatcher-work/3358).
