// SPDX-License-Identifier: Apache-2.0
#include "engine/contest.h"

#include <algorithm>

namespace rematfn {

Contest::Contest(const std::vector<Followed>& plans) {
  for (const Followed& plan : plans) entrants_.push_back({plan});
}

Followed Contest::next() const {
  const std::lock_guard guard(mutex_);
  const auto open = std::ranges::find_if(entrants_, [&](const Entrant& e) { return is_open(e); });
  return open == entrants_.end() ? best().followed : open->followed;
}

void Contest::note(const Plan& plan, double seconds) {
  const std::lock_guard guard(mutex_);
  for (Entrant& entrant : entrants_) {
    if (entrant.followed.plan.get() != &plan || !is_open(entrant)) continue;
    const bool counts = entrant.calls != 0 && entrant.calls != kCalls;
    if (counts) entrant.least = std::min(entrant.least, seconds);
    ++entrant.calls;
    if (seconds == kNever) entrant = {entrant.followed, kCallsInAll, kNever};
  }
}

bool Contest::is_open(const Entrant& entrant) const {
  if (entrants_.size() == 1) return false;
  if (entrant.calls < kCalls) return true;
  const auto has_begun = [](const Entrant& e) { return e.calls >= kCalls; };
  if (!std::ranges::all_of(entrants_, has_begun)) return false;
  const auto is_close = [&](const Entrant& e) { return e.least <= kClose * best().least; };
  return entrant.calls < kCallsInAll && is_close(entrant) &&
         std::ranges::count_if(entrants_, is_close) > 1;
}

const Contest::Entrant& Contest::best() const {
  return *std::ranges::min_element(entrants_, {}, &Entrant::least);
}

}  // namespace rematfn
