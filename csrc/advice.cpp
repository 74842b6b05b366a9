// SPDX-License-Identifier: Apache-2.0
#include "advice.h"

#include <algorithm>
#include <chrono>
#include <memory>
#include <optional>

#include "errors.h"

namespace rematfn {
namespace {

class Trial {
 public:
  Trial(const Trace& trace, SimulationOptions options)
      : trace_(trace), options_(std::move(options)) {
    double cost = 0;
    for (const Trace::Call& call : trace.calls) cost += call.cost;
    // A budget in which the call takes longer than that is not one to ask for.
    const double operators = static_cast<double>(trace.calls.size()) + 1;
    options_.most_replayed_cost = cost * std::clamp(kMostReplays / operators, 2.0, 10.0);
  }

  [[nodiscard]] bool fits(std::size_t budget) {
    options_.budget = budget;
    try {
      return simulate(trace_, options_).replayed_cost <= options_.most_replayed_cost;
    } catch (const NoRoom&) {
      return false;
    }
  }
  [[nodiscard]] bool is_over() const { return std::chrono::steady_clock::now() > end_; }

 private:
  static constexpr double kMostReplays = 2e5;
  const Trace& trace_;
  SimulationOptions options_;
  const std::chrono::steady_clock::time_point end_ =
      std::chrono::steady_clock::now() + std::chrono::seconds(1);
};

}  // namespace

std::optional<std::size_t> enough_for(const Trace& trace, SimulationOptions options,
                                      std::size_t least) {
  constexpr std::size_t kMost = 64;  // times the least
  Trial trial(trace, std::move(options));
  std::size_t low = as_printed(least);
  if (trial.fits(low)) return low;
  std::optional<std::size_t> enough;
  for (std::size_t step = low / 32 + 1; !enough && low < kMost * least; step *= 2) {
    if (trial.is_over()) return std::nullopt;
    const std::size_t next = as_printed(low + step);
    (trial.fits(next) ? enough.emplace() : low) = next;
  }
  while (enough && !trial.is_over()) {
    const std::size_t middle = as_printed(low + (*enough - low) / 2);
    if (middle >= *enough || *enough - low <= least / 64) break;
    (trial.fits(middle) ? *enough : low) = middle;
  }
  return enough;
}

// See Note [The figure is tried out]
Advice advise(const NoRoom& why, const ObservedCall* refused, bool evict_everything) {
  const Table& table = *why.table;
  const Domain& domain = *table.domain;
  const Advice lower_bound{why.smallest_budget, Advice::Covers::kNothing};
  // A judge is Python's, and an inner level's budget is not the simulation's.
  if (&table != domain.root || table.judge) return lower_bound;
  const SimulationOptions options{.score = table.score,
                                  .keeping = table.keeping,
                                  .evict_everything = evict_everything};
  std::optional<std::size_t> enough;
  auto covers = Advice::Covers::kAll;
  if (domain.known && !domain.guide_lost) {
    enough = enough_for(*domain.known, options, why.smallest_budget);
  } else if (domain.recorder) {
    covers = Advice::Covers::kSoFar;
    enough = enough_for(domain.recorder->followed_by(refused), options, why.smallest_budget);
  }
  return enough ? Advice{*enough, covers} : lower_bound;
}

}  // namespace rematfn
