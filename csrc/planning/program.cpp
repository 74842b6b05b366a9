// SPDX-License-Identifier: Apache-2.0
#include "planning/program.h"

#include <mutex>
#include <numeric>
#include <utility>

#include "planning/search_thread.h"

namespace rematfn {

Program::Program(std::shared_ptr<const Trace> recorded)
    : trace(std::move(recorded)), future_(std::make_shared<const Future>(*trace)) {}

template <class Try>
void Program::begin(std::size_t budget, const Try& what) {
  {
    const std::lock_guard guard(plans_mutex());
    if (search_ && budget == budget_) return;
  }
  auto search = std::make_shared<Search>(trace, future_, budget);
  what(*search);
  std::shared_ptr<const Plan> old;
  const std::lock_guard guard(plans_mutex());
  if (search_ && budget == budget_) return;  // another thread was first
  search_.swap(search);
  plan_.swap(old);
  budget_ = budget;
}

void Program::search(std::size_t budget, const SearchLimits& limits, std::optional<Score> first) {
  begin(budget, [&](Search& search) { search.try_settings(limits, first); });
}

void Program::cut_into(std::size_t budget, std::size_t segments) {
  begin(budget, [&](Search& search) { search.try_segments(segments); });
}

void Program::cut_at_points(std::size_t budget) {
  begin(budget, [](Search& search) { search.try_cut_points(); });
}

std::uint64_t Program::follow(std::uint64_t share) {
  std::unique_lock lock(plans_mutex());
  const std::shared_ptr<Search> search = search_;
  if (!search) return 0;
  go_on(*search, share, lock);
  if (search == search_) plan_ = search->best_within(share);
  return search->simulated();
}

std::shared_ptr<Guide> Program::guide() const {
  const std::lock_guard guard(plans_mutex());
  if (!plan_) return nullptr;
  return std::make_shared<Guide>(trace, future_, plan_);
}

double Program::cost() const {
  return std::accumulate(trace->calls.begin(), trace->calls.end(), 0.0,
                         [](double sum, const Trace::Call& call) { return sum + call.cost; });
}

Plan Program::plan() const {
  const std::lock_guard guard(plans_mutex());
  return plan_ ? *plan_ : Plan();
}

}  // namespace rematfn
