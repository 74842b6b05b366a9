// SPDX-License-Identifier: Apache-2.0
#include "engine/trimmer.h"

#include <algorithm>
#include <vector>

namespace rematfn {

struct Trimmer::Goal {
  struct Room {
    const Table* table;
    std::size_t most;  // of trimmed bytes
  };
  std::size_t operations;   // to be freed
  std::vector<Room> rooms;  // of the table that is looked at and those around it
};

void Trimmer::trim() {
  Goal goal{ledger_.live_operations - most_ / 2, {}};
  trim(*ledger_.root, goal);
  beyond_ = std::max(most_, ledger_.live_operations + ledger_.live_operations / 4);  // Rule 3
}

void Trimmer::trim(Table& table, Goal& goal) {
  const bool bounded = table.budget != kNoBudget;
  if (bounded) {
    ledger_.list_candidates();
    const std::size_t goes = table.evictable_bytes() + table.trimmed();
    const std::size_t stays = table.used_bytes() - std::min(goes, table.used_bytes());
    const std::size_t needed = stays + table.statistics.min_budget;
    const std::size_t budget = table.available_bytes();
    goal.rooms.push_back({&table, (budget - std::min(needed, budget)) / 2});  // Rule 1
  }
  const auto fits = [&](const Version& version) {
    return std::all_of(goal.rooms.begin(), goal.rooms.end(), [&](const Goal::Room& room) {
      return room.table->trimmed() + version.nbytes <= room.most;
    });
  };
  const auto is_worth_its_bytes = [&](const Version& version) {  // Rule 2
    return std::all_of(goal.rooms.begin(), goal.rooms.end(), [&](const Goal::Room& room) {
      const double share = static_cast<double>(version.nbytes) / static_cast<double>(room.most + 1);
      return has_ancestors(version, static_cast<std::size_t>(
                                        share * static_cast<double>(goal.operations)));
    });
  };
  for (Version* v = table.oldest; v != nullptr && ledger_.live_operations > most_ / 2;
       v = v->next) {
    if (!v->is_here() || !v->producer || !fits(*v) || !is_worth_its_bytes(*v)) continue;
    ledger_.cut(*v, /*trimmed=*/true);
  }
  // With the lineage that is cut another table may go.
  const std::vector<Ref<Table>> inner(table.inner.begin(), table.inner.end());
  for (const Ref<Table>& one : inner) trim(*one, goal);
  if (bounded) goal.rooms.pop_back();
}

// Whether it would take `count` operations or more to replay a version that is resident.
bool Trimmer::has_ancestors(const Version& version, std::size_t count) {
  Walk walk(ledger_.walks);
  walk.visit(*version.producer);
  for (std::size_t i = 0; i < walk.size() && walk.size() < count; ++i) {
    for (const Input& input : walk[i].inputs) {
      if (input.version->must_be_replayed()) walk.visit(*input.version->producer);
    }
  }
  return walk.size() >= count;
}

}  // namespace rematfn
