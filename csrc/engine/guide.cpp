// SPDX-License-Identifier: Apache-2.0
#include "engine/guide.h"

#include <algorithm>
#include <utility>

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

Guide::Guide(Followed followed, std::shared_ptr<Timings> timings)
    : followed_(std::move(followed)),
      trace_(*followed_.trace),
      future_(*followed_.future),
      timings_(std::move(timings)) {}

Guide::~Guide() {
  if (timings_ && taken_.costs.size() == trace_.calls.size()) timings_->add(std::move(taken_));
}

void Guide::note_broken() {
  if (followed_.broken) (*followed_.broken)[index_of(plan().prefers)] = true;
}

bool Guide::follow(const ObservedCall& seen) {
  const std::size_t index = next_call_++;
  if (index >= trace_.calls.size()) return false;
  const Trace::Call& call = trace_.calls[index];
  if (call.name != seen.name || call.reads.size() != seen.reads.size() ||
      call.makes.size() != seen.makes.size()) {
    return false;
  }
  for (std::size_t i = 0; i < call.reads.size(); ++i) {
    const Trace::Id value = call.reads[i].value;
    Version& version = *seen.reads[i].version;
    if (version.value == kNoValue && !trace_.values[value].counted) version.value = value;
    if (version.value != value) return false;
  }
  for (std::size_t i = 0; i < call.makes.size(); ++i) {
    if (seen.makes[i].version->nbytes != trace_.values[call.makes[i].value].nbytes) return false;
  }
  for (std::size_t i = 0; i < call.reads.size(); ++i) {
    advise(*seen.reads[i].version, call.reads[i].value, future_.after_read(index, i));
  }
  for (std::size_t i = 0; i < call.makes.size(); ++i) {
    advise(*seen.makes[i].version, call.makes[i].value, future_.after_made(index, i));
  }
  return true;
}

// See Note [A guided call keeps its record's time]
void Guide::note_taken(double observed, double overhead, double copying) {
  if (!timings_) return;
  const Clock::time_point now = Clock::now();
  double pause = 0;
  if (!taken_.costs.empty()) {
    const std::chrono::duration<double> since = now - ended_;
    pause = std::max(since.count() - observed - (overhead - overhead_), 0.0);
  }
  taken_.costs.push_back(observed);
  taken_.pauses.push_back(pause);
  taken_.copying = copying;
  ended_ = now;
  overhead_ = overhead;
}

double Guide::cost_of_next(double observed) const {
  return next_call_ < trace_.calls.size() ? trace_.calls[next_call_].cost : observed;
}

double Guide::pause_before_next() const {
  return next_call_ < trace_.calls.size() ? trace_.calls[next_call_].pause : 0;
}

Preference Guide::preference_for(const Version& version) const {
  if (plan().prefers != Preference::kByValue) return plan().prefers;
  const bool moves = version.value < plan().moved.size() && plan().moved[version.value];
  return moves ? Preference::kMoving : Preference::kDropping;
}

std::size_t Guide::bytes_ahead() const {
  constexpr std::size_t kFew = 8;
  std::size_t most = 0;
  for (std::size_t i = next_call_; i < std::min(next_call_ + kFew, trace_.calls.size()); ++i) {
    most = std::max(most, trace_.calls[i].output_bytes + trace_.calls[i].scratch_bytes);
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
