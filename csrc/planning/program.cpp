// SPDX-License-Identifier: Apache-2.0
#include "planning/program.h"

#include <algorithm>
#include <mutex>
#include <utility>

#include "planning/search_thread.h"

namespace rematfn {

Program::Program(std::shared_ptr<const Trace> recorded)
    : trace(std::move(recorded)),
      timed_(trace),
      future_(std::make_shared<const Future>(*trace)),
      others_run_alike_(std::make_shared<std::atomic<bool>>(false)) {}

Program::Program(const Program& other)
    : std::enable_shared_from_this<Program>(other),
      trace(other.trace),
      others_run_alike_(other.others_run_alike_) {
  const std::lock_guard guard(plans_mutex());
  timed_ = other.timed_;
  future_ = other.future_;
  timings_ = other.timings_;
}

void Program::begin(std::size_t budget, std::function<void(Search&)> what,
                    std::optional<LinkOptions> link) {
  constexpr double kAbout = 1.05;  // peaks that depend on data are never quite the same
  const std::lock_guard guard(plans_mutex());
  const auto most = static_cast<std::size_t>(kAbout * static_cast<double>(budget_));
  if (search_ && budget_ <= budget && budget <= most) return;
  budget_ = budget;
  link_ = link;
  what_ = std::move(what);
  followed_ = {};
  if (link && !timings_) timings_ = std::make_shared<Timings>(link->figures.clocked, link->figures.drag);
  begin_anew();
}

void Program::begin_anew() {
  search_ = std::make_shared<Search>(timed_, future_, budget_, link_);
  what_(*search_);
}

// See Note [No call waits for a search]
bool Program::waits_for_times() const {
  constexpr unsigned kTimedByThen = 8;
  return link_ && timed_ == trace && untimed_calls_ < kTimedByThen;
}

void Program::time_anew() {
  if (!waits_for_times()) return;
  ++untimed_calls_;
  std::shared_ptr<const Trace> timed = timings_->applied_to(*trace);
  if (!timed) return;
  followed_ = best();
  timed_ = std::move(timed);
  future_ = std::make_shared<const Future>(*timed_);
  begin_anew();
}

void Program::follow(bool alike) {
  {
    std::unique_lock lock(plans_mutex());
    if (!search_) return;
    if (alike) time_anew();
    const Until until = alike || *others_run_alike_ ? Until::kScheduled : Until::kFits;
    if (!followed_.plan) go_on(*std::shared_ptr(search_), until, lock);
    if (alike && waits_for_times()) return;
  }
  search_later(shared_from_this());
}

void Program::finish() {
  std::unique_lock lock(plans_mutex());
  if (search_) go_on(*std::shared_ptr(search_), Until::kOver, lock);
}

bool Program::is_settled() const {
  const std::lock_guard guard(plans_mutex());
  return search_ && search_->is_over() && !waits_for_times();
}

Followed Program::best() const {
  if (!search_) return followed_;
  std::shared_ptr<const Plan> plan = search_->best();
  if (!plan) return followed_;
  const bool has_older = followed_.plan && followed_.trace != timed_;
  const auto costs_less = [&] {  // by the times of each
    return plan->overhead / future_->cost < followed_.plan->overhead / followed_.future->cost;
  };
  if (has_older && !search_->is_over() && !costs_less()) return followed_;
  return {timed_,
          future_,
          std::move(plan),
          search_->general(),
          search_->scheduled(),
          search_->broken,
          others_run_alike_};
}

std::shared_ptr<Guide> Program::guide(bool alike) const {
  const std::lock_guard guard(plans_mutex());
  followed_ = best();
  if (!followed_.plan) return nullptr;
  Followed followed = followed_;
  if (alike) return std::make_shared<Guide>(std::move(followed), timings_);
  if (followed.general) followed.plan = followed.general;
  const bool costs_less = followed.scheduled && followed.scheduled->overhead < followed.plan->overhead;
  if (costs_less && *others_run_alike_) followed.plan = followed.scheduled;
  return std::make_shared<Guide>(std::move(followed), timings_);
}

double Program::elapsed() const {
  const std::lock_guard guard(plans_mutex());
  return timed_->elapsed();
}

bool Program::writes_outside() const {
  return std::ranges::any_of(trace->calls, [&](const Trace::Call& call) {
    return std::ranges::any_of(call.reads, [&](const Trace::Read& read) {
      return read.written && !trace->values[read.value].counted;
    });
  });
}

bool Program::note_same(const Program& other) {
  const bool same = trace->is_same_program(*other.trace);
  if (same) *others_run_alike_ = true;
  return same;
}

std::shared_ptr<const Plan> Program::start_for(const Trace& other) const {
  const std::lock_guard guard(plans_mutex());
  return search_ && trace->is_same_program(other) ? search_->scheduled() : nullptr;
}

std::size_t Program::budget() const {
  const std::lock_guard guard(plans_mutex());
  return budget_;
}

Plan Program::plan() const {
  const std::lock_guard guard(plans_mutex());
  const std::shared_ptr<const Plan> plan = best().plan;
  return plan ? *plan : Plan();
}

double Program::overhead() const {
  const std::lock_guard guard(plans_mutex());
  const std::shared_ptr<const Plan> plan = best().plan;
  return plan ? plan->overhead : kNever;
}

}  // namespace rematfn
