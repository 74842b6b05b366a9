// SPDX-License-Identifier: Apache-2.0
#include "planning/program.h"

#include <algorithm>
#include <mutex>
#include <utility>

#include "planning/search_thread.h"

namespace rematfn {

Program::Program(std::shared_ptr<const Trace> recorded, bool is_timed_anew)
    : trace(std::move(recorded)),
      is_timed_anew_(is_timed_anew),
      future_(std::make_shared<const Future>(*trace)) {}

template <class Try>
void Program::begin(std::size_t budget, std::optional<LinkOptions> link, const Try& what) {
  {
    const std::lock_guard guard(plans_mutex());
    if (search_ && budget == budget_) return;
  }
  auto search = std::make_shared<Search>(trace, future_, budget, link);
  what(*search);
  Followed old;
  const std::lock_guard guard(plans_mutex());
  if (search_ && budget == budget_) return;  // another thread was first
  search_.swap(search);
  std::swap(followed_, old);
  contest_.reset();
  budget_ = budget;
  if (link && !timings_) timings_ = std::make_shared<Timings>(link->clocked, link->figures.drag);
}

void Program::search(std::size_t budget, const SearchLimits& limits, std::optional<Score> first,
                     std::optional<LinkOptions> link, std::optional<Policy> online) {
  begin(budget, link, [&](Search& search) { search.try_settings(limits, first, online); });
}

void Program::cut_into(std::size_t budget, std::size_t segments) {
  begin(budget, {}, [&](Search& search) { search.try_segments(segments); });
}

void Program::cut_at_points(std::size_t budget) {
  begin(budget, {}, [](Search& search) { search.try_cut_points(); });
}

std::uint64_t Program::follow(std::uint64_t share) {
  std::unique_lock lock(plans_mutex());
  const std::shared_ptr<Search> search = search_;
  if (!search) return 0;
  go_on(*search, share, lock);
  if (search == search_ && !contest_) {
    auto best = search->best_within(share);
    if (best != followed_.plan) followed_ = newly(std::move(best));
    if (is_timed_anew_ && share >= search->simulated()) {
      std::vector<Followed> plans;
      auto found = search->contestants();
      for (auto& plan : found.plans) plans.push_back(newly(std::move(plan)));
      if (!plans.empty()) contest_ = std::make_shared<Contest>(plans, found.racing, found.substitutes);
    }
  }
  return search->simulated();
}

bool Program::is_searched(std::uint64_t share) const {
  const std::lock_guard guard(plans_mutex());
  return !search_ || (search_->is_over() && share >= search_->simulated());
}

bool Program::is_settled(std::uint64_t share) const {
  if (!is_searched(share)) return false;
  const std::lock_guard guard(plans_mutex());
  return !contest_ || contest_->is_decided();
}

Followed Program::next_plan() const { return contest_ ? contest_->next() : followed_; }

Followed Program::newly(std::shared_ptr<const Plan> plan) const {
  return {std::move(plan), timings_ ? std::make_shared<Leads>(trace->values.size()) : nullptr};
}

std::shared_ptr<Guide> Program::guide() const {
  const std::lock_guard guard(plans_mutex());
  if (!followed_.plan) return nullptr;
  return std::make_shared<Guide>(trace, future_, next_plan(), timings_, contest_);
}

std::shared_ptr<Program> Program::timed_anew() const {
  std::shared_ptr<const Timings> timings;
  {
    const std::lock_guard guard(plans_mutex());
    timings = timings_;
  }
  if (!timings) return nullptr;
  std::shared_ptr<const Trace> timed = timings->applied_to(*trace);
  return timed ? std::make_shared<Program>(std::move(timed), /*is_timed_anew=*/true) : nullptr;
}

double Program::cost() const { return trace->cost(); }
double Program::elapsed() const { return trace->elapsed(); }

bool Program::writes_outside() const {
  return std::ranges::any_of(trace->calls, [&](const Trace::Call& call) {
    return std::ranges::any_of(call.reads, [&](const Trace::Read& read) {
      return read.written && !trace->values[read.value].counted;
    });
  });
}

Plan Program::plan() const {
  const std::lock_guard guard(plans_mutex());
  const std::shared_ptr<const Plan> plan = next_plan().plan;
  return plan ? *plan : Plan();
}

}  // namespace rematfn
