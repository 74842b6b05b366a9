// SPDX-License-Identifier: Apache-2.0
//
// What goes before its room is wanted. See Note [A version goes by a way], Rule 6
#include <algorithm>

#include "engine/domain.h"
#include "engine/evictor.h"
#include "engine/guide.h"

namespace rematfn {

void Evictor::evict_by_copy(Version& version) {
  if (!version.may_go() || version.pending > 0 || version.kept) return;
  const double next = version.next_use;
  const double until = next == kUnknown || next == kNever ? kNever : next - domain_.clock;
  Way* cheapest = nullptr;
  version.table->for_each_way(version, [&](Way& way) {
    if (!way.keeps_copy() || until <= way.pays_after(version) || !way.has_room(version)) return;
    if (cheapest == nullptr || way.cost(version) < cheapest->cost(version)) cheapest = &way;
  });
  if (cheapest == nullptr || domain_.store.held_elsewhere(version)) return;
  version.way = cheapest;
  domain_.evict(version);
}

// See Note [A version goes by a way], Rule 6. Each is let go, or forgotten, once after it was touched: to
// look at all of them after each operator makes a program of n operators cost n^2.
void Evictor::evict_untouched(double before) {
  domain_.list_candidates();
  if (domain_.clock < first_due_) return;
  first_due_ = kNever;
  for (std::size_t i = recent_.size(); i-- > 0;) {
    Version& version = *recent_[i];
    const double due = due_to_go(version);
    if (due != kNever && (version.last_access >= before || due > domain_.clock)) {
      first_due_ = std::min(first_due_, due);
      continue;
    }
    forget(version);  // what takes its place has been looked at
    evict_by_copy(version);
  }
}

// In program time. Of a scan of 16,000 small operators, whose gradients are added to each other, the first
// call took 7.5 times eager's time where nothing had to lie, and takes 2.3 times.
double Evictor::due_to_go(const Version& version) const {
  constexpr double kMostWaiting = 0.25;  // of the time of operators
  double pays_after = kNever;
  version.table->for_each_way(version, [&](const Way& way) {
    if (way.keeps_copy()) pays_after = std::min(pays_after, way.pays_after(version));
  });
  if (pays_after == kNever) return kNever;
  const bool waits_too_long = domain_.root->statistics.waited > kMostWaiting * domain_.clock;
  const bool has_to_lie = version.next_use == kUnknown && waits_too_long;
  return version.last_access + (has_to_lie ? pays_after / 2 : 0);
}

void Evictor::note_touched(Version& version) {
  if (version.recent_slot != kNoSlot) return;
  const double due = due_to_go(version);
  if (due == kNever) return;
  first_due_ = std::min(first_due_, due);
  version.recent_slot = recent_.size();
  recent_.push_back(&version);
}

void Evictor::forget(Version& version) {
  if (version.recent_slot == kNoSlot) return;
  recent_.back()->recent_slot = version.recent_slot;
  recent_[version.recent_slot] = recent_.back();
  recent_.pop_back();
  version.recent_slot = kNoSlot;
}

void Evictor::evict_early(Version& version) {
  const auto& moved = domain_.guide->plan().moved;
  if (moved.empty() || version.value == kNoValue || !moved[version.value]) return;
  domain_.list_candidates();
  if (version.table) evict_by_copy(version);
}

}  // namespace rematfn
