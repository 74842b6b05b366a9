// SPDX-License-Identifier: Apache-2.0
#include "engine/guide.h"

#include <algorithm>
#include <mutex>
#include <numeric>
#include <utility>

#include "engine/domain.h"

namespace rematfn {

Future::Future(const Trace& trace) : result_bytes(trace.result_bytes()), cost(trace.cost()) {
  std::vector<double> start(trace.calls.size());
  double clock = 0;
  for (const Trace::Event& event : trace.events) {
    if (event.what != Trace::What::kCall) continue;
    clock += trace.calls[event.index].pause;
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
    const bool is_wanted = what == Trace::What::kSeal || what == Trace::What::kFilled ||
                           what == Trace::What::kAddressed;
    if (is_wanted) next[index] = clock;
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
             Followed plan, std::shared_ptr<Timings> timings, std::shared_ptr<Contest> contest)
    : trace_(std::move(trace)),
      future_(std::move(future)),
      followed_(std::move(plan)),
      timings_(std::move(timings)),
      contest_(std::move(contest)) {
  if (timings_ && leads() != nullptr) began_with_ = leads()->factors();
}

Guide::~Guide() {
  if (!timings_) return;
  const bool is_whole = taken_.costs.size() == trace_->calls.size();
  const std::chrono::duration<double> taken = ended_ - began_;
  if (contest_ && is_broken_) {
    contest_->note_broken(plan());
  } else if (contest_) {
    contest_->note(plan(), is_whole ? taken.count() : kNever);
  }
  if (is_whole && leads() != nullptr) leads()->note_call(std::move(began_with_), overhead_, future_->cost);
  if (is_whole) timings_->add(std::move(taken_));
}

double Leads::of(Trace::Id value) const {
  return value < values_.size() ? values_[value].factor.load(std::memory_order_relaxed) : 1;
}

void Leads::note_late(Trace::Id value) {
  change(value, 1.5F);
  if (value < values_.size()) values_[value].was_late = true;
}

// To lie there costs nothing; to shrink until it is late once more would.
void Leads::note_early(Trace::Id value) {
  if (value < values_.size() && !values_[value].was_late) change(value, 0.9F);
}

void Leads::note_turned_back(Trace::Id value) {
  change(value, 0.9F);
  if (value < values_.size()) values_[value].was_late = false;
}

Leads::Factors Leads::factors() const {
  Factors found(values_.size());
  for (Trace::Id value = 0; value < found.size(); ++value) found[value] = static_cast<float>(of(value));
  return found;
}

// See Note [Leads are put to the test]
void Leads::note_call(Factors began_with, double spent, double program) {
  constexpr double kClearly = 1.5;
  constexpr double kOfProgram = 0.01;
  constexpr double kForgets = 0.1;
  const std::lock_guard guard(feedback_mutex());
  if (spent <= least_spent_) {
    least_spent_ = spent;
    best_ = std::move(began_with);
  } else if (spent > kClearly * least_spent_ + kOfProgram * program) {
    least_spent_ += kForgets * (spent - least_spent_);
    for (std::size_t i = 0; i < best_.size(); ++i) values_[i].factor = best_[i];
  }
}

// Calls on several threads may lose each other's change.
void Leads::change(Trace::Id value, float by) {
  constexpr float kMost = 64;
  if (value >= values_.size()) return;
  const float changed = static_cast<float>(of(value)) * by;
  values_[value].factor.store(std::clamp(changed, 1 / kMost, kMost), std::memory_order_relaxed);
}

namespace {

double sum(const std::vector<double>& seconds) {
  return std::accumulate(seconds.begin(), seconds.end(), 0.0);
}

double median(std::vector<double> seconds) {
  const auto middle = seconds.begin() + static_cast<std::ptrdiff_t>(seconds.size() / 2);
  std::ranges::nth_element(seconds, middle);
  return *middle;
}

// Operator by operator; together they come to what a call takes. They are lengthened for that: what
// disturbs one call here and another there is in the middle nowhere, and in the time of each.
std::vector<double> medians(const std::vector<Times>& calls, std::vector<double> Times::* what) {
  std::vector<double> found(calls.size());
  const auto median_of = [&](const auto& of_a_call) {
    std::ranges::transform(calls, found.begin(), of_a_call);
    return median(found);
  };
  const double total = median_of([&](const Times& call) { return sum(call.*what); });
  std::vector<double> all;
  for (std::size_t i = 0; i < (calls.front().*what).size(); ++i) {
    all.push_back(median_of([&](const Times& call) { return (call.*what)[i]; }));
  }
  const double apart = sum(all);
  if (apart > 0) {
    for (double& each : all) each *= total / apart;
  }
  return all;
}

}  // namespace

void Timings::add(Times times) {
  constexpr double kAlike = 1.25;
  const double total = sum(times.costs);
  const std::lock_guard guard(feedback_mutex());
  if (calls_.size() == kEnough) return;
  std::erase_if(calls_, [&](const Times& call) { return sum(call.costs) > kAlike * total; });
  for (const Times& call : calls_) {
    if (total > kAlike * sum(call.costs)) return;
  }
  calls_.push_back(std::move(times));
}

std::shared_ptr<const Trace> Timings::applied_to(const Trace& trace) const {
  std::vector<Times> calls;
  {
    const std::lock_guard guard(feedback_mutex());
    if (calls_.size() < kEnough) return nullptr;
    calls = calls_;
  }
  const std::vector<double> costs = medians(calls, &Times::costs);
  const std::vector<double> pauses = medians(calls, &Times::pauses);
  auto timed = std::make_shared<Trace>(trace);
  for (std::size_t i = 0; i < costs.size(); ++i) {
    timed->calls[i].cost = costs[i];
    timed->calls[i].pause = clocked_ ? pauses[i] : 0;
  }
  return timed;
}

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

// See Note [A guided call keeps its record's time]
void Guide::note_taken(double observed, double overhead) {
  if (!timings_) return;
  const Clock::time_point now = Clock::now();
  double pause = 0;
  if (taken_.costs.empty()) {
    began_ = now;
  } else {
    const std::chrono::duration<double> since = now - ended_;
    pause = std::max(since.count() - observed - (overhead - overhead_), 0.0);
  }
  taken_.costs.push_back(observed);
  taken_.pauses.push_back(pause);
  ended_ = now;
  overhead_ = overhead;
}

double Guide::cost_of_next(double observed) const {
  return next_call_ < trace_->calls.size() ? trace_->calls[next_call_].cost : observed;
}

double Guide::pause_before_next() {
  if (next_call_ < first_not_begun_ || next_call_ >= trace_->calls.size()) return 0;
  first_not_begun_ = next_call_ + 1;
  return trace_->calls[next_call_].pause;
}

Preference Guide::preference_for(const Version& version) const {
  if (plan().prefers != Preference::kByValue) return plan().prefers;
  const bool moves = version.value < plan().moved.size() && plan().moved[version.value];
  return moves ? Preference::kMoving : Preference::kDropping;
}

std::size_t Guide::bytes_ahead() const {
  constexpr std::size_t kFew = 8;
  std::size_t most = 0;
  for (std::size_t i = next_call_; i < std::min(next_call_ + kFew, trace_->calls.size()); ++i) {
    most = std::max(most, trace_->calls[i].output_bytes + trace_->calls[i].scratch_bytes);
  }
  return most;
}

void Guide::advise(Version& version, Trace::Id value, double next_use) {
  version.value = value;
  if (!foresees()) return;
  version.next_use = next_use;
  may_know_useless_ |= next_use == kNever;
  if (!plan().weights.empty()) version.weight = plan().weights[value];
  // An inner level's policy decides for itself.
  const bool outermost = version.table && !version.table->enclosing;
  if (outermost && !plan().kept.empty()) version.kept = plan().kept[value] || version.marked;
  if (version.producer) {
    for (const Input& input : version.producer->inputs) {
      const Version& source = *input.version;
      // It is kept for those made from it, and there may be none any more.
      if (source.kept && source.is_candidate()) make_stale(source, /*lower=*/true);
    }
  }
  if (!version.is_candidate()) return;
  Candidate& candidate = version.table->candidates[version.slot];
  candidate.weight = weight_of(version);
  make_stale(version, /*lower=*/true);
}

}  // namespace rematfn
