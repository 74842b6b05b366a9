// SPDX-License-Identifier: Apache-2.0
#include "engine/replayer.h"

#include <c10/util/ScopeExit.h>

#include <algorithm>
#include <optional>
#include <stdexcept>

#include "engine/frugal.h"

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

void Replayer::materialize(std::span<Version* const> wanted, bool before_call) {
  const bool has_due = before_call && room_.observers.has_replays_due();
  if (!has_due && std::ranges::all_of(wanted, &Version::is_here)) return;
  if (room_.is_replaying) {
    throw std::runtime_error(
        "rematfn: an evicted tensor was asked for in the middle of the replays of its level, by a "
        "kernel or by a signal handler. Make it resident before, or pass it as an argument.");
  }
  room_.list_candidates();
  room_.is_replaying = true;
  double latest = Thrash::kNowhere;
  for (const Version* v : wanted) {
    if (!v->is_here()) latest = std::max(latest, v->last_access);
  }
  room_.thrash.note_miss(latest);
  for (Version* v : wanted) expect(*v);
  const auto end = c10::make_scope_exit([&] {
    abandon_queue();  // what is left of it, if something was thrown
    room_.is_replaying = false;
    for (Version* v : wanted) unexpect(*v);
  });
  follow_schedule(wanted, before_call);
  bring_back(wanted);
}

// See Note [A schedule is carried out]
void Replayer::follow_schedule(std::span<Version* const> wanted, bool before_call) {
  while (room_.observers.has_replays_due()) {
    if (!before_call && std::ranges::all_of(wanted, &Version::is_here)) return;
    const auto [repeated, spent] = room_.observers.guide->take_due();
    if (repeated == nullptr) continue;
    const Ref<Operation> operation(repeated);
    std::vector<Ref<Version>> goes;
    std::vector<Ref<Version>> stays;
    const auto note = [&, &values = spent](Version& version) {
      (std::ranges::find(values, version.value) != values.end() ? goes : stays).emplace_back(&version);
    };
    for (Version* output : operation->outputs) {
      if (output != nullptr) note(*output);
    }
    const std::size_t outputs = stays.size();
    for (Input& input : operation->inputs) note(*input.version);
    for (const Ref<Version>& v : stays) expect(*v);
    room_.replays_left = most_replays(kManyReplays, room_.live_operations);
    try {
      const auto end = c10::make_scope_exit([&] {
        for (const Ref<Version>& v : stays) unexpect(*v);
      });
      for (std::size_t i = 0; i < outputs; ++i) {
        if (stays[i]->must_be_replayed()) enqueue(*stays[i]);
      }
      run_queue();
    } catch (const NoRoom&) {
      abandon_queue();
      return room_.observers.guide->leave_schedule();
    }
    for (const Ref<Version>& v : goes) room_.evictor.evict_if_free(*v);
  }
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
      abandon_queue();
      const bool less = !least || why.thrashing < least->thrashing ||
                        (why.thrashing == least->thrashing &&
                         why.smallest_budget < least->smallest_budget);
      if (less) least = why;
      return false;
    }
    return true;
  };
  if (fits([&] { run_replays(wanted, kFewReplays); })) return {};
  const auto may_move = [&](const Version* v) { return v->table && v->table->has_copies(); };
  if (std::any_of(wanted.begin(), wanted.end(), may_move)) {  // See Note [Near the floor], Rule 4
    room_.evictor.move_from_now_on();
    if (fits([&] { run_replays(wanted, kManyReplays); })) return {};
  }
  room_.replays_left = most_replays(kManyReplays, room_.live_operations);
  if (fits([&] { replay_frugally(room_, *least->table, wanted); })) return {};
  if (fits([&] { run_replays(wanted, kManyReplays); })) return {};
  return *least;
}

void Replayer::run_replays(std::span<Version* const> wanted, std::size_t per_operation) {
  room_.replays_left = most_replays(per_operation, room_.live_operations);
  for (bool again = false; !std::ranges::all_of(wanted, &Version::is_here); again = true) {
    for (Version* v : wanted) {
      if (room_.is_missing(*v) && v->must_be_replayed()) enqueue(*v);
      if (v->is_here() && again) hold(*v, nullptr);  // Rule 4
    }
    run_queue();
    for (Version* v : wanted) {
      if (v->can_be_fetched()) room_.fetch(*v);
    }
  }
  unpin_inputs_of_all();
}

void Replayer::enqueue(Version& missing) {
  std::vector<Version*> todo{&missing};
  while (!todo.empty()) {
    Operation& operation = *todo.back()->producer;
    todo.pop_back();
    if (operation.queued) continue;
    operation.queued = true;
    heap_.emplace_back(&operation);
    std::push_heap(heap_.begin(), heap_.end(), Later{});
    // All at first: what is thrown while one is asked for has all of them unexpected.
    for (Input& input : operation.inputs) expect(*input.version);
    for (Input& input : operation.inputs) {
      if (!room_.is_missing(*input.version)) continue;
      // See Note [A version goes by a way], Rule 1
      if (input.version->must_be_replayed()) todo.push_back(input.version.get());
    }
  }
}

void Replayer::run_queue() {
  while (!heap_.empty()) {
    const Ref<Operation> operation = heap_.front();
    const auto& outputs = operation->outputs;
    const bool needed = std::any_of(outputs.begin(), outputs.end(), [](const Version* o) {
      return o != nullptr && o->must_be_replayed() && o->pending > 0;
    });
    if (needed) {
      const auto missing = [&](const Input& input) { return room_.is_missing(*input.version); };
      if (std::any_of(operation->inputs.begin(), operation->inputs.end(), missing)) {
        for (Input& input : operation->inputs) {
          if (!missing(input)) hold(*input.version, operation.get());  // Rule 4
        }
        for (Input& input : operation->inputs) {
          if (input.version->must_be_replayed()) enqueue(*input.version);
          if (input.version->can_be_fetched()) room_.fetch(*input.version);
        }
        continue;
      }
      room_.replay(*operation);
    }
    // Planning only ever adds earlier operations, which have run by now: ours is on top again.
    std::pop_heap(heap_.begin(), heap_.end(), Later{});
    heap_.pop_back();
    operation->queued = false;
    unpin_inputs(operation.get());
    for (Input& input : operation->inputs) unexpect(*input.version);
    for (Input& input : operation->inputs) room_.drop_if_useless(*input.version);
  }
}

void Replayer::hold(Version& version, const Operation* reader) {
  pin(version);
  held_.emplace_back(reader, Ref<Version>(&version));
}

void Replayer::unpin_inputs(const Operation* reader) {
  while (!held_.empty() && held_.back().first == reader) {
    unpin(*held_.back().second);
    held_.pop_back();
  }
}

void Replayer::unpin_inputs_of_all() {
  for (auto& [reader, version] : held_) unpin(*version);
  held_.clear();
}

void Replayer::abandon_queue() {
  for (Ref<Operation>& operation : heap_) {
    operation->queued = false;
    for (Input& input : operation->inputs) unexpect(*input.version);
  }
  heap_.clear();
  unpin_inputs_of_all();
}

}  // namespace rematfn
