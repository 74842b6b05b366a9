// SPDX-License-Identifier: Apache-2.0
//
// plan_changes.h: small changes of a plan, for local search.

#pragma once

#include <algorithm>
#include <array>
#include <cmath>
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
  explicit PlanChanges(const Trace& trace) {
    for (Trace::Id v = 0; v < trace.values.size(); ++v) {
      if (trace.values[v].counted && trace.values[v].nbytes > 0) counted_.push_back(v);
    }
  }

  // There is no value to say anything of.
  [[nodiscard]] bool is_empty() const { return counted_.empty(); }
  // A plan like `plan`, but for the score, or what moves, when, and at what price. `moved`: by value, what
  // went over the link; null where there is none.
  [[nodiscard]] Plan of(Plan plan, const std::vector<bool>* moved) {
    if (moved != nullptr && one_in(3)) {
      change_moves(plan, *moved);
    } else {
      change_score(plan);
    }
    return plan;
  }
  [[nodiscard]] bool one_in(std::size_t n) { return below(n) == 0; }

 private:
  // What may be exchanged for one another.
  static constexpr std::array kHorizons{Horizon::kAge, Horizon::kGeometric, Horizon::kHarmonic, Horizon::kNearer,
                                        Horizon::kNext};

  void change_score(Plan& plan) {
    plan.score.exponent = std::clamp(about(plan.score.exponent), 0.1, 4.0);
    plan.score.ancestors = std::clamp(about(plan.score.ancestors), 0.01, 10.0);
    if (one_in(4)) plan.score.unread = one_in(2) ? 1 : 4;
    if (one_in(4)) plan.score.horizon = kHorizons[below(kHorizons.size())];
  }

  void change_moves(Plan& plan, const std::vector<bool>& moved) {
    if (plan.prefers == Preference::kByValue) {
      if (one_in(2)) change_lead(plan);
      const auto values = some();
      const bool moves = !plan.moved[values.front()];
      for (const Trace::Id value : values) plan.moved[value] = moves;
      return;
    }
    if (one_in(2)) plan.link_price = std::exp2(4 * fraction() - 3);
    if (one_in(2)) change_lead(plan);
    if (one_in(2)) plan.moved = moved;
    if (one_in(8)) plan.moved.clear();
    if (one_in(8)) {
      plan.prefers = plan.prefers == Preference::kMoving ? Preference::kCheaper : Preference::kMoving;
    }
  }

  void change_lead(Plan& plan) {
    plan.lead = one_in(2) ? std::clamp(about(plan.lead), 0.25, 256.0) : std::exp2(8 * fraction());
  }

  // At most twice as much, at least half.
  [[nodiscard]] double about(double x) { return x * std::exp2(2 * fraction() - 1); }
  // One value, or a few made one after the other.
  [[nodiscard]] std::span<const Trace::Id> some() {
    const std::size_t first = below(counted_.size());
    const std::size_t length = one_in(2) ? 1 + below(8) : 1;
    return std::span(counted_).subspan(first, std::min(length, counted_.size() - first));
  }
  [[nodiscard]] std::size_t below(std::size_t n) { return random_() % n; }
  [[nodiscard]] double fraction() { return static_cast<double>(below(1024)) / 1024; }

  std::mt19937 random_{20};
  std::vector<Trace::Id> counted_;
};

}  // namespace rematfn
