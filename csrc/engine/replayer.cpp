// SPDX-License-Identifier: Apache-2.0
#include "engine/replayer.h"

#include <algorithm>
#include <cassert>
#include <optional>
#include <stdexcept>

#include "engine/domain.h"
#include "engine/guide.h"

namespace rematfn {
namespace {

constexpr std::size_t kSomeReplays = 100;
constexpr std::size_t kFewReplays = 2;
constexpr std::size_t kManyReplays = 20;
constexpr std::size_t kEnoughReplays = 10'000;

// Rule 5. For one materialization; where the record is long, about all of it.
std::size_t most_replays(std::size_t per_operation, std::size_t operations) {
  const std::size_t most = std::max(kEnoughReplays, operations);
  return kSomeReplays + std::min(per_operation * operations, most);
}

}  // namespace

Replayer::Replayer(Domain& domain) : domain_(domain), frugal_(domain, *this) {}

bool Replayer::is_wanted(const Version& version, const Version* dead) {
  if (version.pending > 0 || version.has_tensor) return true;
  const auto is_evicted = [&](const Version* v) {
    return v != nullptr && v != dead && v->must_be_replayed();
  };
  for (const Input* use = version.readers; use != nullptr; use = use->next) {
    const auto& outputs = use->reader->outputs;
    if (std::any_of(outputs.begin(), outputs.end(), is_evicted)) return true;
  }
  return false;
}

void Replayer::materialize(std::span<Version* const> wanted) {
  const auto missing = [](const Version* v) { return v->place != Place::kHere; };
  if (std::none_of(wanted.begin(), wanted.end(), missing)) return;
  if (running_) {
    throw std::runtime_error(
        "rematfn: an evicted tensor was asked for in the middle of the replays of its level, by a "
        "kernel or by a signal handler. Make it resident before, or pass it as an argument.");
  }
  domain_.list_candidates();
  running_ = true;
  double latest = Thrash::kNowhere;
  for (const Version* v : wanted) {
    if (missing(v)) latest = std::max(latest, v->last_access);
  }
  domain_.thrash.note_miss(latest);
  for (Version* v : wanted) expect(*v);
  try {
    bring_back(wanted);
  } catch (...) {
    abandon_schedule();
    running_ = false;
    for (Version* v : wanted) unexpect(*v);
    throw;
  }
  running_ = false;
  for (Version* v : wanted) unexpect(*v);
}

// Rule 5
void Replayer::bring_back(std::span<Version* const> wanted) {
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
NoRoom Replayer::try_to_bring_back(std::span<Version* const> wanted) {
  std::optional<NoRoom> least;
  const auto fits = [&](const auto& replay) {
    try {
      replay();
    } catch (const NoRoom& why) {
      abandon_schedule();
      const bool less = !least || why.thrashing < least->thrashing ||
                        (why.thrashing == least->thrashing &&
                         why.smallest_budget < least->smallest_budget);
      if (less) least = why;
      return false;
    }
    return true;
  };
  if (fits([&] { replay_softly(wanted, kFewReplays); })) return {};
  const auto may_move = [&](const Version* v) {
    return domain_.floor.moved && v->table && v->table->has_copies();
  };
  if (std::any_of(wanted.begin(), wanted.end(), may_move)) {  // Rule 6
    domain_.evictor.move_from_now_on();
    if (fits([&] { replay_softly(wanted, kManyReplays); })) return {};
  }
  replays_left_ = most_replays(kManyReplays, domain_.live_operations);
  if (domain_.floor.frugal && fits([&] { frugal_.replay(*least->table, wanted); })) return {};
  if (fits([&] { replay_softly(wanted, kManyReplays); })) return {};
  return *least;
}

void Replayer::replay_softly(std::span<Version* const> wanted, std::size_t per_operation) {
  const auto missing = [](const Version* v) { return v->place != Place::kHere; };
  replays_left_ = most_replays(per_operation, domain_.live_operations);
  for (bool again = false; std::any_of(wanted.begin(), wanted.end(), missing); again = true) {
    for (Version* v : wanted) {
      if (is_missing(*v) && v->must_be_replayed()) schedule(*v);
      if (v->place == Place::kHere && again) hold(*v, nullptr);  // Rule 4
    }
    run_schedule();
    for (Version* v : wanted) {
      if (v->can_be_fetched()) fetch(*v);
    }
  }
  let_go_of_all();
}

// See Note [A handle may outlive its storage]
bool Replayer::is_missing(Version& version) {
  if (version.place == Place::kLeaving) domain_.call_back(version);
  if (version.place == Place::kComing) domain_.let_come(version);
  if (version.has_bytes() && domain_.store.lost(version)) {
    version.has_tensor = false;
    if (domain_.store.forget(version)) {
      version.table->let_go(version);
      domain_.leave(version);
    }
  }
  return version.place != Place::kHere;
}

void Replayer::schedule(Version& missing) {
  std::vector<Version*> todo{&missing};
  while (!todo.empty()) {
    Operation& operation = *todo.back()->producer;
    todo.pop_back();
    if (operation.scheduled) continue;
    operation.scheduled = true;
    heap_.emplace_back(&operation);
    std::push_heap(heap_.begin(), heap_.end(), Later{});
    // All at first: what is thrown while one is asked for has all of them unexpected.
    for (Input& input : operation.inputs) expect(*input.version);
    for (Input& input : operation.inputs) {
      if (!is_missing(*input.version)) continue;
      // See Note [A version goes by a way], Rule 1
      if (input.version->must_be_replayed()) todo.push_back(input.version.get());
    }
  }
}

void Replayer::run_schedule() {
  while (!heap_.empty()) {
    const Ref<Operation> operation = heap_.front();
    const auto& outputs = operation->outputs;
    const bool needed = std::any_of(outputs.begin(), outputs.end(), [](const Version* o) {
      return o != nullptr && o->must_be_replayed() && o->pending > 0;
    });
    if (needed) {
      const auto missing = [&](const Input& input) { return is_missing(*input.version); };
      if (std::any_of(operation->inputs.begin(), operation->inputs.end(), missing)) {
        for (Input& input : operation->inputs) {
          if (!missing(input)) hold(*input.version, operation.get());  // Rule 4
        }
        for (Input& input : operation->inputs) {
          if (input.version->must_be_replayed()) schedule(*input.version);
          if (input.version->can_be_fetched()) fetch(*input.version);
        }
        continue;
      }
      run(*operation);
    }
    // Planning only ever adds earlier operations, which have run by now: ours is on top again.
    std::pop_heap(heap_.begin(), heap_.end(), Later{});
    heap_.pop_back();
    operation->scheduled = false;
    let_go_of_inputs(operation.get());
    for (Input& input : operation->inputs) unexpect(*input.version);
    for (Input& input : operation->inputs) drop_if_useless(*input.version);
  }
}

void Replayer::hold(Version& version, const Operation* reader) {
  if (!domain_.floor.pinned) return;
  pin(version);
  held_.emplace_back(reader, Ref<Version>(&version));
}

void Replayer::let_go_of_inputs(const Operation* reader) {
  while (!held_.empty() && held_.back().first == reader) {
    unpin(*held_.back().second);
    held_.pop_back();
  }
}

void Replayer::let_go_of_all() {
  for (auto& [reader, version] : held_) unpin(*version);
  held_.clear();
}

void Replayer::run(Operation& operation) {
  if (replays_left_ == 0) throw thrashing(*operation.table);  // Rule 5
  --replays_left_;
  assert(std::ranges::all_of(operation.inputs,
                             [](const Input& i) { return i.version->place == Place::kHere; }));
  for (Input& input : operation.inputs) pin(*input.version);
  try {
    domain_.make_room(*operation.table, operation.replay_bytes());
    domain_.store.serve_signals();
    if (domain_.journal) domain_.journal->note_replay(operation);
    operation.replay(domain_);
  } catch (...) {
    for (Input& input : operation.inputs) unpin(*input.version);
    throw;
  }
  for (Input& input : operation.inputs) unpin(*input.version);
  for (Table* t = operation.table.get(); t != nullptr; t = t->enclosing.get()) t->settle();
  ++operation.table->statistics.replays;
  operation.table->statistics.replayed_cost += operation.cost;
  operation.table->statistics.replayed_flops += operation.flops;
  domain_.thrash.note_replay(operation.cost);
  if (domain_.floor.moved && domain_.guide &&
      domain_.thrash.replayed() > domain_.guide->most_replayed()) {
    domain_.guide->note_broken();
    domain_.evictor.move_from_now_on();  // Rule 6
  }
}

void Replayer::fetch(Version& version) {
  domain_.make_room(*version.table, version.nbytes);
  domain_.store.serve_signals();
  domain_.fetch(version);
}

void Replayer::drop_if_useless(Version& version) {
  if (!version.may_go() || !version.producer) return;
  // See Note [A kept value outlives the program's tensors]
  if (is_wanted(version) || domain_.burial.is_kept_for_somebody(version)) return;
  domain_.drop(version);
}

void Replayer::abandon_schedule() {
  for (Ref<Operation>& operation : heap_) {
    operation->scheduled = false;
    for (Input& input : operation->inputs) unexpect(*input.version);
  }
  heap_.clear();
  frugal_.abandon();
  let_go_of_all();
}

NoRoom Replayer::thrashing(Table& table) {
  return {&table, table.budget + table.budget / 8 + 1, table.used_bytes(),
          /*thrashing=*/true};
}

}  // namespace rematfn
