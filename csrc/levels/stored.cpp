// SPDX-License-Identifier: Apache-2.0
//
// stored.cpp: what `f` has stored away, when it is over.

#include <algorithm>

#include "base/interpreter.h"
#include "levels/level.h"

namespace rematfn {
namespace {

// Makes `version` resident. False if it cannot be had again: whoever reads it later will hear why.
// Throws NoRoom.
bool try_to_have(Version& version) {
  Version* wanted = &version;
  try {
    version.table->domain->materialize({&wanted, 1});
  } catch (const std::exception& error) {
    if (is_stop(error)) throw;
  }
  return version.place == Place::kHere;
}

}  // namespace

void bring_survivors_back(LevelHandle& handle) {
  Level& level = handle.level();
  const DomainLock lock(level.domain);
  std::vector<Ref<Version>> survivors;  // and pinned, lest one takes the room of another
  for (Version* v = level.newest; v != nullptr; v = v->previous) {
    if (!v->has_tensor) continue;
    try {
      if (v->place != Place::kHere && !try_to_have(*v)) continue;
    } catch (const NoRoom&) {
      break;
    }
    pin(*v);
    survivors.emplace_back(v);
  }
  for (const Ref<Version>& version : survivors) unpin(*version);
}

namespace {

// See Note [What is stored away outlives what it was made of]
void find_stored(const Level& level, bool sealed, std::vector<Ref<TensorVersion>>& stored) {
  const TensorDomain& domain = level.tensor_domain();
  for (Version* v = level.newest; v != nullptr; v = v->previous) {
    auto& version = static_cast<TensorVersion&>(*v);
    if (!v->has_tensor || version.cell() == nullptr || version.cell()->storage.expired()) continue;
    if (domain.savers.have_let_go(*v) ||
        (sealed && !level.graph_leaves && v->readers == nullptr)) {
      stored.emplace_back(&version);
    }
  }
  for (const Table* table : level.inner) {
    const auto& inner = static_cast<const Level&>(*table);
    if (!inner.active) find_stored(inner, sealed && !level.graph_leaves, stored);
  }
}

}  // namespace

void hand_over(LevelHandle& handle, bool sealed) {
  Level& level = handle.level();
  const DomainLock lock(level.domain);
  if (level.active || level.heir() != nullptr) return;
  if (!sealed && !level.tensor_domain().savers.has_any()) return;
  std::vector<Ref<TensorVersion>> stored;
  find_stored(level, sealed, stored);
  // What finds no room is tried again when the others have left.
  std::vector<Ref<TensorVersion>> crowded;
  for (std::vector<Ref<TensorVersion>>* some : {&stored, &crowded}) {
    for (const Ref<TensorVersion>& version : *some) {
      try {
        if (!try_to_have(*version)) continue;
      } catch (const NoRoom&) {
        if (some == &stored) crowded.push_back(version);
        continue;
      }
      if (level.domain->recorder) level.domain->recorder->note_seal(*version);
      level.tensor_domain().make_outside(*version);
      version->handed_over = true;
    }
  }
  if (sealed && !level.graph_leaves) bring_survivors_back(handle);
}

}  // namespace rematfn
