// SPDX-License-Identifier: Apache-2.0
//
// replay.cpp: the part of Domain that has evicted versions made again.
//
// Note [Replay runs in program order]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
// The textbook way is recursion: to make a version, first make its producer's inputs, each locked
// until the producer has run. On a chain of 10^5 operators that overflows the stack, and on a U-Net
// the locks of all unfinished recursions together exceed a small budget. Instead:
//   1. Collect the closure of missing producers and run it from a heap, by place in the program.
//   2. Each version counts its pending readers; when the last has run and the program does not hold
//      the version, it goes at once, unless a reader that is still evicted will want it again.
//   3. Pending readers protect softly: such a version is evicted when nothing else is left, and
//      found missing when its reader's turn comes. The closure is then planned again.
//   4. Whoever had to plan again pins the inputs it still has until it has run. Each plan for an
//      operation thus pins one more input than the last, so the loop ends.
//   5. Such pins can themselves be what leaves no room. They are then let go, all of them, a limited
//      number of times: what they kept is planned for again when its turn comes, in another order.
//      Only then does NoRoom say that the inputs do not fit together.
//   6. Just above the least budget, replays can be exponentially many. Past two for each recorded
//      operation, or where there is no room, they are given up, and what is still missing is made by
//      Note [Frugal replays]. If that does not find room, the above is tried once more, with twenty
//      for each operation. Then NoRoom says what the least was that would have done, or that replays
//      thrash.

#include <algorithm>
#include <optional>
#include <stdexcept>

#include "engine/domain.h"

namespace rematfn {
namespace {

constexpr int kMostRetries = 8;
constexpr std::size_t kSomeReplays = 100;
constexpr std::size_t kFewReplays = 2;
constexpr std::size_t kManyReplays = 20;

}  // namespace

bool Domain::is_wanted(const Version& version, const Version* dead) {
  if (version.pending > 0 || version.program) return true;
  const auto is_evicted = [&](const Version* v) {
    return v != nullptr && v != dead && !v->resident;
  };
  for (const Input* use = version.readers; use != nullptr; use = use->next) {
    const auto& outputs = use->reader->outputs;
    if (std::any_of(outputs.begin(), outputs.end(), is_evicted)) return true;
  }
  return false;
}

void Domain::materialize(std::span<Version* const> wanted) {
  const auto missing = [](const Version* v) { return !v->resident; };
  if (std::none_of(wanted.begin(), wanted.end(), missing)) return;
  if (planning_) {
    throw std::runtime_error(
        "rematfn: an evicted tensor was asked for in the middle of the replays of its level, by a "
        "kernel or by a signal handler. Make it resident before, or pass it as an argument.");
  }
  list_candidates();
  planning_ = true;
  double latest = Thrash::kNowhere;
  for (const Version* v : wanted) {
    if (!v->resident) latest = std::max(latest, v->last_access);
  }
  thrash.note_miss(latest);
  for (Version* v : wanted) expect(*v);
  try {
    bring_back(wanted);
  } catch (...) {
    abandon_plan();
    planning_ = false;
    for (Version* v : wanted) unexpect(*v);
    throw;
  }
  planning_ = false;
  for (Version* v : wanted) unexpect(*v);
}

// Rule 6
void Domain::bring_back(std::span<Version* const> wanted) {
  for (;;) {
    const NoRoom why = try_to_bring_back(wanted);
    if (why.table == nullptr) return;
    // Not in small steps: each costs many replays.
    const std::size_t more = std::max(why.smallest_budget, why.table->budget + why.table->budget / 8);
    if (why.table->give_way(more, 0)) continue;
    if (!why.thrashing) why.table->note_need(why.smallest_budget);
    throw why;
  }
}

// The least that would have done, without a table if all is there.
NoRoom Domain::try_to_bring_back(std::span<Version* const> wanted) {
  std::optional<NoRoom> least;
  const auto fits = [&](const auto& replay) {
    try {
      replay();
    } catch (const NoRoom& why) {
      abandon_plan();
      const bool less = !least || why.thrashing < least->thrashing ||
                        (why.thrashing == least->thrashing &&
                         why.smallest_budget < least->smallest_budget);
      if (less) least = why;
      return false;
    }
    return true;
  };
  if (fits([&] { replay_softly(wanted, kFewReplays); })) return {};
  replays_left_ = kSomeReplays + kManyReplays * live_operations;
  if (fits([&] { replay_frugally(*least->table, wanted); })) return {};
  if (fits([&] { replay_softly(wanted, kManyReplays); })) return {};
  return *least;
}

void Domain::replay_softly(std::span<Version* const> wanted, std::size_t per_operation) {
  const auto missing = [](const Version* v) { return !v->resident; };
  retries_ = kMostRetries;
  replays_left_ = kSomeReplays + per_operation * live_operations;
  for (bool again = false; std::any_of(wanted.begin(), wanted.end(), missing); again = true) {
    for (Version* v : wanted) {
      if (!v->resident) plan(*v);
      if (v->resident && again) hold(*v, nullptr);  // Rule 4
    }
    run_plan();
  }
  let_go_of_all();
}

// See Note [A handle may outlive its storage]
bool Domain::is_missing(Version& version) {
  if (version.resident && lost(version)) {
    version.program = false;
    if (forget(version)) {
      version.table->let_go(version);
      leave(version);
    }
  }
  return !version.resident;
}

void Domain::plan(Version& missing) {
  std::vector<Version*> todo{&missing};
  while (!todo.empty()) {
    Operation& operation = *todo.back()->producer;
    todo.pop_back();
    if (operation.planned) continue;
    operation.planned = true;
    heap_.emplace_back(&operation);
    std::push_heap(heap_.begin(), heap_.end(), Later{});
    for (Input& input : operation.inputs) {
      expect(*input.version);
      if (is_missing(*input.version)) todo.push_back(input.version.get());
    }
  }
}

void Domain::run_plan() {
  while (!heap_.empty()) {
    const Ref<Operation> operation = heap_.front();
    const auto& outputs = operation->outputs;
    const bool needed = std::any_of(outputs.begin(), outputs.end(), [](const Version* o) {
      return o != nullptr && !o->resident && o->pending > 0;
    });
    if (needed) {
      const auto missing = [&](const Input& input) { return is_missing(*input.version); };
      if (std::any_of(operation->inputs.begin(), operation->inputs.end(), missing)) {
        for (Input& input : operation->inputs) {
          if (input.version->resident) hold(*input.version, operation.get());  // Rule 4
        }
        for (Input& input : operation->inputs) {
          if (!input.version->resident) plan(*input.version);
        }
        continue;
      }
      replay_now(*operation);
    }
    // Planning only ever adds earlier operations, which have run by now: ours is on top again.
    std::pop_heap(heap_.begin(), heap_.end(), Later{});
    heap_.pop_back();
    operation->planned = false;
    let_go_of_inputs(operation.get());
    for (Input& input : operation->inputs) unexpect(*input.version);
    for (Input& input : operation->inputs) discard_if_useless(*input.version);
  }
}

void Domain::hold(Version& version, const Operation* reader) {
  pin(version);
  held_.emplace_back(reader, Ref<Version>(&version));
}

void Domain::let_go_of_inputs(const Operation* reader) {
  while (!held_.empty() && held_.back().first == reader) {
    unpin(*held_.back().second);
    held_.pop_back();
  }
}

void Domain::let_go_of_all() {
  for (auto& [reader, version] : held_) unpin(*version);
  held_.clear();
}

void Domain::replay_now(Operation& operation) {
  if (replays_left_ == 0) throw thrashing(*operation.table);  // Rule 6
  --replays_left_;
  for (Input& input : operation.inputs) pin(*input.version);
  try {
    make_room_to_replay(operation);
    serve_signals();
    operation.replay(*this);
  } catch (...) {
    for (Input& input : operation.inputs) unpin(*input.version);
    throw;
  }
  for (Input& input : operation.inputs) unpin(*input.version);
  ++operation.table->statistics.replays;
  operation.table->statistics.replayed_cost += operation.cost;
  operation.table->statistics.replayed_flops += operation.flops;
  thrash.note_replay(operation.cost);
}

void Domain::make_room_to_replay(Operation& operation) {
  for (;;) {
    try {
      make_room(*operation.table, operation.replay_bytes());
      return;
    } catch (const NoRoom&) {
      if (held_.empty() || retries_ == 0) throw;
      --retries_;
      let_go_of_all();  // Rule 5
    }
  }
}

void Domain::discard_if_useless(Version& version) {
  if (version.slot == kNoSlot || version.pins > 0) return;
  // See Note [A kept value outlives the program's tensors]
  if (is_wanted(version) || is_kept_for_somebody(version)) return;
  drop(version);
  leave(version);
}

void Domain::abandon_plan() {
  for (Ref<Operation>& operation : heap_) {
    operation->planned = false;
    for (Input& input : operation->inputs) unexpect(*input.version);
  }
  heap_.clear();
  while (!frames_.empty()) leave_frame();
  let_go_of_all();
}

NoRoom Domain::thrashing(Table& table) {
  return {&table, table.budget + table.budget / 8 + 1, table.used_bytes(),
          /*thrashing=*/true};
}

}  // namespace rematfn
