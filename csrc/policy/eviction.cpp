// SPDX-License-Identifier: Apache-2.0
#include "policy/eviction.h"

#include <algorithm>
#include <cmath>

namespace rematfn {
namespace {

// See Note [Staleness is counted in program time]
double age_of(const Candidate& c, double now) { return now - c.last_access + kOperatorCost; }

double power(double base, double exponent) {
  return std::exp2(static_cast<float>(exponent) * std::log2(static_cast<float>(base)));
}

double time_of(const Score& s, const Candidate& c, const ScoreContext& context) {
  if (context.prices_pending && c.pending) return kOperatorCost;  // See Note [Near the floor], Rule 2
  const double age = age_of(c, context.now);
  if (s.horizon == Horizon::kAge) {
    // See Note [Near the floor], Rule 1
    return c.last_access > context.front ? age : context.front - c.last_access + kOperatorCost;
  }
  if (c.next_use == kUnknown) return age;
  const double next = std::max(c.next_use - context.record_now, 0.0) + kOperatorCost;
  switch (s.horizon) {
    case Horizon::kGeometric:
      return std::sqrt(age * next);
    case Horizon::kHarmonic:
      return age * next / (age + next);
    case Horizon::kNearer:
      return std::min(age, next);
    case Horizon::kNext:
      return std::sqrt(std::sqrt(age * next) * next);
    case Horizon::kAge:
      break;
  }
  return age;
}

}  // namespace

double score(const Score& s, const Candidate& c, const ScoreContext& context) {
  if (c.next_use == kNever) return -c.nbytes;  // no replay will be asked for
  // A value nobody has read yet is about to be: its consumer is usually the next operator.
  const bool priced = context.prices_pending && c.pending;
  const double fresh = c.consumed || priced ? 1.0 : s.unread;
  const double found = fresh * (c.cost + s.ancestors * c.ancestors) /
                       (c.nbytes * power(time_of(s, c, context), s.exponent));
  constexpr double kKept = 1e40;  // scores of values that matter lie within some twenty orders of magnitude
  return c.kept ? kKept * found : found;
}

Victims choose_victims(const Score& s, std::span<const Candidate> candidates,
                       const ScoreContext& context, bool spare_pending, std::size_t most,
                       Refresh refresh) {
  struct Scored {
    double score;
    std::size_t index;
    bool stale;
  };
  const auto comes_later = [](const Scored& a, const Scored& b) {
    return a.score != b.score ? a.score > b.score : a.index > b.index;
  };
  std::vector<Scored> heap;
  heap.reserve(candidates.size());
  for (std::size_t i = 0; i < candidates.size(); ++i) {
    const Candidate& c = candidates[i];
    if (c.pinned || c.refused || (spare_pending && c.pending)) continue;
    heap.push_back({score(s, c, context), i, c.stale});
  }
  std::make_heap(heap.begin(), heap.end(), comes_later);
  Victims victims;
  double highest = -kNever;
  while (!heap.empty()) {
    const Scored first = heap.front();
    if (!first.stale && victims.indices.size() == most) {
      victims.lowest_left = std::max(first.score, highest);  // a use may have gone unnoticed
      break;
    }
    std::pop_heap(heap.begin(), heap.end(), comes_later);
    if (first.stale) {
      refresh(first.index);
      heap.back() = {score(s, candidates[first.index], context), first.index, false};
      std::push_heap(heap.begin(), heap.end(), comes_later);
    } else {
      heap.pop_back();
      victims.indices.push_back(first.index);
      highest = std::max(highest, first.score);
    }
  }
  return victims;
}

}  // namespace rematfn
