// SPDX-License-Identifier: Apache-2.0
//
// level.h: one active application of a transform, and the thread's stack of them.
//
// Note [Why the backward finds its level again]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
// A level is active while its function runs, but its tensors live on in what autograd saved. When
// the backward reads them their key brings the operator to us, and it is processed by their level
// although that is long off the stack: gradients in flight are governed too. This holds inside a
// backward only. A level tensor met anywhere else has left through a side effect (`self.cache = h`,
// a constant captured by a tracer); it is sealed then and there, or else whatever is computed from it
// would belong to a level that nobody is running.

#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <memory>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "base/errors.h"
#include "engine/unrecorded.h"
#include "memory/pages.h"
#include "tensors/level_tensor.h"
#include "tensors/thread_keys.h"
#include "tensors/tier.h"

namespace rematfn {

struct LevelOptions {
  std::size_t budget = kNoBudget;
  std::shared_ptr<SharedBudget> shared;  // null: the budget is the level's alone
  Policy policy;
  bool timed = false;   // cost is measured, not modelled
  bool verify = false;  // replays are compared with first runs
  std::string name;     // the call as the user wrote it, for messages
  // For an outermost level: how long its record may be, in operations; to write down what it does, or
  // to be guided by what was written down.
  std::size_t max_operations = Ledger::kMostOperations;
  bool record = false;
  std::shared_ptr<Guide> guide;
  bool as_recorded = true;  // the call is like the one that the guide knows, in sizes and results
  // The budget is so much of a peak. See Note [A fraction of what is not known yet]
  double fraction = 0;
  bool is_estimate = false;
  bool is_estimate_unguided = false;
  std::shared_ptr<const Trace> known;
  // Where versions of the level may be moved to.
  std::vector<std::shared_ptr<Tier>> tiers;
  bool drops = true;          // they may be dropped and replayed
  bool leaves_early = false;  // See Note [A version goes by a way], Rule 6
  Wording wording{};  // of the budget, for messages
  // What replays may cost, in multiples of the program. See Note [A call that thrashes is stopped]
  double most_replays = kNever;
  bool where = false;  // See Note [A journal is written on request]
};

using WatchedLeaves =
    std::unordered_map<const c10::TensorImpl*, c10::weak_intrusive_ptr<c10::TensorImpl>>;

class Level final : public Table, public Tenant {
 public:
  Level(const LevelOptions& options, std::shared_ptr<TensorDomain> domain, Level* enclosing);
  ~Level() override;

  [[nodiscard]] TensorDomain& tensor_domain() const { return static_cast<TensorDomain&>(*domain); }
  [[nodiscard]] Level* enclosing_level() const { return static_cast<Level*>(enclosing.get()); }
  // As a tenant of the pool of pages, which is the outermost level with a budget, or recorded to learn of one.
  [[nodiscard]] bool lives() const override;
  [[nodiscard]] std::size_t unused() const override;
  [[nodiscard]] std::size_t handed_out() const override;
  void emptied() override;
  [[nodiscard]] std::size_t rounded_up() const override;
  bool give_back_dropped() override;
  // The running operator holds so many bytes more, which the table does not count yet.
  void note_in_flight(std::int64_t nbytes);
  // The level around this one that still runs, if any: heir to what this one hands out.
  [[nodiscard]] Level* heir() const;
  // An operator of the level runs on this thread, and the last one did not. `has_node`: autograd has
  // made a node for it.
  void enter_thread(std::uint64_t this_thread, bool has_node);
  // Whether autograd made that node of that thread while the level's operators ran there.
  [[nodiscard]] bool made_node(std::uint64_t on_thread, std::uint64_t number) const;

  const std::string name;
  const Wording wording;
  const bool timed;
  const bool verify;
  const double most_replays;
  const std::vector<std::shared_ptr<Tier>> tiers;  // where its versions may be moved to
  const bool drops;
  std::atomic<bool> active{false};
  std::size_t made_since_asked = 0;  // pressure.h
  const std::int64_t rounded_before;  // when the level began: device_memory.h
  // The thread that the level began on, and how many autograd nodes that had made.
  // See Note [Nodes are numbered by thread]
  const std::uint64_t thread;
  const std::uint64_t first_node;
  std::uint64_t last_thread;  // that an operator of the level ran on
  // Null if nobody asks: neither this level nor one around it has a budget or is recorded.
  const c10::intrusive_ptr<UnrecordedBytes> unrecorded;

  // Of an outermost level: what its operators have written that is the caller's.
  std::unordered_set<const c10::StorageImpl*> written_outside;

  // boundary.cpp and gradient_edges.cpp
  // A result leads back into the level's part of the autograd graph, and that is still there.
  bool graph_leaves = false;
  std::vector<c10::weak_intrusive_ptr<c10::TensorImpl>> leaves;
  std::unordered_set<const c10::TensorImpl*> known_leaves;
  std::weak_ptr<WatchedLeaves> watched_leaves;  // live with the graph that leads to them

 private:
  Level* const tenant_;  // this level, or one around it; or null
  std::unordered_map<std::uint64_t, std::uint64_t> first_nodes_;  // by thread
  std::atomic<std::int64_t> in_flight_{0};
  mutable std::size_t most_used_ = 0;  // when the pool has asked, under its lock
};

// A level as Python or an autograd hook holds it.
class LevelHandle {
 public:
  explicit LevelHandle(Level& level);
  ~LevelHandle();
  LevelHandle(const LevelHandle&) = delete;
  LevelHandle& operator=(const LevelHandle&) = delete;

  [[nodiscard]] Level& level() const { return *level_; }

 private:
  Ref<Level> level_;
};

[[nodiscard]] inline Level& level_of(const Cell& cell) { return static_cast<Level&>(*cell.level); }

// This thread's innermost active level, or null.
[[nodiscard]] Level* current_level();
[[nodiscard]] std::size_t stack_depth();

// In between, this thread's operators are no level's, while its dispatch keys stay as they are.
void hide_levels();
void show_levels();

// Makes a new level inside the current one and puts it on this thread's stack.
std::shared_ptr<LevelHandle> push_level(const LevelOptions& options);
// Returns what is wrong, if the level is not on top. See Note [Calls that are interleaved].
[[nodiscard]] std::string pop_level(Level& level);
// After an exception: makes resident what of the level's tensors is still alive, as far as the
// budget allows, for whoever kept them.
void bring_survivors_back(Level& level);
// `f` is over, or a backward after it: gives to the caller what else is alive, unless a graph may ask
// for it. `sealed`: the results of `f` are.
// Note [What is stored away outlives what it was made of]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
// What `f` stores away (an optimiser's moments, the hidden state of an RNN, a cache) is not among its
// results. It was computed from parameters, buffers and gradients, which the program overwrites
// between two calls as a matter of course; if it were still evicted then, it could not be had again.
//   1. What autograd cannot have saved, or has freed, becomes the caller's, as a result would:
//      when `f` is over, and at the end of each backward after that which frees its graph. So a step
//      that has run its backward may return its loss, with what is left of the graph.
//      See Note [What autograd may have saved].
//   2. So does what no live operation has read, if no result of `f` leads back into a graph that is
//      still there. What has been read may be the saved values of a graph that was stored away too.
//   3. The rest stays the level's, and is evicted at need. An operator that another level sees, and
//      that overwrites what the rest is replayed from, has that copied first.
//   4. As far as the budget allows, the rest is made resident when `f` returns, if no result leads
//      back into a graph, and else at the end of a backward that frees the graph and makes no other.
//      No operator of the level comes to evict it then.
void hand_over(Level& level, bool sealed);

// Every domain there is, but those that are lost to a fork.
[[nodiscard]] std::vector<std::shared_ptr<TensorDomain>> live_domains();

// Takes notice of what has been allocated and freed beside operators, and makes room for it. Throws
// NoRoom.
void notice_unrecorded(Level& level);

// Every domain there is but one, one after the other, with its lock held.
void for_each_live_domain(c10::function_ref<void(TensorDomain&)> visit,
                          const Domain* but = nullptr);

// Whether nothing runs in the level of that report, and no graph can ask it for a replay any more.
[[nodiscard]] bool is_over(const Report& report);

// Note [Levels outlive the interpreter]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
// A backward that ends with an exception (Ctrl-C, which we serve between replays; a budget that is too
// small) leaves the nodes that were ready in a queue of their thread's, with their graph and with the
// gradients on their way. The main thread's queue is destroyed after the interpreter has gone, and static
// objects even later. Were a level to die with them, it would free storages from outside; and one that
// is a NumPy array's (`from_numpy`, `from_dlpack`, `frombuffer`), or a score written in Python, takes the
// interpreter's lock for that: the process would end with a segmentation fault.
//   1. While the interpreter still runs, at its exit handlers, the main thread's queue is replaced by an
//      empty one. Nobody can run what was in it: its backward is over. So goes what torch has saved there,
//      too, which no level may know any more.
//   2. When the interpreter has gone, every domain's lock is taken and never released. Whatever is dropped
//      from then on waits in the lock's queue, storage and all: Note [The program may drop a tensor at any
//      time]. So levels free nothing, and what they hold, torch's own references cannot free either.

// On the main thread, which is in no backward.
void empty_ready_queue();
// The rest of the process runs without the interpreter.
void hold_all_levels();

}  // namespace rematfn
