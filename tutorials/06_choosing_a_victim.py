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
# # 6. Choosing a victim
#
# A function runs within a budget. It has to make room, and a thousand versions could go: which one
# costs the least in the end? Here you write the scores of the literature, race them on recorded
# programs, and see how far each is from a cost that *no* choice can beat.
#
# Words used below. A *version* is the contents of a storage until the next write. To *evict* it is
# to give up its bytes. To *replay* is to run the operation that made it again. A *miss* is a read
# of an evicted version: it has to be replayed first. A *candidate* is a version that may go, the
# *victim* the one that does, and a *score* a number for each candidate: the lowest goes first.

# %%
# SPDX-License-Identifier: Apache-2.0
import math
import sys
from pathlib import Path

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from show import quote, table

import rematfn
from rematfn.policies import ON, Guided
from rematfn.policies.reference import DTR, LRU, MSPS, Largest, Local

sys.path.insert(0, str(Path("../benchmarks").resolve()))
from bound import Story, lower_bound

torch.manual_seed(0)
torch.set_num_threads(1)

# %% [markdown]
# ## 1. Programs to race on
#
# A score does not read tensors, so we need none. A *trace* is a program written down by sizes: what
# each operator reads, makes and costs, and when the program drops a version. `rematfn.record` runs
# a function once and writes it down. `rematfn.simulate` takes the trace through the engine that
# also runs real programs, with sizes in the place of tensors.


# %%
def mlp():
    weights = [torch.randn(128, 128) / 11 for _ in range(16)]
    x = torch.randn(256, 128)

    def loss(weights):
        h = x
        for w in weights:
            h = F.gelu(h @ w)
        return h.square().mean()

    return torch.func.grad(loss), weights


def transformer():
    block = dict(d_model=64, nhead=4, dim_feedforward=256, dropout=0.0, batch_first=True)
    model = torch.nn.Sequential(*[torch.nn.TransformerEncoderLayer(**block) for _ in range(6)])
    x = torch.randn(8, 64, 64)

    def loss(parameters):
        return torch.func.functional_call(model, parameters, (x,)).square().mean()

    return torch.func.grad(loss), dict(model.named_parameters())


def recurrent():
    xs = torch.randn(64, 32, 64)

    def loss(weights):
        h = torch.zeros(32, 64)
        for x in xs:
            h = torch.tanh(h @ weights["h"] + x @ weights["x"])
        return h.square().mean()

    return torch.func.grad(loss), {"h": torch.randn(64, 64) / 8, "x": torch.randn(64, 64) / 8}


traces = {}
for program in (mlp, transformer, recurrent):
    f, argument = program()
    traces[program.__name__] = rematfn.record(f, argument)
table(
    [[name, t.operators, f"{t.peak_bytes / 2**20:.1f}"] for name, t in traces.items()],
    ["program: forward and backward", "operators", "peak, MiB"],
)
assert all(t.operators > 50 for t in traces.values())

# %% [markdown]
# A run within a budget has one figure of merit: the cost of all operators that ran, replays
# included, over the cost of the program. We call it the *total*; 1 is a run without replays. Cost
# comes from a model of FLOPs and bytes moved, in seconds, so the figures are the same on each
# machine.


# %%
def total(trace, fraction, policy):
    """The total within a fraction of the peak; infinity where it does not fit."""
    try:
        return 1 + rematfn.simulate(trace, fraction, policy).replayed_cost
    except rematfn.BudgetError:
        return math.inf


def shown(value):
    return "-" if value == math.inf else f"{value:.2f}"


def race(policies, fractions=(0.8, 0.6, 0.4)):
    rows, found = [], {}
    for name, trace in traces.items():
        for label, policy in policies.items():
            totals = [total(trace, fraction, policy) for fraction in fractions]
            found[name, label] = dict(zip(fractions, totals))
            rows.append([name, label, *map(shown, totals)])
    table(rows, ["program", "score", *map(str, fractions)])
    return found


# %% [markdown]
# <details><summary><b>Question.</b> Why is it allowed to leave the contents of tensors
# out?</summary>
#
# *Answer.* A replay makes the same bits, whatever they are. So eviction changes time and memory,
# not results. The one thing that it could change is which operators a program runs, if the program
# reads a value and branches on it; but it reads the same value.
# </details>
#
# ## 2. Size
#
# The smallest score that could work: evict what frees the most. A policy may be a function of
# Python that is given a `Candidate`, a record of numbers. (In the tables the columns are budgets,
# as fractions of the peak.)


# %%
def largest(c):
    return -c.nbytes


def oldest(c):
    return -c.age


first = race({"largest": largest, "oldest (LRU)": oldest})
assert first["recurrent", "largest"][0.4] > 10 and first["recurrent", "oldest (LRU)"][0.4] > 5

# %% [markdown]
# Both are bad, for two reasons.

# %%
hidden_size = 32 * 64 * 4  # bytes
alike = total(traces["recurrent"], 0.4, lambda c: -min(c.nbytes, hidden_size))
print(f"recurrent at 0.4, largest, if nothing counts as more than a hidden state: {shown(alike)}")
lru = rematfn.simulate(traces["mlp"], 0.4, LRU())
print(
    f"mlp at 0.4, LRU: {lru.replays} replays, of a program of {traces['mlp'].operators} operators"
)
assert alike < 1.1 and lru.replays > 2 * traces["mlp"].operators

# %% [markdown]
# *Largest.* In the recurrent network the largest versions are the sums in which the gradients of
# the two weights are gathered. Each step of the backward reads them, and to make one again takes
# all of the backward so far. If they count as no larger than the rest, hardly anything is replayed.
#
# *Oldest* is what a cache gives up. A backward reads the forward in reverse, so the oldest version
# is read last. But a cache fetches each entry at the same price. Here the beginning of the program
# is gone, and one read of it replays all that comes before. What that brings back is still the
# oldest, so it goes first, and the next read replays it once more.
#
# ## 3. Cost, size and staleness
#
# Each of three numbers is a reason to evict a version: it is cheap to make again (`cost`), it frees
# much (`nbytes`), and it is not needed soon. The last is not known, so its *staleness* stands for
# it, the time since it was last read (`age`). The local score of DTR (Kirisame et al., *Dynamic
# Tensor Rematerialization*, ICLR 2021, [arXiv:2006.09616](https://arxiv.org/abs/2006.09616)) is
# their quotient.


# %%
TICK = 5e-6  # seconds, the cost of the smallest operator: no age is 0


def local(c):
    return c.cost / (c.nbytes * (c.age + TICK))


def ageless(c):
    return c.cost / c.nbytes


second = race({"local": local, "local without age": ageless})
assert second["mlp", "local"][0.8] < first["mlp", "largest"][0.8]

# %% [markdown]
# Age helps in one program and harms in two. In the recurrent network it spares the sums of the
# gradients, which are read again and again and so are always young. Without age they go first: an
# addition is cheap for its bytes. In the two others, let us count age in one half of the program
# only:


# %%
def by_half(forward, backward):
    """One score in the forward, another one once the backward has begun."""
    begun = False

    def score(c):
        nonlocal begun
        begun = begun or c.producer == "aten::ones_like"  # the gradient of the loss
        return (backward if begun else forward)(c)

    return score


rows = []
for name in ("mlp", "transformer"):
    for label, halves in {"forward": (local, ageless), "backward": (ageless, local)}.items():
        totals = [total(traces[name], fraction, by_half(*halves)) for fraction in (0.8, 0.6, 0.4)]
        rows.append([name, label, *map(shown, totals)])
table(rows, ["program", "age counts in the", "0.8", "0.6", "0.4"])
assert all(float(rows[i][4]) + 0.3 < float(rows[i + 1][4]) for i in (0, 2))

# %% [markdown]
# Almost all the harm is done in the backward. There a replay brings old versions back, and the
# score evicts them again for being old, as LRU does.
#
# The age is counted in *program time*, the summed cost of what the program itself has run. With
# seconds a busy machine would evict other versions than an idle one:

# %%
quote(
    "csrc/policy/eviction.h", "Note [Staleness is counted in program time]", "versions on every run"
)

# %% [markdown]
# ## 4. The neighbourhood
#
# `cost` is the cost of *one* operator. Here is what it does not see. Nine versions in a chain, all
# alike; some are gone:
#
# ```text
# a -> b -> (c) -> (d) -> (e) -> f -> g -> h -> i        (x): evicted
# ```
#
# If `f` goes too, to make it again takes `c`, `d`, `e` first: four operators. If `h` goes, it
# takes one. To the local score they are alike but for their age. It takes the older one, and the
# gap grows. Whoever reads the end of a gap pays for its length. A score that adds the cost of the
# evicted *ancestors* takes `h`, and the gaps stay short.


# %%
def msps(c):
    return (c.cost + c.ancestors) / c.nbytes


def on_in_python(c):
    fresh = 1 if c.consumed else 4  # has the program read it?
    return fresh * (c.cost + c.ancestors / 2) / (c.nbytes * (c.age + TICK) ** 0.6)


third = race({"local": local, "MSPS": msps, "ON in Python": on_in_python})
assert all(third[name, "ON in Python"][0.4] < third[name, "local"][0.4] for name in traces)

# %% [markdown]
# In some cells of the table MSPS does better than ON: no score is the best everywhere.
#
# - *MSPS*, memory saved per second of replay, is what Capuchin (Peng et al., ASPLOS 2020) rates
#   recomputation by. It has no age.
# - DTR's own score `h_DTR` counts evicted *descendants* too: to make one of them again, this
#   version is needed.
# - *ON* is rematfn's. It leaves descendants out, damps age, spares what nobody has read yet, and
#   counts ancestors in two ways:
#
# ```text
#          (cost + dropped ancestors + held ancestors / 2)
# score =  -----------------------------------------------   * 4, until the version is first read
#                      bytes * age ^ 0.6
# ```
#
# An ancestor is *held* if the program still has a tensor of it: a variable, or what autograd has
# saved. Somebody is likely to read it and have it replayed anyway, so half of its cost counts. An
# ancestor that the program has *dropped* would be replayed for this version alone. It counts in
# full. What lies behind a gradient is mostly of that kind.


# %%
def ancestors_of_on(costs, held):
    """What evicted ancestors count in ON: by name their costs, and those that are held."""
    return sum(cost / 2 if name in held else cost for name, cost in costs.items())


gap = {"c": 1.0, "d": 1.0, "e": 1.0}  # before f, in the chain above
for held in ("cde", "ce", ""):
    print(f"f, if the program holds {list(held)}: 1 + {ancestors_of_on(gap, held)}")

# %% [markdown]
# No theory says these numbers; they come from simulations. `Note [Ancestors that nobody holds]` has
# what halving all of them would cost. A score in Python is not told which ancestors are held, so
# `on_in_python` halves them all.
#
# The others are in `rematfn.policies.reference`, in Python. ON is in C++. (There `c.ancestors`
# counts what is dropped twice, and `s.ancestors` is one half. `priced` is a rule of part 7.)

# %%
quote("csrc/policy/eviction.h", "// Note [Ancestors that nobody holds]", "1.55 in place of 0.62")
quote("csrc/policy/eviction.cpp", "// A value nobody has read yet", "return c.kept")

# %% [markdown]
# Ours in Python against that in C++. They differ at small budgets: there `ON` has rules of its
# own (part 7), and the core scores candidates in batches, where a score in Python is asked each
# time. So we compare at 0.8.

# %%
pair = [total(traces["mlp"], 0.8, policy) for policy in (on_in_python, ON())]
print(f"mlp at 0.8, ON: {shown(pair[0])} in Python, {shown(pair[1])} in C++")
assert abs(pair[0] - pair[1]) < 0.01

# %% [markdown]
# ### One request, several victims
#
# So far one version goes after the other until there is room. That has a fault. Suppose that 100
# bytes are needed. The lowest score is that of a small version, which goes first and frees 1 byte.
# The next one frees 100. So the small one went for nothing. ON chooses the victims of a request as
# a *set*. It takes the lowest scores until there is room. Then it goes back from the costliest, and
# spares those that are no longer needed for it.


# %%
def victims(candidates, need):
    """Candidates are (score, bytes, name). Which of them go."""
    chosen, freed = [], 0
    for candidate in sorted(candidates):
        if freed >= need:
            break
        chosen.append(candidate)
        freed += candidate[1]
    kept = []
    for candidate in reversed(chosen):
        if freed - candidate[1] >= need:
            freed -= candidate[1]  # the others free enough
        else:
            kept.append(candidate[2])
    return kept


candidates = [(0.1, 1, "small"), (0.2, 100, "large"), (0.3, 50, "medium")]
for need in (1, 100, 130):
    print(f"{need} bytes are needed:", *victims(candidates, need))
assert victims(candidates, 100) == ["large"]
quote("csrc/engine/evictor.cpp", "const bool is_necessary", "moves_.offer(*version);")

# %% [markdown]
# <details><summary><b>Question.</b> Evicting <code>h</code> changes the score of which
# candidates?</summary>
#
# *Answer.* Of all that would need `h` to be made again: its descendants, as far as evicted versions
# lead. The engine marks them as stale and works a score out anew only when it stands at the front
# of the queue: `choose_victims` in `csrc/policy/eviction.cpp`.
# </details>
#
# ## 5. The race
#
# Now all of them, at smaller budgets as well; part 6 draws it. *Guided* is not a score that looks
# back. It knows from the recorded call when each version is read next, and has tried many settings
# of its score in the simulator (notebook 7). It is here as the one to be reached.

# %%
SCORES = {
    "largest": Largest(), "LRU": LRU(), "local": Local(), "MSPS": MSPS(),
    "h_DTR": DTR(), "ON": ON(), "guided": Guided(),
}  # fmt: skip
FRACTIONS = (0.8, 0.6, 0.5, 0.4, 0.3, 0.2)
found = {
    (name, label): [total(trace, fraction, policy) for fraction in FRACTIONS]
    for name, trace in traces.items()
    for label, policy in SCORES.items()
}
for name in traces:
    best = [
        min(found[name, label][i] for label in SCORES if label != "guided")
        for i in range(len(FRACTIONS))
    ]
    assert all(guided <= other for guided, other in zip(found[name, "guided"], best, strict=True))

# %% [markdown]
# ## 6. What is provably the least?
#
# A race says who is first, not how good that is. Call all that a run evicts and replays its
# schedule. The best schedule of a program of this size is not known: to find one is a hard integer
# program (Checkmate, Jain et al., MLSys 2020, writes it down). What can be had is a number that no
# schedule goes *below*.
#
# Take the integer program and let its decisions be fractions: "half of this version is resident".
# Each real schedule is still a solution, so the cheapest solution costs no more than the cheapest
# schedule. This is *relaxation*, and the fractions make a linear program, which is solved in
# seconds.
#
# The smallest such linear program has a single *cut*: the moment when the most is waiting to be
# read. All versions that are read after the cut are either resident at it or replayed after it, and
# what is resident fits in the budget. So the budget is a knapsack, and as fractions may be packed,
# it is best filled with what costs the most for its bytes.


# %%
def one_cut(trace, fraction):
    """A lower bound on the total, from the one moment at which the most is waiting."""
    budget = int(fraction * trace.peak_bytes)
    story = Story(trace)  # when each version is made and read
    if not (cuts := story.cuts(budget, 1)):
        return 1.0
    at = cuts[0]
    room = budget - story.calls[at].needs
    made = {}  # by call: the versions that it made before the cut and that are read from there on
    for value in story.values.values():
        if value.made < at <= max(value.reads, default=-1):
            made.setdefault(value.made, []).append(value)
    inputs = story.inputs(at)
    for values in made.values():
        for value in [v for v in values if v in inputs or not v.replayable]:
            room -= value.nbytes  # has to be there
            values.remove(value)
    # A call that made several versions is replayed for any of them: the cheapest is to keep all.
    items = [
        (story.calls[c].cost, sum(v.nbytes for v in values)) for c, values in made.items() if values
    ]
    replayed = 0.0
    for cost, nbytes in sorted(items, key=lambda item: item[0] / item[1], reverse=True):
        kept = min(nbytes, max(room, 0))
        room -= kept
        replayed += cost * (1 - kept / nbytes)
    return 1 + replayed / trace.cost


SECONDS = 10  # for each, unless it is solved before
bounds = {
    name: [
        1 + lower_bound(t, int(fraction * t.peak_bytes), SECONDS, known=total - 1)
        for fraction, total in zip(FRACTIONS, found[name, "guided"], strict=True)
    ]
    for name, t in traces.items()
}
rows = []
for name, trace in traces.items():
    mine = [one_cut(trace, fraction) for fraction in FRACTIONS]
    rows += [
        [name, "one cut, ours", *(f"{b:.3f}" for b in mine)],
        [name, "several cuts", *(f"{b:.3f}" for b in bounds[name])],
    ]
    best = found[name, "guided"]
    assert all(bound <= total + 1e-9 for bound, total in zip(bounds[name], best, strict=True))
    assert all(bound <= total + 1e-9 for bound, total in zip(mine, best, strict=True))
table(rows, ["program", "lower bound of the total", *map(str, FRACTIONS)])

# %% [markdown]
# `benchmarks/bound.py` has more cuts, asks also that what a replay reads be there, and wants whole
# numbers: it has an integer program, too, but a far smaller one than Checkmate's. Note [Every
# schedule is a solution] says why a real run never breaks what it demands. A *window* is a stretch
# between cuts. In short:

# %%
quote(
    "benchmarks/bound.py",
    "1. The bytes resident",
    "where it begins, or has",
)

# %% [markdown]
# The solver begins with fractions, and parts the problem where one is left: this decision is 0, or
# it is 1 (*branch and bound*). Each part has a bound of its own, and the least of them bounds the
# whole. So a solver that is stopped early has a bound as well. `bound.py` doubles the number of
# cuts until the time is up, or until the bound is the total of the guided run: that run is then the
# best there is.
#
# Now each score over the bound:

# %%
PALETTE = ["#999999", "#56B4E9", "#E69F00", "#009E73", "#F0E442", "#CC79A7", "#0072B2", "#D55E00"]
# Alt: For three programs, the total of each score over the lower bound, by the budget. Guided
# stays at one almost everywhere. The other scores rise as the budget falls; largest and LRU rise
# most.
figure, panels = plt.subplots(1, 3, figsize=(10, 3.6), sharey=True)
for axes, name in zip(panels, traces, strict=True):
    for color, marker, label in zip(PALETTE, "sv^DPX*o", SCORES):
        over = [t / b for t, b in zip(found[name, label], bounds[name], strict=True)]
        axes.plot(
            FRACTIONS, over, marker=marker, color=color, label=label, linewidth=1.3, markersize=5
        )
    axes.axhline(1, color="#333333", linewidth=1, linestyle=":")
    axes.set(title=name, yscale="log", xlabel="budget, of the peak", ylim=(0.9, 20))
    axes.invert_xaxis()
panels[0].set_ylabel("total / lower bound")
panels[0].set_yticks([1, 2, 5, 10, 20], ["1", "2", "5", "10", "20"])
panels[2].legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
figure.tight_layout()
plt.show()

rows = []
for label in SCORES:
    row = [label]
    for name in traces:
        over = [t / b for t, b in zip(found[name, label], bounds[name], strict=True)]
        row.append(shown(math.exp(sum(map(math.log, over)) / len(over))))
    rows.append(row)
table(rows, ["geometric mean of total / bound", *traces])
means = {row[0]: [float(value) for value in row[1:]] for row in rows}
assert all(value < 1.05 for value in means["guided"])
assert all(
    means["ON"][i] < means[label][i] for i in range(3) for label in ("LRU", "local", "h_DTR")
)

# %% [markdown]
# Nothing can be below the dotted line. ("Largest" leaves the third picture at the top, and LRU
# lies under "local" there.) Guided calls lie on the line almost everywhere. So there both the
# bound and the schedule are near the best. On three programs a ranking is not a law; the project's
# tables have eleven networks (`benchmarks/results/bound.md`) and the public traces of the DTR
# paper.
#
# <details><summary><b>Question.</b> At a small budget a score's total is twice the bound.
# Is the score bad?</summary>
#
# *Answer.* One cannot tell. The best schedule lies somewhere between the two. Between its cuts the
# bound asks nothing of the budget, so it may be too low. Only where some schedule comes near it do
# we know both.
# </details>
#
# ## 7. Why the floor is hard
#
# The *floor* is the least budget in which a program runs. We go down to it.

# %%
LOW = (0.3, 0.25, 0.2, 0.18, 0.16, 0.15, 0.145)
rows = []
for label in ("LRU", "h_DTR", "ON", "guided"):
    rows.append(
        [label, *(shown(total(traces["mlp"], fraction, SCORES[label])) for fraction in LOW)]
    )
low_bounds = [
    1 + lower_bound(traces["mlp"], int(f * traces["mlp"].peak_bytes), SECONDS) for f in LOW
]
rows.append(["lower bound", *map(shown, low_bounds)])
table(rows, ["mlp", *map(str, LOW)])
at = LOW.index(0.15)
assert float(rows[2][1 + at]) > 3 * low_bounds[at]

# %% [markdown]
# Close to the floor totals rise steeply, and the bound does not follow. Three things go wrong
# together.
#
# **Age says too little.** Late in a backward all versions of the forward are old: what is read next
# is hardly younger than what is read last. So what the next operators read goes. The last miss
# tells where the backward is, and the distance from there is the better guess.
#
# **Replays need room of their own.** To make one version takes its inputs, and theirs. They have
# just been paid for, so it seems right to spare them. But then a gradient goes instead, and to
# replay that takes all of the backward so far.
#
# **Replays undo each other.** One evicts what the next one reads, and that one evicts what the
# first had made. This is *thrash*. A score looks at one eviction at a time and does not see it.
#
# The core has five rules for this, in `csrc/policy/floor.h` (Note [Near the floor]):
#
# 1. *mirrored*: where a backward thrashes, the distance from the last miss takes the place of age.
# 2. *priced*: what a replay will read is not spared. It is scored like all else, as about to be
#    read. Victims are chosen as a set (part 4). ON does so from the start.
# 3. *pinned*: what a replay reads cannot go, if some of it had to be made anew.
# 4. *moved*: if replays go on and on, what can be moved to a disk is not dropped any more.
# 5. *frugal*: else versions are made in the order that takes the least memory.
#
# The first changes the score. The others change what may go, or the order of replays.
# `docs/design/floor.md` has what each buys, over many programs and budgets.
#
# <details><summary><b>Question.</b> Why not just use the solver's schedule?</summary>
#
# *Answer.* Between two cuts it may hold more than the budget. With a cut at each operator the
# integer program is hard: its time can grow exponentially with the program, which must be known
# before it runs. A score takes little time and knows nothing. [Notebook
# 7](07_measured_then_guided.ipynb) stands between: it records one call, and searches while the next
# ones run.
# </details>
