// SPDX-License-Identifier: Apache-2.0
//
// trimming.cpp: the part of Ledger that shortens a record that has become too long.
//
// Note [A record that is too long is trimmed]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
// A loop that feeds on its own result would remember every step it ever made. So beyond a limit of
// live operations resident versions become constants, the oldest first, until half as many are left:
// what only they needed dies. But a constant cannot be evicted, and a level whose constants fill its
// budget refuses the next operator. Hence:
//   1. What trimming pins is at most half of the budget that neither the largest operator so far nor
//      anything else that cannot go has need of.
//   2. A version is worth its bytes if so many evicted operations lead to it that, at that price, half
//      of the room pays for all that is to go. The state of a loop is. A result that is held for
//      itself, one operation away from what is resident, is not, and would take the room of one that
//      is. How many there are is not what goes at once: a second version may need them too, until it
//      is cut as well.
//   3. What then is still too long stays so: evicted versions of the program need their lineage. The
//      next attempt is made when the record has grown by a quarter, so that it costs next to nothing
//      for each operator that attempts are in vain.
// Without a budget nothing is refused for want of room, and all that is resident may be cut.

#include <algorithm>
#include <vector>

#include "engine/ledger.h"

namespace rematfn {

struct Ledger::TrimGoal {
  struct Room {
    const Table* table;
    std::size_t most;  // of trimmed bytes
  };
  std::size_t operations;   // to be freed
  std::vector<Room> rooms;  // of the table that is looked at and those around it
};

// Whether it would take `count` operations or more to replay a version that is resident.
static bool has_ancestors(Walks& walks, const Version& version, std::size_t count) {
  Walk walk(walks);
  walk.visit(*version.producer);
  for (std::size_t i = 0; i < walk.size() && walk.size() < count; ++i) {
    for (const Input& input : walk[i].inputs) {
      if (input.version->must_be_replayed()) walk.visit(*input.version->producer);
    }
  }
  return walk.size() >= count;
}

void Ledger::trim_if_long() {
  if (live_operations <= trims_beyond_) [[likely]] return;
  TrimGoal goal{live_operations - most_operations_ / 2, {}};
  trim(*root, goal);
  trims_beyond_ = std::max(most_operations_, live_operations + live_operations / 4);  // Rule 3
}

void Ledger::trim(Table& table, TrimGoal& goal) {
  const bool bounded = table.budget != kNoBudget;
  if (bounded) {
    list_candidates();
    const std::size_t goes = table.evictable_bytes() + table.trimmed();
    const std::size_t stays = table.used_bytes() - std::min(goes, table.used_bytes());
    const std::size_t needed = stays + table.statistics.min_budget;
    const std::size_t budget = table.available_bytes();
    goal.rooms.push_back({&table, (budget - std::min(needed, budget)) / 2});  // Rule 1
  }
  const auto may_stay = [&](const Version& version) {
    return std::ranges::all_of(goal.rooms, [&](const TrimGoal::Room& room) {
      if (room.table->trimmed() + version.nbytes > room.most) return false;
      const double share = static_cast<double>(version.nbytes) / static_cast<double>(room.most + 1);  // Rule 2
      const double operations = share * static_cast<double>(goal.operations);
      return has_ancestors(walks, version, static_cast<std::size_t>(operations));
    });
  };
  for (Version* v = table.oldest; v != nullptr && live_operations > most_operations_ / 2;
       v = v->next) {
    if (!v->is_here() || !v->producer || !may_stay(*v)) continue;
    cut(*v, /*trimmed=*/true);
  }
  // With the lineage that is cut another table may go.
  const std::vector<Ref<Table>> inner(table.inner.begin(), table.inner.end());
  for (const Ref<Table>& one : inner) trim(*one, goal);
  if (bounded) goal.rooms.pop_back();
}

}  // namespace rematfn
