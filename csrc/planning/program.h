// SPDX-License-Identifier: Apache-2.0
//
// program.h: a recorded program, and the best plan for it that has been found.

#pragma once

#include <functional>
#include <memory>
#include <optional>

#include "engine/guide.h"
#include "planning/simulation.h"

namespace rematfn {

// Which plans are tried out. The best of them is taken: the one that replays least.
enum class Strategy : std::uint8_t {
  kBest,       // a portfolio of scores, products, segments; then local search
  kSegments,   // segments.h: as many as asked for; 0: numbers of them
  kCutPoints,  // segments.h: every cut point, every second one, ...
};

// Whether to try another plan, told what the best one so far replays.
using GoOn = std::function<bool(double replayed_cost)>;

// How much a search may do. It is counted in operators simulated, replays among them, and not in
// seconds: so it finds the same on every machine.
struct SearchLimits {
  std::uint64_t in_vain = 0;  // without coming to a plan that replays a hundredth less
  std::uint64_t in_all = 0;
  std::int64_t plans = -1;  // if not negative: so many plans
};
// `effort` is that of the search.
[[nodiscard]] GoOn while_it_pays(const SearchLimits& limits,
                                 std::shared_ptr<const Effort> effort);

// A program that was recorded, and the best plan for it so far. Any thread.
class Program {
 public:
  explicit Program(std::shared_ptr<const Trace> trace);

  // Looks for a better plan for `budget`, with kBest while `go_on` says so and at least until one is
  // found that fits; with the settings of `first`, if given, before all others. False if it was
  // stopped. A plan for another budget is forgotten.
  bool search(std::size_t budget, Strategy strategy, std::size_t segments, const GoOn& go_on,
              Effort& effort, std::optional<Score> first = {});
  // A search for this budget has come to its end.
  void note_searched(std::size_t budget);
  [[nodiscard]] bool has_searched(std::size_t budget) const;
  // Who guides the next run, or null if no plan fits.
  [[nodiscard]] std::shared_ptr<Guide> guide() const;
  [[nodiscard]] Plan plan() const;

  const std::shared_ptr<const Trace> trace;

 private:
  const std::shared_ptr<const Future> future_;
  // Under plans_mutex().
  std::shared_ptr<const Plan> plan_;
  std::size_t budget_ = 0;
  bool searched_ = false;
};

}  // namespace rematfn
