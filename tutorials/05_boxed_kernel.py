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
# # 5. The boxed kernel
#
# The toy's `remat` stands at a key of the toy's dispatcher, just above the kernels (notebook 4). In
# PyTorch there are more keys, and none of them is meant for us. Here we find a place, see what goes
# wrong there, and then follow one operator through the same journey twice: in the toy, and in
# `rematfn`'s C++.
#
# From notebook 1 we take this:
#
# - Each operator has a table of *kernels*, one for each *dispatch key*.
# - A call collects the keys of its tensors, and those that the thread *includes*. It leaves out
#   those that the thread *excludes*. The highest key that is left is served.
# - Its kernel may *redispatch*: call the operator again with lower keys only.
# - A kernel is *boxed* if it takes its arguments as a list of values of any type. So it has the
#   same C++ type whatever the operator is.
# - A *fallback* is a boxed kernel for a key. It serves each operator that has no kernel of its own
#   there.
#
# And from notebook 4: a *version* is the contents of a storage until the next write. It is
# *evicted* when its bytes are given up, and comes back when its *producer*, the recorded operation
# that made it, is *replayed*. A *cell* is a storage as its level knows it, and the *handle* leads
# from a tensor to its cell.

# %%
# SPDX-License-Identifier: Apache-2.0
import functools

import matplotlib.pyplot as plt
import numpy as np
import torch
import torch.nn.functional as F
import toy
from show import quote, table
from torch import _C
from toy.remat import Remat, Step

numbers = np.linspace(-1, 1, 64).reshape(8, 8)
toy_x, x = toy.Array(numbers), torch.from_numpy(numbers)


def key_named(name):
    return _C._parse_dispatch_key(name)


def registered(operator, key):
    """The line of the dispatcher's table for a key."""
    lines = _C._dispatch_dump_table(operator).splitlines()
    return next(line for line in lines if line.startswith(key + ":"))


# %% [markdown]
# Here is the whole journey in one picture. On the left is a call on its way down through the keys.
# The level stands at one of them: below all that wraps and records, and above the kernels. On the
# right is what it does there with one operator, step by step. The names are those of the C++, and
# of the toy's class `Step`; part 4 goes through them one by one.

# %% tags=["hide-input"]
# Alt: Left, boxes from high to low: torch.func, autocast, autograd, then the level, then kernels.
# An arrow leads down through all of them. Right, the steps of the level in order: govern,
# require_room, bring_back, make_operation, make_room, run_kernel, take_results, each with its task.
figure, axes = plt.subplots(figsize=(8.5, 4.6))
axes.set(xlim=(0, 17), ylim=(0, 9.4))
axes.axis("off")


def labelled(x, y, width, text, color="#DDDDDD", ink="black", **style):
    axes.add_patch(plt.Rectangle((x, y), width, 0.8, facecolor=color))
    axes.text(x + width / 2, y + 0.4, text, ha="center", va="center", color=ink, **style)


above_us = ("torch.func: grad, vmap", "autocast", "autograd: records and saves")
for i, text in enumerate(above_us):
    labelled(0, 7.2 - 1.5 * i, 5.5, text)
labelled(0, 2.7, 5.5, "the level", "#0072B2", "white", weight="bold")
labelled(0, 0.6, 5.5, "kernels, which read bytes")
for y in (7.2, 5.7, 4.2, 2.7):
    end = 1.5 if y == 2.7 else y - 0.65
    axes.annotate("", (2.75, end), (2.75, y), arrowprops={"arrowstyle": "->"})
axes.text(2.75, 8.6, "h * y", ha="center", family="monospace")
stages = {
    "govern": "finds the level",
    "require_room": "does it fit the budget at all?",
    "bring_back": "replays what was evicted",
    "make_operation": "records the call",
    "make_room": "evicts other versions",
    "run_kernel": "goes on to lower keys",
    "take_results": "gives the results a key and a handle",
}
for i, (name, task) in enumerate(stages.items()):
    y = 7.9 - 1.2 * i
    labelled(6.7, y, 3.6, name, "#0072B2", "white", family="monospace", size=9)
    axes.text(10.6, y + 0.4, task, va="center")
axes.plot([5.5, 6.7], [3.5, 8.7], [5.5, 6.7], [2.7, 0.7], color="#0072B2", lw=1, ls=":")
plt.show()

# %% [markdown]
# ## 1. Where to stand
#
# A level has to see operators, and what it sees has to be *its* tensors. That decides where it
# stands.
#
# - **Below autograd.** Autograd saves tensors for the backward. If we stand below it, the results
#   that we hand up are what it saves, and so what it has saved can be evicted.
# - **Below functorch**, for the same reason: what `grad` and `vmap` wrap is then ours. Inside of
#   `vmap` an operator reaches us as one operator on the whole batch.
# - **Above the kernels** that read bytes. When they run, everything has to be here.
#
# In Python a `TorchDispatchMode` sees every operator below autograd. It would not do. It sees them
# only while it is active, so a backward that comes later reads what was evicted, and nobody makes
# it again. What it is given under `torch.func` may be a wrapper, which has no storage. And it calls
# Python for each operator, which takes longer than a small operator itself.
#
# The next cell sorts a choice of keys from high to low, and asks which have a fallback already.
# (The set of keys below a key is known to the dispatcher; we sort by that.)

# %%
serves = {
    "FuncTorchDynamicLayerFrontMode": "functorch: interpreters begin here",
    "FuncTorchGradWrapper": "functorch: wrapped tensors",
    "FuncTorchBatched": "functorch: batched tensors",
    "AutocastCPU": "autocast",
    "AutogradCPU": "autograd: records, and saves tensors",
    "ADInplaceOrView": "autograd: counts writes, notes views",
    "Functionalize": "writes become results",
    "FuncTorchDynamicLayerBackMode": "functorch: the next interpreter",
    "Python": "dispatch modes, tensor subclasses",
    "BackendSelect": "operators without tensors: which device?",
    "SparseCPU": "kernels of sparse tensors",
    "MkldnnCPU": "kernels of mkldnn tensors",
    "CustomRNGKeyId": "nobody",
    "QuantizedCPU": "kernels of quantised tensors",
    "FPGA": "nobody",
    "CPU": "kernels",
}


def is_higher(one, other):
    return _C._dispatch_keyset_full_after(key_named(one)).has(key_named(other))


by_height = functools.cmp_to_key(lambda one, other: -1 if is_higher(one, other) else 1)
order = sorted(reversed(serves), key=by_height)
has_fallback = {key: _C._dispatch_has_backend_fallback(key_named(key)) for key in order}
table(
    [(key, serves[key], "yes" if has_fallback[key] else "") for key in order],
    ["key, from high to low", "serves", "has a fallback"],
)
place = {key: i for i, key in enumerate(order)}
assert place["AutogradCPU"] < place["FuncTorchDynamicLayerBackMode"] < place["CustomRNGKeyId"]
assert place["CustomRNGKeyId"] < place["FPGA"] < place["CPU"]
assert not has_fallback["CustomRNGKeyId"]
assert not has_fallback["FPGA"]

# %% [markdown]
# The dispatcher has no key for us, and a library cannot add one. So we *borrow* one. Below
# `FuncTorchDynamicLayerBackMode`, functorch's lowest key, and above `CPU` there are keys that
# nobody in this process uses. `rematfn` borrows `CustomRNGKeyId`, which was made for other people's
# random generators. To try things out in Python we take `FPGA`, made for a device that PyTorch does
# not have.
#
# A word for the Note below: a *level tensor* is a tensor with our key and a handle.

# %%
quote("csrc/tensors/dispatch_key.h", "// Note [Which key we borrow]", "kernel puts the handle on")

# %% [markdown]
# Three consequences stand at the end of that Note. We run into the first two in the next part, and
# into the third in part 4.
#
# **Question.** `SparseCPU` and `MkldnnCPU` are above both of the borrowed keys. What can go wrong
# there?
#
# <details><summary>Answer</summary>
#
# The kernel of a product of a sparse and a dense matrix is found under `SparseCPU`, before it would
# be our turn. It reads the dense matrix, which may be evicted. `rematfn` puts a kernel of its own
# around each of these, which brings back what is read and then goes on to the original: `Note
# [Kernels above a level]`.
#
# </details>

# %% [markdown]
# ## 2. One kernel for all operators
#
# ### Why boxed fallbacks?
#
# A level has to do the same for each operator: see what it reads, make room, run it, note what came
# out. What would it take to write that down with C++ types?

# %%
names = _C._dispatch_get_all_op_names()
schemas = [_C._get_schema(name.partition(".")[0], name.partition(".")[2]) for name in names]


def signature(schema):
    return tuple(str(a.type) for a in schema.arguments), tuple(str(r.type) for r in schema.returns)


signatures = {signature(schema) for schema in schemas}
print(len(names) // 100 * 100, "operators, and more;", len(signatures) // 100 * 100, "signatures")
assert len(signatures) > 1000

# %% [markdown]
# More than a thousand functions with different types, and more with each library that is loaded. A
# boxed kernel is one function. It finds on a stack whatever the arguments are, and the operator's
# schema says what they mean. Registered as a fallback, it also serves operators that are defined
# later.
#
# Python can register fallbacks, too. `keys` are those that are left for this call, and `op` is the
# operator. We go on with lower keys. The `with` excludes our key, for the operators that the kernel
# calls in its turn: they are not to come to us.

# %%
KEY = key_named("FPGA")
OURS = _C.DispatchKeySet(KEY)
BELOW = _C._dispatch_keyset_full_after(KEY)
seen = []


def kernel(keys, op, *args, **kwargs):
    seen.append(str(op).removeprefix("aten.").removesuffix(".default"))
    with _C._ExcludeDispatchKeyGuard(OURS):
        return op.redispatch(keys & BELOW, *args, **kwargs)


sine_before = registered("aten::sin", "FPGA")
fallbacks = torch.library.Library("_", "IMPL")
fallbacks.fallback(kernel, "FPGA", with_keyset=True)


def seen_in(f, *args):
    seen.clear()
    with _C._IncludeDispatchKeyGuard(KEY):
        f(*args)
    return list(seen)


def sine(x):
    return x.sin()


def linear(x):
    return F.linear(x, x)


def zeros(x):
    return torch.zeros(3) + torch.zeros_like(x)[0, :3]


def gradient(x):
    return torch.func.grad(lambda x: x.sin().sum())(x)


programs = [sine, linear, zeros, gradient]
for program in programs:
    print(f"{program.__name__:9}", *seen_in(program, x))
assert seen_in(sine, x) == ["sin.out"]

# %% [markdown]
# It sees what autograd and functorch run, too: `cos` and `mul` in the last line are the backward's.
# But look at the names. The program said `sin`, and we saw `sin.out`, the form that writes into a
# given tensor. It made zeros, and we saw `zero_`. We are too late for both.
#
# **The first consequence: a default kernel beats a fallback.** Many operators have a *default
# kernel*, written in terms of other operators, which serves all keys that have nothing better.
# (PyTorch calls it *composite*.) That is so for `sin`: make an empty tensor, call `sin.out`. To the
# dispatcher `FPGA` and `CustomRNGKeyId` are keys of devices. There such a kernel counts for more
# than a fallback (notebook 1: the second place in the list, and the fifth). Here is the line of the
# table, and the function in C++ that asks whether an operator is one of these:

# %%
print(sine_before.split(": ")[0], sine_before.rpartition("/")[2])
assert sine_before.endswith("[default backend kernel]")
quote("csrc/operators/boxed_kernel.cpp", "bool needs_kernel_of_its_own", "NonFunctional);")

# %% [markdown]
# **The fix**: such an operator gets our kernel by name. We leave out those whose default kernel
# decomposes them above us (`CompositeImplicitAutograd`, such as `linear`): they are made of
# operators that we see. (The question below is about the exception in the C++.)
#
# **The second consequence: factories lose our key.** `torch.zeros(3)` is a *factory*: it has no
# tensor among its arguments. A kernel under `BackendSelect` works out the device, makes a key set
# of that alone, and goes on with it; the thread's included keys are gone. **The fix**: while a
# level is active, the thread does not include `BackendSelect`. Then it is our turn at once. When we
# go on, we put it back.
#
# Both fixes are in the next cell. `above` and `below` are guards that set the keys of the thread,
# and put them back at the end. A kernel that is registered by name is not told the operator, so
# each operator gets one of its own. All of them call `govern`. There a level would have its work to
# do; ours only notes the name.


# %%
SELECT = _C.DispatchKeySet(key_named("BackendSelect"))


def keys_of_thread():
    return _C._dispatch_tls_local_include_set(), _C._dispatch_tls_local_exclude_set()


def above():
    """While a level is active: operators of this thread come to us."""
    included, excluded = keys_of_thread()
    return _C._ForceDispatchKeyGuard((included | OURS) - SELECT, excluded)


def below():
    """While a kernel runs: they do not, and factories find their device as usual."""
    included, excluded = keys_of_thread()
    return _C._ForceDispatchKeyGuard(included | SELECT, excluded | OURS)


def go_on(keys, op, args, kwargs):
    with below():
        if _C._dispatch_has_kernel_for_dispatch_key(op.name(), "BackendSelect"):
            return op(*args, **kwargs)  # a factory begins anew, without us
        return op.redispatch(keys & BELOW, *args, **kwargs)


def by_name(keys, *args, op, **kwargs):
    return govern(keys, op, args, kwargs)


def govern(keys, op, args, kwargs):
    seen.append(str(op).removeprefix("aten.").removesuffix(".default"))
    return go_on(keys, op, args, kwargs)


def register():
    library, count = torch.library.Library("aten", "IMPL"), 0
    for name in _C._dispatch_get_all_op_names():
        namespace, _, rest = name.partition("::")
        has = functools.partial(_C._dispatch_has_kernel_for_dispatch_key, name)
        defaults = ("CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional")
        if namespace != "aten" or not any(map(has, defaults)) or has("CompositeImplicitAutograd"):
            continue
        packet, _, overload = rest.partition(".")
        op = getattr(getattr(torch.ops.aten, packet), overload or "default")
        library.impl(rest, functools.partial(by_name, op=op), "FPGA", with_keyset=True)
        count += 1
    return library, count


fallbacks._destroy()
fallbacks = torch.library.Library("_", "IMPL")
fallbacks.fallback(lambda keys, op, *a, **k: govern(keys, op, a, k), "FPGA", with_keyset=True)
by_names, count = register()
print(count // 100 * 100, "operators, and more, by name")
assert count > 1000

# %% [markdown]
# Now `rematfn` comes in. Its import registers its kernel in the same way, on its own key. We
# compare what the two see.

# %%
import rematfn


def seen_in(f, *args):
    seen.clear()
    with above():
        f(*args)
    return list(seen)


def seen_by_rematfn(f, *args):
    events = rematfn.record(f, *args)._core.events()
    return [data[0].removeprefix("aten::") for kind, data in events if kind == "call"]


def is_view(name):
    packet, _, overload = name.partition(".")
    op = getattr(getattr(torch.ops.aten, packet), overload or "default")
    return bool(op._schema.returns[0].alias_info) and not op._schema.is_mutable


rows = []
for program in programs:
    ours, theirs = seen_in(program, x), seen_by_rematfn(program, x)
    rows.append((program.__name__, " ".join(ours), " ".join(theirs)))
    assert [name.partition(".")[0] for name in ours if not is_view(name)] == theirs
table(rows, ["program", "our kernel sees", "rematfn records"])
assert rows[0][1:] == ("sin", "sin")
assert "rematfn" in registered("aten::sin", "CustomRNGKeyId")

# %% [markdown]
# The two agree, but for views: `t`, `expand`, `select`, `slice` and `as_strided` move no bytes.
# `rematfn` sees them, and has nothing to record. (Its names are without overloads.)
#
# One more thing about boxes: they are not free. To put a tensor on a stack is to refer to it once
# more. If Python held the only reference, that takes the interpreter's lock. So `rematfn` has an
# *unboxed* kernel besides, for the fifteen commonest signatures. It does the same; its arguments
# come typed. Here are the signatures: `T` is a tensor that is read, `Written` one that is written,
# `S` a number. (An `IValue` is C++'s value of any type, of which a boxed kernel's stack is made.)

# %%
quote("csrc/operators/invocation.h", "// Note [A reference to an", "until we return.")
quote("csrc/operators/unboxed_kernel.cpp", "return first_of<at::Tensor(T),", "// fill_")

# %% [markdown]
# **Question.** `linear` has no kernel of ours. Its `mm` has. What would a level lose if it caught
# `linear` itself, as one operator?
#
# <details><summary>Answer</summary>
#
# Not bits: the only kernel that `linear` has is its decomposition. It would lose sight. What is
# made inside of the decomposition would have no version, and could not be evicted. And under
# autograd, which decomposes `linear` above us, the same program would be recorded in another way.
#
# Some operators that decompose do have a kernel of their own for the CPU, `silu_backward` for one.
# Under our key the decomposition would be found first, and give other bits than that kernel. So
# these get our kernel by name: that is the line with `any_of(kBackends...)` above.
#
# </details>

# %% [markdown]
# ## 3. The level as an interpreter
#
# A *level* is one active application of a transform. Levels nest, and a thread has a stack of them.
# In functorch each entry of the stack is an *interpreter*. An operator goes to the top one, which
# does its part and calls the operator again for the next one below. `grad` wraps and records,
# `vmap` finds a batching rule.
#
# Should levels of `remat` do so too, each in its turn? Then the outer level would see what the
# inner one runs, and that includes its replays. It would record them as if the program had asked
# for them. So an operator makes **one journey, under one level**. The bytes that it makes count in
# that level and in all levels around it, since all of them have promised a bound.


# %%
class Telling(Remat):
    """A level that tells which operators it gets."""

    def run(self, op, args):
        depth = len(self.around)
        print("    " * depth + f"{op.name} under {('outer', 'inner')[depth - 1]}")
        return super().run(op, args)


def two_levels(remat):
    inner = remat(lambda a: a.exp().cos())

    def outside(x):
        a = x.sin()
        return inner(a) + a

    return remat(outside), inner


toy_outer, toy_inner = two_levels(lambda f: toy.remat(f, kind=Telling))
toy_outer(toy_x)
outer, inner = two_levels(rematfn.remat)
outer(x)
rows = []
for name, ours, theirs in (("outer", toy_outer, outer), ("inner", toy_inner, inner)):
    stats = rematfn.stats(theirs)
    mine = (ours.level.operators, ours.level.peak)
    rows.append((name, *mine, stats.operators, stats.peak_bytes))
    assert mine == (stats.operators, stats.peak_bytes)
table(rows, ["level", "toy: operators", "most bytes at once", "rematfn: operators", "the same"])

# %% [markdown]
# An operator counts in the levels around, too, and so do the bytes.
#
# Which level is it? In the toy it is the innermost that is active: `running()[-1]` in `at_remat`.
# In a backward the level's function has returned, and nobody is active. There the toy's `grad`
# helps: each of its nodes has noted the stack of levels, and puts it back while it runs. PyTorch's
# autograd knows nothing of our levels. So the C++ asks the level on top of the stack, and the
# levels of the arguments, which their handles lead to. It is **the innermost of these**. (The lines
# about `seal` are for part 5.)

# %%
quote("csrc/operators/find_level.cpp", "Level* innermost_level(", "level = &level_of(*f.cell)")

# %% [markdown]
# Being active is a matter of two things: the level is on the thread's stack, and our key is among
# the keys that the thread includes. The C++ changes the same two sets as `above` and `below` in
# part 2. While a kernel runs, the key is excluded, so that what the kernel calls does not come back
# to us. An operator written in Python can look.

# %%
quote("csrc/tensors/thread_keys.cpp", "void set_intercepting(bool on) {", "set(keys);")
looked = []


@torch.library.custom_op("tutorial::look", mutates_args=())
def look(x: torch.Tensor) -> torch.Tensor:
    looked.append(("in a kernel", rematfn._C.stack_depth(), rematfn._C.is_intercepting()))
    return x.sin().cos()


look.register_fake(torch.empty_like)


def looks(x):
    looked.append(("in f", rematfn._C.stack_depth(), rematfn._C.is_intercepting()))
    return look(x)


looking = rematfn.remat(looks)
looking(x)
looked.append(("outside", rematfn._C.stack_depth(), rematfn._C.is_intercepting()))
table(looked, ["where", "levels on the stack", "operators come to us"])
assert [row[1:] for row in looked] == [(1, True), (1, False), (0, False)]
assert rematfn.stats(looking).operators == 1  # look, and not the sine and cosine in it

# %% [markdown]
# The two stacks are two things. functorch's interpreters are all above us, in whatever order the
# transforms are nested. What `f` holds under `grad` or `vmap` is a wrapper of functorch's, and our
# level tensor is inside.

# %%
around = []


def looks_around(x):
    h = x.sin()
    wrapped = torch._C._functorch.is_functorch_wrapped_tensor(h)
    interpreters = torch._C._functorch.maybe_current_level() or 0
    around.append((interpreters, rematfn._C.stack_depth(), wrapped, rematfn._C.has_key(h)))
    return h.sum()


looking = rematfn.remat(looks_around)
grad, vmap = torch.func.grad, torch.func.vmap
nestings = {
    "remat(f)": looking,
    "grad(remat(f))": grad(looking),
    "remat(grad(f))": rematfn.remat(grad(looks_around)),
    "vmap(grad(remat(f)))": vmap(grad(looking)),
    "grad(remat(grad(f)))": grad(lambda x: rematfn.remat(grad(looks_around))(x).sum()),
}
for nested in nestings.values():
    nested(x)
table(
    [(name, *row) for name, row in zip(nestings, around, strict=True)],
    ["", "interpreters", "levels", "h is a wrapper", "a level tensor is inside"],
)
assert [row[0] for row in around] == [0, 1, 1, 2, 2]
assert [row[1:] for row in around] == [(1, row[0] > 0, True) for row in around]

# %% [markdown]
# **Question.** An operator reads two tensors, one of the outer level and one of the inner, and the
# inner level is active. It needs room, and the outer level's budget is the one that is short. Who
# may be evicted?
#
# <details><summary>Answer</summary>
#
# Whatever counts in the outer level: its own versions, and those of the inner one, which count in
# both. `rematfn` takes the outer level's own first, and then those inside. What the operator reads
# is pinned and stays. A level never evicts what belongs to a level around it.
#
# </details>

# %% [markdown]
# ## 4. One operator's journey
#
# Here are the three lines that we follow. Between the second and the third we evict `h` by hand, so
# that all that can happen to an operator does happen.


# %%
def three_lines(x):
    h = x.sin()
    y = h.exp()
    return h * y


def with_notes(x, note, evict):
    """The same, with an eviction, and a note after each line."""
    h = x.sin()
    note("h = x.sin()")
    y = h.exp()
    note("y = h.exp()")
    evict(h)
    note("evict(h)")
    z = h * y
    note("z = h * y")
    return z


# %% [markdown]
# First the toy, whose `Step` (notebook 4) has these stages. (Nothing is overwritten here, so
# `save_what_is_overwritten` is left out.)

# %%
STAGES = ["require_room", "bring_back", "make_operation", "make_room", "run_kernel", "take_results"]
stages = []


def noting(stage):
    def method(self, *args):
        getattr(Step, stage)(self, *args)
        level = self.level
        stages.append((self.op.name, stage, level.operators, level.resident, level.replays))

    return method


class Noted(Remat):
    step = type("NotingStep", (Step,), {stage: noting(stage) for stage in STAGES})


def evict(array):
    array.storage.version.level.evict(array.storage.version)


def note(line):
    level = toy_f.level
    toy_rows.append((line, level.operators, level.resident, level.evictions, level.replays))


toy_rows = []
toy_f = toy.remat(lambda x: with_notes(x, note, evict), kind=Noted)
result = toy_f(toy_x)
mul = [row[1:] for row in stages if row[0] == "mul"]
table(mul, ["h * y, after the stage", "operators", "bytes here", "replays"])
assert np.array_equal(result.data, three_lines(toy_x).data)

# %% [markdown]
# `bring_back` has replayed the sine, so `h` is here again. The product's bytes count from
# `take_results` on. And `rematfn`. Its numbers can be asked for while `f` runs.


# %%
def note_real(line):
    s = rematfn.stats(g)
    real_rows.append((line, s.operators, s.resident_bytes, s.evictions, s.replays))


real_rows = []
g = rematfn.remat(lambda x: with_notes(x, note_real, rematfn._C.testing.evict), budget="4KiB")
assert torch.equal(g(x), three_lines(x))
table(
    real_rows,
    ["after", "operators", "bytes here", "evictions", "replays"],
)
assert real_rows == toy_rows
assert real_rows[-1] == ("z = h * y", 3, 1536, 1, 1)

# %% [markdown]
# Line for line the numbers of the toy are the same. Now the C++, along the third line, `h * y`,
# where `h` has been evicted.
#
# ```
#   Python           h * y
#     |
#   AutogradCPU      saves h and y, which are tensors of the level; redispatches
#     |
#   CustomRNGKeyId   govern -> LevelCall -> Step::run; redispatches
#     |                                       |  replays begin here as well,
#   CPU              mul                <-----+  and go straight down
# ```
#
# **Arrival.** Boxed or not, every call arrives in `govern`, as an `Invocation`. The first thing it
# does is what our `below` does. Then it finds the tensors among the arguments, takes the lock of
# the tree of levels that they belong to (its *domain*), and finds the level.

# %%
quote("csrc/operators/boxed_kernel.cpp", "  const BelowLevels below;", "= find_tensors(")
quote("csrc/operators/boxed_kernel.cpp", "lock.emplace", "return;")

# %% [markdown]
# **The stages** stand in one function. The toy has the same, in the same order. One stage is only
# in the C++: `prepare` decides whether the operator is recorded at all. `require_room` and
# `make_room` are for levels with a budget. The first lines and the last keep counts. (In here a
# tensor is an *operand*. The simulator of notebook 6 runs the same function, and its operands are
# sizes without tensors.)

# %%
quote("csrc/engine/step.cpp", "void Step::run() {", "note_call(*seen_)")

# %% [markdown]
# **`require_room`.** What the inputs and the results need together is known before anything has
# been touched. If that is more than the budget, the call ends here. Both levels say so, with the
# same number. (In the C++, what a kernel is only *likely* to take besides is no reason to refuse. A
# budget that is a fraction of a peak not known yet may *give way*.)


# %%
def refusal(run):
    try:
        run()
    except MemoryError as error:  # a BudgetError is one
        return str(error)
    raise AssertionError("there was room")


toy_refusal = refusal(lambda: toy.remat(three_lines, 1200)(toy_x))
real_refusal = refusal(lambda: rematfn.remat(three_lines, 1200)(x))
print(toy_refusal)
print(real_refusal)
assert "1536" in toy_refusal
assert "1536" in real_refusal
quote("csrc/engine/step.cpp", "void Step::require_room() {", "throw NoRoom")

# %% [markdown]
# **`bring_back`.** `h` is not here. `Domain::materialize` has it made again, as notebook 4 tells:
# the sine is replayed. Then `h` and `y` are *pinned*: they cannot go until the operator has run.
# (The toy has `keep` for that. A *place* is where bytes are: here, away, or under way; the last is
# for levels that copy versions to a disk.)

# %%
quote(
    "csrc/engine/step.cpp",
    "void Step::bring_back() {",
    "domain_.materialize(wanted, /*before_call=*/true);",
)

# %% [markdown]
# **`make_operation` and `take_inputs`.** An `Operation` is an entry of the record; the one for
# tensors is a `Call`. It refers to the versions that it has read. A tensor of the level has one, in
# its cell. A tensor from outside is given one here. All else, such as sizes and plain arguments,
# stands in a template, which calls that are alike share.

# %%
quote("csrc/operators/level_call.cpp", "LevelCall::make_operation()", "new Call(call_template())")
quote("csrc/operators/level_call.cpp", "version = domain_.outside.version_of(*f.tensor, !facts")
quote("csrc/operators/level_call.cpp", "call().take_input(std::move(version));")

# %% [markdown]
# **`make_room`** evicts until the results fit, in this level and in all around it. Then
# **`run_kernel`** goes on. There are the same two cases as in `go_on` of part 2: redispatch with
# lower keys, or begin anew, for factories.

# %%
quote("csrc/operators/call.cpp", "  if (!selects_backend) {", "op.callBoxed(stack);")

# %% [markdown]
# **`take_results`.** A result on an argument's storage is a view, and shares that argument's cell.
# Any other is fresh: it gets a version, a cell, and a handle on it, and the version enters the
# level's table.

# %%
fresh = "attach(tensor, make_cell(level_, contents, tensor"
quote("csrc/operators/level_results.cpp", fresh, "admit(contents, kFresh);")
quote("csrc/tensors/level_tensor.cpp", "void attach(", "add(kLevelKey)")

# %% [markdown]
# `set_keys` **puts the key on the tensor**, as the last line of the toy's `take_results` does. From
# then on operators on this tensor come to the level, whether or not the thread includes the key. So
# a level tensor is the kernel's own tensor with two things added, a key and a handle. Nothing is
# wrapped.

# %%
inside_keys = []


def shows_keys(x):
    h = x.sin()
    v = h.t()
    inside_keys.extend([_C._dispatch_keys(h), _C._dispatch_keys(v)])
    return h + v


rematfn.remat(shows_keys)(x)
print("x:", _C._dispatch_keys(x))
print("h:", inside_keys[0])
borrowed = _C.DispatchKeySet(key_named("CustomRNGKeyId"))
assert inside_keys[0] == inside_keys[1] == _C._dispatch_keys(x) | borrowed

# %% [markdown]
# So is a level a mode or a wrapper (notebook 1)? Both, with one key. It is a mode, in that the
# thread includes the key while `f` runs. So it sees factories, and operators on tensors from
# outside. It is like a wrapper, in that what `f` makes has the key and keeps it when `f` has
# returned. What autograd saves of that is read in a backward, when the thread no longer includes
# the key.
#
# `v` has the key, too. That is the third consequence of Note [Which key we borrow]: a view kernel
# copies its argument's keys. It does not copy the handle; `sort_results`, which comes first in
# `take_results`, puts that on.
#
# **Question.** `h * h` reads `h` twice. How often is `h` pinned, brought back and counted in
# `require_room`?
#
# <details><summary>Answer</summary>
#
# Pinned twice, and unpinned twice: a pin is a number. Brought back once, as it is here the second
# time that somebody looks. Counted once: `input_bytes_in` leaves out an operand whose version came
# before, and our toy takes a `set`. Counted twice, an operator would be refused although it fits.
#
# </details>

# %% [markdown]
# ## 5. Sealing
#
# The function returns. What the caller gets must belong to no level. Otherwise the result would
# keep its whole lineage alive, and could be evicted while the caller holds it. So it is **sealed**.
# Its bytes are brought back if they are away, and count no longer. Its lineage is dropped, and its
# handle and its key are taken off. Nothing is copied; it is the same tensor.
#
# If a level around still runs, that is the *heir*. The version goes to the heir, lineage and all,
# and may be evicted there.


# %%
quote("tutorials/toy/remat.py", "    def seal(", "array.storage.version = version, None")
toy_outer, toy_inner = two_levels(toy.remat)
result = toy_outer(toy_x)
print("keys:", *(key.name for key in result.keys), "- version:", result.storage.version)
assert result.storage.version is None
assert np.array_equal(result.data, (toy_x.sin().exp().cos() + toy_x.sin()).data)

# %% [markdown]
# In C++ the two cases stand in one function, of which this is the beginning. Further down,
# `detach(tensor)` takes off the handle and the key.

# %%
quote("csrc/levels/boundary.cpp", "void give_cell(", "materialize_for(level, wanted")
made_inside = []


def returns_and_keeps(x):
    h = x.sin()
    made_inside.append(h)  # it leaves by a side effect
    y = h.exp()
    made_inside.append(y)
    return y


result = rematfn.remat(returns_and_keeps, policy=rematfn.testing.EvictEverything())(x)
kept, same = made_inside
rows = [("y, the result", rematfn._C.has_key(result)), ("h, kept aside", rematfn._C.has_key(kept))]
more = kept + 1
rows += [("h, after it was used", rematfn._C.has_key(kept)), ("h + 1", rematfn._C.has_key(more))]
table(rows, ["tensor", "has the key"])
assert [row[1] for row in rows] == [False, True, False, False]
assert same is result
assert rematfn._C.testing.live_operations() == 0
assert torch.equal(more, x.sin() + 1)

# %% [markdown]
# What leaves by a side effect is not among the results, so nobody seals it when the function
# returns. It is sealed when somebody first uses it. `h` was evicted, by a policy that evicts
# everything; its key brought the addition to us, and `find_level` sealed it on the way. (In the toy
# `at_remat` does so, by `leave`.)
#
# **Question.** Under `torch.func.grad` a result is a wrapper around a tensor of ours. What is to be
# sealed?
#
# <details><summary>Answer</summary>
#
# The innermost tensor, since it has the storage and the handle. `seal` in
# `csrc/levels/boundary.cpp` walks through functorch's wrappers, subclasses and forward-mode
# tangents to it. In the toy `leave` walks through wrappers.
#
# </details>

# %% [markdown]
# ## 6. Gradients of any order
#
# A level's work is not over when its function returns. Autograd has saved tensors of it, and the
# backward reads them later. Two questions: how does the level learn of that, and where do the
# gradients leave it?
#
# **How it learns.** What autograd saved has the key. The backward reads it, and the operator comes
# to us, though the stack of levels is empty. It is then processed by the level of its arguments.

# %%
leaf = x.clone().requires_grad_()
g = rematfn.remat(lambda x: x.sin().exp().sum(), policy=rematfn.testing.EvictEverything())
loss = g(leaf)
before = rematfn.stats(g).operators
saved = loss.grad_fn.next_functions[0][0]._saved_result  # of exp
print("levels on the stack:", rematfn._C.stack_depth(), "- saved by autograd:", end=" ")
print("a level tensor" if rematfn._C.has_key(saved) else "a plain tensor")
assert rematfn._C.has_key(saved)
assert rematfn._C.stack_depth() == 0

del saved
loss.backward()
after = rematfn.stats(g).operators
print(before, "operators in the forward,", after - before, "in the backward")
assert after > before
eager = x.clone().requires_grad_()
eager.sin().exp().sum().backward()
assert torch.equal(leaf.grad, eager.grad)
assert not rematfn._C.has_key(leaf.grad)

# %% [markdown]
# **Where gradients leave.** The nodes of autograd's graph that were made while the level was active
# are its *region*. A gradient leaves by an edge from a node in the region to one outside. Here
# three edges lead to `x`, and a fourth comes from outside of the function. (The arrows are the way
# that gradients go.)
#
# ```
#              in the region                     |   outside
#                                                |
#    sum  --->  add  --->  mul  --->  sin  ------|---.
#                 \           \---->  cos  ------|----+-->  x  <---  square, of the caller's
#                  \------>  exp  ---------------|---'
# ```
#
# The obvious way is to put a node of ours on the way in: the function gets `gate(x)` instead of
# `x`. The gate's backward seals what comes by. It looks harmless; the gate computes nothing.


# %%
class Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient  # here it would be sealed


def part(x):
    return (x.sin() * x.cos() + x.exp()).sum()


def gradient_of_whole(part, hook=None):
    leaf = torch.randn(1000, generator=torch.Generator().manual_seed(0)).requires_grad_()
    if hook is not None:
        leaf.register_hook(hook)
    (part(leaf) + leaf.square().sum()).backward()
    return leaf.grad


def differing(gradient):
    return int((gradient != gradient_of_whole(part)).sum())


arrived = []
rows = [
    ("a gate on the way in", differing(gradient_of_whole(lambda x: part(Gate.apply(x))))),
    ("a hook on x", differing(gradient_of_whole(part, hook=lambda g: arrived.append(g)))),
    (
        "rematfn, evicting everything",
        differing(gradient_of_whole(rematfn.remat(part, policy=rematfn.testing.EvictEverything()))),
    ),
]
table(rows, ["how gradients leave", "elements of 1000 that differ"])
assert rows[0][1] > 0
assert rows[1][1] == rows[2][1] == 0
assert len(arrived) == 1

# %% [markdown]
# With the gate a third of the gradient has other bits. Autograd adds up, before a node runs, what
# all its edges bring, in the order in which it comes. The caller's *d* comes first, then *a*, *b*
# and *c* from the exponential, the cosine and the sine: *((d + a) + b) + c*. The gate is a node
# with a sum of its own, and then it is *d + ((a + b) + c)*. Sums of floating-point numbers depend
# on their brackets.

# %%
t = torch.randn(1000, generator=torch.Generator().manual_seed(0))
a, b, c, d = t.exp(), t.sin() * -t.sin(), t.cos() * t.cos(), 2 * t
assert torch.equal(((d + a) + b) + c, gradient_of_whole(part))
assert torch.equal(d + ((a + b) + c), gradient_of_whole(lambda x: part(Gate.apply(x))))

# %% [markdown]
# So nothing may be put between. The hook is on the **target**, the node that the edge leads to. It
# runs once, when the sum is complete.

# %%
quote("csrc/levels/gradient_edges.cpp", "// Note [Seals are hooks on the target]", "up uncounted.")

# %% [markdown]
# **Any order.** With `create_graph=True` a gradient has a graph of its own. The sine's gradient is
# `g * x.cos()`: a new edge to `x`, made in the backward, long after the function returned and its
# edges were looked at. That edge leaves the region as well. So *sealing any tensor walks the graph
# behind it*, and watches the edges that it finds. What one walk has seen the next one skips.

# %%
edges = "for (const Edge& edge : node.next_edges()) {"
quote("csrc/levels/gradient_edges.cpp", edges, "See Note [Seals")


def fourth_order(f, report=None):
    leaf = x.clone().requires_grad_()
    y = f(leaf).sum()
    found = []
    for _ in range(4):
        (gradient,) = torch.autograd.grad(y, leaf, create_graph=True)
        found.append(gradient.detach().clone())
        if report is not None:
            report(gradient)
        y = gradient.sum()
    return found


def function(x):
    return x.sin().exp()


g = rematfn.remat(function, policy=rematfn.testing.EvictEverything())
rows = []


def report(gradient):
    s = rematfn.stats(g)
    rows.append((len(rows) + 1, s.operators, s.replays, rematfn._C.has_key(gradient)))


derivatives = fourth_order(g, report)
table(rows, ["derivative", "operators so far", "replays so far", "what leaves has the key"])
for mine, theirs in zip(derivatives, fourth_order(function), strict=True):
    assert torch.equal(mine, theirs)
assert not any(row[3] for row in rows)
assert [row[1] for row in rows] == sorted({row[1] for row in rows})
assert rematfn._C.testing.live_levels() == 0


# %% [markdown]
# Each derivative runs more operators, all of them under the level, and what comes out is a plain
# tensor each time. When the last graph is gone, so is the level. The same through `torch.func`,
# where each `grad` is an interpreter above us:


# %%
def derivative(f, order):
    for _ in range(order):
        f = torch.func.grad(lambda x, f=f: f(x).sum())
    return f


for order in range(1, 5):
    assert torch.equal(derivative(g, order)(x), derivative(function, order)(x))
hessian = torch.func.vmap(torch.func.hessian(lambda row: g(row).sum()))
plain_hessian = torch.func.vmap(torch.func.hessian(lambda row: function(row).sum()))
assert torch.equal(hessian(x), plain_hessian(x))
assert rematfn._C.testing.live_levels() == rematfn._C.testing.live_operations() == 0
print("grad, four times over, and vmap(hessian): the same bits")

# %% [markdown]
# **Question.** Not every operator of a backward reads a saved tensor: the gradient of `x.sum()` is
# the incoming number, expanded. Nothing among its arguments has our key. Does the level see that
# operator, and should it?
#
# <details><summary>Answer</summary>
#
# It should: what such operators make can be as large as anything that the forward made. It does:
# each node of the region has a hook that includes the key for the thread while the node runs, and
# says whose node it is. Autograd's engine restores the thread's keys after each node. `Note [The
# operators of a node are its level's]` in `csrc/levels/gradient_edges.cpp`.
#
# </details>
#
# **What comes next.** We have hardly asked *which* version goes. In notebook 4 it was a score of
# one line. Notebook 6 looks for a better one, and for the best there can be.
