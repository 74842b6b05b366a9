// SPDX-License-Identifier: Apache-2.0
#include "eviction.h"

#include <cmath>
#include <limits>

namespace rematfn {
namespace {

// See Note [Staleness is counted in program time]
double age_of(const Candidate& c, double now) { return now - c.last_access + kOperatorCost; }

}  // namespace

double score(Score kind, const Candidate& c, double now) {
  const double age = age_of(c, now);
  switch (kind) {
    case Score::kOn: {
      // A value nobody has read yet is about to be: its consumer is usually the next operator.
      const double fresh = c.consumed ? 1.0 : 4.0;
      const auto decay = std::exp2(0.6F * std::log2(static_cast<float>(age)));
      return fresh * (c.cost + 0.5 * c.neighbours) / (c.nbytes * static_cast<double>(decay));
    }
    case Score::kDtr:
    case Score::kEq:
      return (c.cost + c.neighbours) / (c.nbytes * age);
    case Score::kLocal:
      return c.cost / (c.nbytes * age);
    case Score::kLru:
      return -age;
    case Score::kLargest:
      return -c.nbytes;
  }
  return 0;
}

std::size_t choose_victim(Score kind, std::span<const Candidate> candidates, double now,
                          bool spare_pending) {
  std::size_t victim = kNoVictim;
  double lowest = std::numeric_limits<double>::infinity();
  for (std::size_t i = 0; i < candidates.size(); ++i) {
    const Candidate& c = candidates[i];
    if (c.pinned || c.refused || (spare_pending && c.pending)) continue;
    const double s = score(kind, c, now);
    if (s < lowest) {
      lowest = s;
      victim = i;
    }
  }
  return victim;
}

}  // namespace rematfn
