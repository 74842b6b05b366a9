// SPDX-License-Identifier: Apache-2.0
#include "plan.h"

#include <mutex>
#include <utility>

#include "domain.h"
#include "search.h"
#include "search_thread.h"

namespace rematfn {

Future::Future(const Trace& trace) {
  std::vector<double> start(trace.calls.size());
  double clock = 0;
  for (const Trace::Event& event : trace.events) {
    if (event.what != Trace::What::kCall) continue;
    start[event.index] = clock;
    clock += trace.calls[event.index].cost;
  }
  first_.resize(trace.calls.size() + 1);
  made_.resize(trace.calls.size());
  for (std::size_t i = 0; i < trace.calls.size(); ++i) {
    made_[i] = trace.calls[i].makes.size();
    first_[i + 1] = first_[i] + trace.calls[i].reads.size() + made_[i];
  }
  next_.resize(first_.back());
  std::vector<double> next(trace.values.size(), kNever);
  for (std::size_t e = trace.events.size(); e-- > 0;) {
    const auto [what, index] = trace.events[e];
    if (what == Trace::What::kSeal) next[index] = clock;
    if (what != Trace::What::kCall) continue;
    const Trace::Call& call = trace.calls[index];
    clock = start[index];
    std::size_t entry = first_[index];
    for (const Trace::Read& read : call.reads) next_[entry++] = next[read.value];
    for (const Trace::Made& made : call.makes) next_[entry++] = next[made.value];
    for (const Trace::Read& read : call.reads) next[read.value] = clock;
  }
}

Guide::Guide(std::shared_ptr<const Trace> trace, std::shared_ptr<const Future> future,
             std::shared_ptr<const Plan> plan)
    : trace_(std::move(trace)), future_(std::move(future)), plan_(std::move(plan)) {}

bool Guide::follow(const ObservedCall& seen) {
  const std::size_t index = next_call_++;
  if (index >= trace_->calls.size()) return false;
  const Trace::Call& call = trace_->calls[index];
  if (call.name != seen.name || call.reads.size() != seen.reads.size() ||
      call.makes.size() != seen.makes.size()) {
    return false;
  }
  for (std::size_t i = 0; i < call.reads.size(); ++i) {
    const Trace::Id value = call.reads[i].value;
    Version& version = *seen.reads[i].version;
    if (version.value == kNoValue && !trace_->values[value].counted) version.value = value;
    if (version.value != value) return false;
  }
  for (std::size_t i = 0; i < call.makes.size(); ++i) {
    if (seen.makes[i].version->nbytes != trace_->values[call.makes[i].value].nbytes) return false;
  }
  for (std::size_t i = 0; i < call.reads.size(); ++i) {
    advise(*seen.reads[i].version, call.reads[i].value, future_->after_read(index, i));
  }
  for (std::size_t i = 0; i < call.makes.size(); ++i) {
    advise(*seen.makes[i].version, call.makes[i].value, future_->after_made(index, i));
  }
  return true;
}

void Guide::advise(Version& version, Trace::Id value, double next_use) const {
  version.value = value;
  version.next_use = next_use;
  if (!plan_->weights.empty()) version.weight = plan_->weights[value];
  // An inner level's policy decides for itself.
  const bool outermost = version.table && !version.table->enclosing;
  if (outermost && !plan_->kept.empty()) version.kept = plan_->kept[value];
  if (version.producer) {
    for (const Input& input : version.producer->inputs) {
      const Version& source = *input.version;
      // It is kept for those made from it, and there may be none any more.
      if (source.kept && source.slot != kNoSlot) mark_stale(source, /*lower=*/true);
    }
  }
  if (version.slot == kNoSlot) return;
  Candidate& candidate = version.table->candidates[version.slot];
  candidate.weight = weight_of(version);
  mark_stale(version, /*lower=*/true);
}

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
