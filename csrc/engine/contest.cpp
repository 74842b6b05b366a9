// SPDX-License-Identifier: Apache-2.0
#include "engine/contest.h"

#include <algorithm>

#include "engine/guide.h"

namespace rematfn {

Contest::Contest(const std::vector<std::shared_ptr<const Plan>>& plans) {
  for (const std::shared_ptr<const Plan>& plan : plans) entrants_.push_back({plan});
}

std::shared_ptr<const Plan> Contest::next() const {
  const std::lock_guard guard(mutex_);
  for (const Entrant& entrant : entrants_) {
    if (entrant.calls < kCalls && entrants_.size() > 1) return entrant.plan;
  }
  return std::ranges::min_element(entrants_, {}, &Entrant::least)->plan;
}

void Contest::note(const Plan& plan, double seconds) {
  const std::lock_guard guard(mutex_);
  for (Entrant& entrant : entrants_) {
    if (entrant.plan.get() != &plan || entrant.calls == kCalls) continue;
    if (seconds == kNever) entrant = {entrant.plan, kCalls, kNever};
    else if (entrant.calls++ > 0) entrant.least = std::min(entrant.least, seconds);
  }
}

}  // namespace rematfn
