// SPDX-License-Identifier: Apache-2.0
#include "engine/guide.h"

#include <algorithm>
#include <span>
#include <utility>

namespace rematfn {

Future::Future(const Trace& trace) : result_bytes(trace.result_bytes()), cost(trace.cost()), index(trace) {
  std::vector<double> start(trace.calls.size());
  ends_.resize(trace.calls.size());
  double clock = 0;
  for (const Trace::Event& event : trace.events) {
    if (event.what != Trace::What::kCall) continue;
    clock += trace.calls[event.index].pause;
    start[event.index] = clock;
    ends_[event.index] = clock += trace.calls[event.index].cost;
  }
  first_.resize(trace.calls.size() + 1);
  for (std::size_t i = 0; i < trace.calls.size(); ++i) {
    first_[i + 1] = first_[i] + trace.calls[i].reads.size() + trace.calls[i].makes.size();
  }
  next_.resize(first_.back());
  std::vector<double> next(trace.values.size(), kNever);
  for (std::size_t e = trace.events.size(); e-- > 0;) {
    const auto [what, index] = trace.events[e];
    const bool is_wanted = Trace::leaves(what) || what == Trace::What::kFilled ||
                           what == Trace::What::kAddressed || what == Trace::What::kRead;
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
      timings_(std::move(timings)),
      follows_schedule_(followed_.plan->schedule != nullptr) {
  if (follows_schedule_) operations_.resize(trace_.calls.size());
}

Guide::~Guide() {
  const bool is_whole = as_recorded_ && taken_.costs.size() == trace_.calls.size();
  if (timings_ && is_whole) timings_->add(std::move(taken_));
  note_way();
}

// See Note [A plan for calls that differ]
void Guide::note_way() const {
  const bool is_whole = next_call_ == trace_.calls.size();
  if (followed_.others_run_alike && !as_recorded_ && (is_whole || !same_way_)) {
    *followed_.others_run_alike = same_way_;
  }
}

void Guide::note_broken() {
  if (followed_.broken) (*followed_.broken)[index_of(plan().prefers)] = true;
}

// ---- a schedule ----------------------------------------------------------------------------------

bool Guide::has_replays_due() const {
  const Schedule* const followed = schedule();
  return followed != nullptr && due_ < followed->replays.end_of(next_call_);
}

Guide::Due Guide::take_due() {
  const Schedule& followed = *schedule();
  const std::size_t due = due_++;
  return {operations_[followed.replays.items()[due]], followed.spent_after_replay[due]};
}

void Guide::forget(const Operation& operation) {
  if (operation.call >= operations_.size()) return;
  Operation*& known = operations_[operation.call];
  if (known == &operation) known = nullptr;
}

// ---- the place in the record ---------------------------------------------------------------------

namespace {

// What overwrites tensors of the caller's makes nothing; a first call may have made those.
bool is_alike(const Trace::Call& call, const ObservedCall& seen) {
  return call.reads.size() == seen.reads.size() && call.makes.size() == seen.makes.size();
}

}  // namespace

std::size_t Guide::conflicts(const ObservedCall& seen, std::size_t call) const {
  if (!is_alike(trace_.calls[call], seen)) [[unlikely]] return kNowhere;
  std::size_t count = 0;
  for (std::size_t i = 0; i < seen.reads.size(); ++i) {
    const Trace::Id value = trace_.calls[call].reads[i].value;
    const Trace::Id known = seen.reads[i].version->value;
    const bool is_new = known == kNoValue && !trace_.values[value].counted;
    if (known != value && !is_new) [[unlikely]] ++count;
  }
  return count;
}

bool Guide::is_next(const ObservedCall& seen) const {
  return next_call_ < trace_.calls.size() &&
         CallIndex::is_same_kind(trace_.calls[next_call_].name, seen.name) &&
         conflicts(seen, next_call_) == 0;
}

// See Note [A guide finds its place again]
std::size_t Guide::look_for(const ObservedCall& seen) const {
  const CallIndex& index = future_.index;
  const std::uint64_t context = CallIndex::context_of(recent_);
  struct {
    std::size_t call = kNowhere;
    std::size_t conflicts = 0;
    std::size_t distance = 0;
  } best;
  const auto consider = [&](std::size_t call, bool reads_known) {
    if (!CallIndex::is_same_kind(trace_.calls[call].name, seen.name)) return;
    const std::size_t differing = conflicts(seen, call);
    const bool is_likely = index.context(call) == context || (differing == 0 && reads_known);
    // To go on is likelier than to go back.
    const std::size_t distance = call >= next_call_ ? call - next_call_ : 2 * (next_call_ - call);
    if (!is_likely) return;
    if (best.call == kNowhere || std::pair(differing, distance) < std::pair(best.conflicts, best.distance)) {
      best = {call, differing, distance};
    }
  };
  const auto consider_near = [&](std::span<const std::uint32_t> calls, bool reads_known) {
    constexpr std::ptrdiff_t kFew = 4;
    const auto here = std::ranges::lower_bound(calls, next_call_);
    const auto first = here - std::min(kFew, here - calls.begin());
    const auto last = here + std::min(kFew, calls.end() - here);
    for (auto at = first; at != last; ++at) consider(*at, reads_known);
  };
  for (const ObservedCall::Read& read : seen.reads) {
    if (read.version->value != kNoValue) consider_near(index.readers_of(read.version->value), true);
  }
  consider_near(index.after(context), false);
  return best.call;
}

void Guide::follow(const ObservedCall& seen) {
  const bool comes_next = is_next(seen);
  same_way_ &= comes_next;
  as_recorded_ &= comes_next;
  CallIndex::push(recent_, comes_next ? future_.index.kind(next_call_) : CallIndex::kind_of(seen.name));
  const std::size_t index = comes_next ? next_call_ : look_for(seen);
  note_found(index != kNowhere);
  if (index == kNowhere) [[unlikely]] {
    now_ = next_call_ == 0 ? 0 : future_.end_of(next_call_ - 1);
    for (const ObservedCall::Made& made : seen.makes) made.version->value = kNoValue;
    return;
  }
  note_place(index);
  const Trace::Call& call = trace_.calls[index];
  same_way_ &= call.name == seen.name;
  as_recorded_ &= same_way_;
  if (!is_alike(call, seen)) [[unlikely]] {
    for (const ObservedCall::Made& made : seen.makes) made.version->value = kNoValue;
    return;
  }
  const std::span<const double> next_uses = future_.next_uses(index);
  for (std::size_t i = 0; i < call.reads.size(); ++i) {
    advise(*seen.reads[i].version, call.reads[i].value, next_uses[i]);
  }
  for (std::size_t i = 0; i < call.makes.size(); ++i) {
    Version& version = *seen.makes[i].version;
    as_recorded_ &= version.nbytes == trace_.values[call.makes[i].value].nbytes;
    advise(version, call.makes[i].value, next_uses[call.reads.size() + i]);
    if (!version.producer || operations_.empty()) continue;
    operations_[index] = version.producer.get();
    version.producer->call = static_cast<std::uint32_t>(index);
  }
}

void Guide::note_place(std::size_t index) {
  next_call_ = index + 1;
  now_ = future_.end_of(index);
  ++found_;
  if (next_call_ > furthest_) [[likely]] {
    furthest_ = next_call_;
  } else {
    ++repeated_;
  }
  constexpr std::size_t kSome = 32;
  loops_ = repeated_ > kSome && (loops_ ? 8 : 4) * repeated_ > found_;
}

void Guide::note_found(bool found) {
  constexpr double kLately = 32;  // calls
  if (found && doubt_ == 0) [[likely]] return;
  doubt_ += ((found ? 0 : 1) - doubt_) / kLately;
  dormant_ = given_up_ || doubt_ > (dormant_ ? 0.25 : 0.5);
}

// See Note [A guided call keeps its record's time]
void Guide::note_taken(double observed, double overhead, double copying) {
  if (!timings_ || !as_recorded_) [[likely]] return;
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

double Guide::cost_of_next(double observed, std::size_t output_bytes) {
  if (next_call_ >= trace_.calls.size()) [[unlikely]] return observed;
  const Trace::Call& call = trace_.calls[next_call_];
  now_ += call.cost;
  return as_recorded_ && call.output_bytes == output_bytes ? call.cost : observed;
}

double Guide::pause_before_next() {
  if (next_call_ >= trace_.calls.size()) [[unlikely]] return 0;
  now_ += trace_.calls[next_call_].pause;
  return trace_.calls[next_call_].pause;
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
  if (!foresees()) [[unlikely]] return;
  version.next_use = next_use;
  may_know_useless_ |= next_use == kNever;
  // An inner level's policy decides for itself.
  const bool outermost = version.table && !version.table->enclosing;
  if (outermost && !plan().kept.empty()) version.kept = plan().kept[value] || version.marked;
  if (version.producer) {
    for (const Input& input : version.producer->inputs) {
      const Version& source = *input.version;
      // It is kept for those made from it, and there may be none any more.
      if (source.kept && source.is_candidate()) [[unlikely]] make_stale(source, /*lower=*/true);
    }
  }
  if (!version.is_candidate()) return;
  version.table->candidates[version.slot].kept = version.kept;
  make_stale(version, /*lower=*/true);
}

}  // namespace rematfn
