// SPDX-License-Identifier: Apache-2.0
//
// program.h: a recorded program, and the best plan for it that has been found.

#pragma once

#include <memory>
#include <optional>

#include "engine/guide.h"
#include "planning/search.h"

namespace rematfn {

// A program that was recorded, and a plan for it. Any thread.
class Program {
 public:
  // `is_timed_anew`: the costs in the trace are those that guided calls have shown.
  explicit Program(std::shared_ptr<const Trace> trace, bool is_timed_anew = false);

  // Each begins a search for a plan for `budget`, unless one has begun. What was found for another
  // budget is forgotten. See Search.
  // Over `link`, values may be moved. `online`: the policy of calls that nothing is known of.
  void search(std::size_t budget, const SearchLimits& limits, std::optional<Score> first = {},
              std::optional<LinkOptions> link = {}, std::optional<Policy> online = {});
  void cut_into(std::size_t budget, std::size_t segments);
  void cut_at_points(std::size_t budget);
  // The same program, by the times that guided calls have taken since; null if those are too few.
  [[nodiscard]] std::shared_ptr<Program> timed_anew() const;
  // From here on the plan is the best of those that the search finds within its first `share`
  // operators, or, however long that takes, the first that fits. Simulates what nobody has yet.
  // Returns how many operators the search has simulated. See Note [A search is a sequence].
  std::uint64_t follow(std::uint64_t share);
  // Whether the search that has begun comes to its end within that share.
  [[nodiscard]] bool is_searched(std::uint64_t share) const;
  // And whether the clock has decided, where it is to.
  [[nodiscard]] bool is_settled(std::uint64_t share) const;

  // Who guides the next run, or null if no plan fits.
  [[nodiscard]] std::shared_ptr<Guide> guide() const;
  [[nodiscard]] Plan plan() const;
  // Of the program itself, in seconds: its operators; and those with what lies between them, where that is
  // known.
  [[nodiscard]] double cost() const;
  [[nodiscard]] double elapsed() const;
  // Whether it overwrites what it has not made.
  [[nodiscard]] bool writes_outside() const;
  // The search that has begun, or null. Under plans_mutex().
  [[nodiscard]] const std::shared_ptr<Search>& begun() const { return search_; }

  const std::shared_ptr<const Trace> trace;

 private:
  template <class Try>
  void begin(std::size_t budget, std::optional<LinkOptions> link, const Try& what);

  // Which the next call is to follow. Under plans_mutex().
  [[nodiscard]] Followed next_plan() const;
  [[nodiscard]] Followed newly(std::shared_ptr<const Plan> plan) const;

  const bool is_timed_anew_;
  const std::shared_ptr<const Future> future_;
  // Under plans_mutex().
  std::shared_ptr<Timings> timings_;  // where values may be moved
  std::shared_ptr<Search> search_;
  Followed followed_;
  std::shared_ptr<Contest> contest_;  // decides in its place, once the search is over; or null
  std::size_t budget_ = 0;
};

}  // namespace rematfn
