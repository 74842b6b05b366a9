// SPDX-License-Identifier: Apache-2.0
#include "planning/program.h"

#include <mutex>
#include <utility>

#include "planning/search.h"
#include "planning/search_thread.h"

namespace rematfn {

Program::Program(std::shared_ptr<const Trace> recorded)
    : trace(std::move(recorded)), future_(std::make_shared<const Future>(*trace)) {}

GoOn while_it_pays(const SearchLimits& limits, std::shared_ptr<const Effort> effort) {
  return [limits, effort = std::move(effort), last_gain = std::uint64_t{0}, reached = kNever,
          plans = limits.plans](double replayed_cost) mutable {
    constexpr double kGain = 0.01;
    const std::uint64_t now = effort->operators;
    if (replayed_cost < (1 - kGain) * reached) {
      reached = replayed_cost;
      last_gain = now;
    }
    return now - last_gain < limits.in_vain && now < limits.in_all && plans-- != 0;
  };
}

bool Program::search(std::size_t budget, Strategy strategy, std::size_t segments,
                     const GoOn& go_on, Effort& effort, std::optional<Score> first) {
  {
    const std::lock_guard guard(plans_mutex());
    if (budget != budget_) {
      plan_.reset();
      searched_ = false;
    }
    budget_ = budget;
  }
  Search search(trace, future_, budget, go_on, effort, [&](const Plan& found) {
    auto plan = std::make_shared<const Plan>(found);
    const std::lock_guard guard(plans_mutex());
    const bool better = !plan_ || found.replayed_cost < plan_->replayed_cost;
    if (budget == budget_ && better) plan_.swap(plan);
  });
  try {
    switch (strategy) {
      case Strategy::kBest:
        search.run(first);
        break;
      case Strategy::kSegments:
        search.cut_into(segments);
        break;
      case Strategy::kCutPoints:
        search.cut_at_points();
        break;
    }
  } catch (const Stopped&) {
    return false;
  }
  return true;
}

void Program::note_searched(std::size_t budget) {
  const std::lock_guard guard(plans_mutex());
  searched_ = budget == budget_;
}

bool Program::has_searched(std::size_t budget) const {
  const std::lock_guard guard(plans_mutex());
  return searched_ && budget == budget_;
}

std::shared_ptr<Guide> Program::guide() const {
  const std::lock_guard guard(plans_mutex());
  if (!plan_) return nullptr;
  return std::make_shared<Guide>(trace, future_, plan_);
}

Plan Program::plan() const {
  const std::lock_guard guard(plans_mutex());
  return plan_ ? *plan_ : Plan();
}

}  // namespace rematfn
