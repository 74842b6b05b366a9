// SPDX-License-Identifier: Apache-2.0
//
// plan_changes.h: small changes of a plan, for local search.

#pragma once

#include <cstddef>
#include <random>
#include <span>
#include <vector>

#include "engine/guide.h"
#include "engine/trace.h"

namespace rematfn {

// Drawn at random, and the same for all.
class PlanChanges {
 public:
  explicit PlanChanges(const Trace& trace);

  // There is no value to say anything of.
  [[nodiscard]] bool is_empty() const { return counted_.empty(); }
  // A plan like `plan`, but for the score, or what moves, when, and at what price. `moved`: by value, what
  // went over the link; null where there is none.
  [[nodiscard]] Plan of(Plan plan, const std::vector<bool>* moved);
  [[nodiscard]] bool one_in(std::size_t n) { return below(n) == 0; }

 private:
  void change_score(Plan& plan);
  void change_moves(Plan& plan, const std::vector<bool>& moved);
  void change_lead(Plan& plan);
  [[nodiscard]] double about(double x);
  // One value, or a few made one after the other.
  [[nodiscard]] std::span<const Trace::Id> some();
  [[nodiscard]] std::size_t below(std::size_t n) { return random_() % n; }
  [[nodiscard]] double fraction() { return static_cast<double>(below(1024)) / 1024; }

  std::mt19937 random_{20};
  std::vector<Trace::Id> counted_;
};

}  // namespace rematfn
