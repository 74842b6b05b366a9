// SPDX-License-Identifier: Apache-2.0
#include "engine/contest.h"

#include <algorithm>

#include "engine/guide.h"

namespace rematfn {

struct Contest::Entrant {
  Followed followed;
  int calls = 0;
  double least = kNever;  // seconds of a call
};

Contest::Contest(const std::vector<Followed>& plans) {
  for (const Followed& plan : plans) entrants_.push_back({plan});
}

Contest::~Contest() = default;

Followed Contest::next() const {
  const std::lock_guard guard(mutex_);
  for (const Entrant& entrant : entrants_) {
    if (entrant.calls < kCalls && entrants_.size() > 1) return entrant.followed;
  }
  return std::ranges::min_element(entrants_, {}, &Entrant::least)->followed;
}

void Contest::note(const Plan& plan, double seconds) {
  const std::lock_guard guard(mutex_);
  for (Entrant& entrant : entrants_) {
    if (entrant.followed.plan.get() != &plan || entrant.calls == kCalls) continue;
    if (seconds == kNever) entrant = {entrant.followed, kCalls, kNever};
    else if (entrant.calls++ > 0) entrant.least = std::min(entrant.least, seconds);
  }
}

}  // namespace rematfn
