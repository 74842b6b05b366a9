// SPDX-License-Identifier: Apache-2.0
//
// random_plan.h: plans at random.

#pragma once

#include <cstdint>
#include <initializer_list>
#include <memory>
#include <optional>
#include <utility>

#include "planning/program.h"
#include "planning/search.h"
#include "random_program.h"

namespace rematfn {

// Begins a search for about so many plans.
inline void begin_search(Program& program, std::size_t budget, std::int64_t plans,
                         std::optional<LinkOptions> link = {}) {
  constexpr std::int64_t kOperators = 50;  // of a program, and replays
  const auto all = static_cast<std::uint64_t>(plans * kOperators);
  const SearchLimits limits{.in_vain = all, .in_all = all};
  program.begin(budget, [=](Search& search) { search.try_settings(limits, {}); }, link);
}

inline std::shared_ptr<Guide> guide_of(const std::shared_ptr<const Trace>& trace, Plan plan) {
  return std::make_shared<Guide>(Followed{trace, std::make_shared<const Future>(*trace),
                                          std::make_shared<const Plan>(std::move(plan))});
}

inline Score random_score(Dice& dice) {
  const auto among = [&](std::initializer_list<double> all) {
    return all.begin()[dice.below(all.size())];
  };
  Score score;
  score.ancestors = among({0, 0.5, 1});
  score.exponent = among({0.3, 0.6, 1.5});
  score.unread = among({1, 4});
  return score;
}

// A plan at random; of `trace`, or of a program that goes the same way up to some value.
struct RandomPlan {
  RandomPlan(Dice& dice, const Trace& trace) {
    auto foreseen = std::make_shared<Trace>(trace);
    Plan made;
    made.score = random_score(dice);
    made.score.horizon = static_cast<Horizon>(dice.below(5));
    for (std::size_t i = 0; i < trace.values.size(); ++i) {
      made.kept.push_back(dice.one_in(4));
    }
    if (dice.one_in(2)) made.kept.clear();
    for (std::size_t i = 0; i < trace.values.size(); ++i) made.moved.push_back(dice.one_in(3));
    if (dice.one_in(2)) made.moved.clear();
    made.prefers = static_cast<Preference>(dice.below(kPreferences));
    if (dice.one_in(3)) dice.among(foreseen->values).nbytes += 1;
    future = std::make_shared<const Future>(*foreseen);
    plan = std::make_shared<const Plan>(std::move(made));
    program = std::move(foreseen);
  }
  [[nodiscard]] std::shared_ptr<Guide> guide() const {
    return std::make_shared<Guide>(Followed{program, future, plan});
  }

  std::shared_ptr<const Trace> program;
  std::shared_ptr<const Future> future;
  std::shared_ptr<const Plan> plan;
};

}  // namespace rematfn
