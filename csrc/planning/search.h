// SPDX-License-Identifier: Apache-2.0
//
// search.h: tries plans out in the simulator.

#pragma once

#include <functional>
#include <memory>
#include <optional>

#include "planning/program.h"

namespace rematfn {

// For one trace in one budget. Goes on while `go_on` says so, and until some plan fits; tells `found`
// of each plan that replays less than those before.
class Search {
 public:
  Search(std::shared_ptr<const Trace> trace, std::shared_ptr<const Future> future,
         std::size_t budget, GoOn go_on, Effort& effort, std::function<void(const Plan&)> found);

  // The settings that there are, those of `first` before all others; then local search. Each of the
  // three throws Stopped.
  void run(std::optional<Score> first);
  // Segments alone, as many as asked for; zero: the best number.
  void cut_into(std::size_t count);
  void cut_at_points();

 private:
  // Where replays run away all the same, when to price pending readers is tried out as well. False if
  // time is up. See Note [Pending readers have a price].
  bool try_patience();
  [[nodiscard]] bool goes_on() const { return go_on_(best_.replayed_cost); }
  // Simulates the plan; keeps it if it is the best so far, or, if asked to, as good.
  void consider(Plan plan, bool or_as_good = false);
  void improve();

  const std::shared_ptr<const Trace> trace_;
  const std::shared_ptr<const Future> future_;
  const std::size_t budget_;
  const GoOn go_on_;
  Effort& effort_;
  const std::function<void(const Plan&)> found_;
  Plan best_;
};

}  // namespace rematfn
