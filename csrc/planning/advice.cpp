// SPDX-License-Identifier: Apache-2.0
#include "planning/advice.h"

#include <algorithm>
#include <optional>

namespace rematfn {
namespace {

// See Note [What a forward holds, a backward reads]
class Mirror {
 public:
  explicit Mirror(Trace trace)
      : trace_(std::move(trace)),
        held_(trace_.values.size()),
        gradients_(trace_.values.size(), kNoValue) {
    std::vector<bool> in_flight(trace_.values.size());
    for (const Trace::Event& event : trace_.events) {
      if (event.what == Trace::What::kCall) note_call(trace_.calls[event.index], in_flight);
      if (event.what == Trace::What::kRelease || Trace::leaves(event.what)) {
        held_[event.index] = in_flight[event.index] = false;
      }
    }
    for (Trace::Id id = 0; id < in_flight.size(); ++id) {
      if (in_flight[id]) in_flight_.push_back(id);
    }
  }

  // The record and its image, or none if no backward is to be expected.
  [[nodiscard]] std::optional<Trace> reflect() {
    const bool has_turned = std::ranges::any_of(trace_.calls, &Trace::Call::backward);
    const bool holds = std::ranges::find(held_, true) != held_.end();
    if ((has_turned && !trace_.calls.back().backward) || !holds) return std::nullopt;
    if (has_turned) add_slack();
    for (std::size_t i = trace_.calls.size(); i-- > 0;) {
      if (!trace_.calls[i].backward) add_image_of(i);
    }
    return std::move(trace_);
  }

 private:
  void note_call(const Trace::Call& call, std::vector<bool>& in_flight) {
    for (const Trace::Read& read : call.reads) {
      held_[read.value] = trace_.values[read.value].counted;
    }
    for (const Trace::Made& made : call.makes) {
      if (made.over >= 0) {
        const Trace::Id before = call.reads[made.over].value;
        held_[before] = in_flight[before] = false;
      }
      in_flight[made.value] = call.backward;
    }
  }

  // Which gradients are on their way is a guess: it may be one more.
  void add_slack() {
    std::size_t largest = 0;
    for (Trace::Id id = 0; id < held_.size(); ++id) {
      if (held_[id]) largest = std::max(largest, trace_.values[id].nbytes);
    }
    trace_.add_unrecorded((trace_.unrecorded.empty() ? 0 : trace_.unrecorded.back()) + largest);
  }

  // The gradient of `value` that the backward has made so far, as far as can be told: the last of its
  // size.
  [[nodiscard]] Trace::Id take_from_flight(Trace::Id value) {
    const auto found = std::find_if(in_flight_.rbegin(), in_flight_.rend(), [&](Trace::Id id) {
      return trace_.values[id].nbytes == trace_.values[value].nbytes;
    });
    if (found == in_flight_.rend()) return kNoValue;
    const Trace::Id id = *found;
    in_flight_.erase(std::next(found).base());
    return id;
  }

  void add_image_of(std::size_t index) {
    const Trace::Call call = trace_.calls[index];
    Trace::Call image(call.name, call);
    image.replayable = image.backward = true;
    image.raw = false;
    std::vector<Trace::Id> inputs;  // each once
    for (const Trace::Read& read : call.reads) {
      const bool again = std::ranges::find(inputs, read.value) != inputs.end();
      if (trace_.values[read.value].counted && !again) inputs.push_back(read.value);
    }
    const bool reads_any = std::ranges::any_of(inputs, [&](Trace::Id input) { return held_[input]; });
    std::vector<Trace::Id> done;  // read here for the last time
    const auto take = [&](Trace::Id value) {
      image.reads.push_back({value});
      done.push_back(value);
    };
    for (const Trace::Made& made : call.makes) {
      Trace::Id& gradient = gradients_[made.value];
      if (gradient == kNoValue && reads_any) gradient = take_from_flight(made.value);
      if (gradient != kNoValue) take(gradient);
    }
    if (image.reads.empty()) image.scratch_bytes += call.output_bytes;  // what would have come in
    for (const Trace::Made& made : call.makes) {
      if (held_[made.value]) take(made.value);
    }
    if (image.reads.empty() && !reads_any) return;
    for (const Trace::Id value : inputs) {
      Trace::Call part = image;
      for (const Trace::Id input : inputs) {
        if (held_[input] && (input != value || inputs.size() == 1)) part.reads.push_back({input});
      }
      if (gradients_[value] != kNoValue) {  // is added to
        part.reads.push_back({gradients_[value]});
        done.push_back(gradients_[value]);
      }
      part.output_bytes = trace_.values[value].nbytes;
      gradients_[value] = trace_.add_value(part.output_bytes, /*counted=*/true);
      part.makes.push_back({gradients_[value]});
      trace_.add_call(std::move(part));
    }
    for (const Trace::Id value : done) {
      trace_.add(Trace::What::kRelease, value);
      if (value < held_.size()) held_[value] = false;  // a forward may have read what a backward made
    }
  }

  Trace trace_;
  std::vector<bool> held_;             // by value of the record
  std::vector<Trace::Id> in_flight_;   // made by the backward, and not freed
  std::vector<Trace::Id> gradients_;
};

// Whether `known` goes on where `so_far` ends. `refused`: the last call of that has not run.
bool begins_like(const Trace& known, const Trace& so_far, bool refused) {
  if (so_far.calls.size() > known.calls.size()) return false;
  for (std::size_t i = 0; i < so_far.calls.size(); ++i) {
    const Trace::Call& a = known.calls[i];
    const Trace::Call& b = so_far.calls[i];
    if (a.name != b.name || a.output_bytes != b.output_bytes) return false;
    const bool has_run = !refused || i + 1 < so_far.calls.size();
    if (has_run && (a.reads != b.reads || a.makes != b.makes)) return false;
  }
  return true;
}

// Whether `known` has a call like one that has not run, where a guide has told which values are which.
bool has_call(const Trace& known, const ObservedCall& next) {
  const auto same = [&](const Trace::Read& a, const ObservedCall::Read& b) {
    const bool is_new = b.version->value == kNoValue && !known.values[a.value].counted;
    return is_new || a.value == b.version->value;
  };
  return std::ranges::any_of(known.calls, [&](const Trace::Call& call) {
    return call.name == next.name && call.output_bytes == next.output_bytes &&
           std::ranges::equal(call.reads, next.reads, same);
  });
}

class Trial {
 public:
  Trial(const Trace& trace, SimulationOptions options)
      : trace_(trace), options_(std::move(options)) {
    effort_.counts_walks = true;
    options_.effort = &effort_;
    const double operators = static_cast<double>(trace.calls.size()) + 1;
    const double most = trace.cost() * std::clamp(kMostReplays / operators, 2.0, 10.0);
    if (most < options_.most_overhead) most_overhead_ = most;
  }

  // In which nothing has to go; none if that much cannot be simulated.
  [[nodiscard]] std::optional<std::size_t> find_peak() {
    options_.budget = kNoBudget;
    effort_.most = kMostOperators;
    try {
      const Statistics free = simulate(trace_, options_);
      // Some policies evict all the same.
      if (most_overhead_) options_.most_overhead = *most_overhead_ + 2 * free.overhead();
      at_least_ = effort_.operators;
      return free.unconstrained_bytes;
    } catch (const Stopped&) {
      return std::nullopt;
    }
  }

  [[nodiscard]] bool fits(std::size_t budget) {
    options_.budget = budget;
    // One that comes to nothing leaves time for others; in a long call each replays but little.
    const std::uint64_t left = kMostOperators - std::min<std::uint64_t>(effort_.operators, kMostOperators);
    effort_.most = effort_.operators + std::max(left / 4, kTimes * at_least_);
    try {
      return simulate(trace_, options_).overhead() <= options_.most_overhead;
    } catch (const NoRoom&) {
      return false;
    } catch (const Stopped&) {
      return false;
    }
  }
  [[nodiscard]] bool is_over() const {
    return effort_.operators + at_least_ > std::max(kMostOperators, kTrials * at_least_);
  }

 private:
  static constexpr double kMostReplays = 2e5;
  // Some tenths of a second. A policy that replays a lot is simulated a few times all the same.
  static constexpr std::uint64_t kMostOperators = 100'000;
  static constexpr std::uint64_t kTimes = 3;
  static constexpr std::uint64_t kTrials = 10;
  const Trace& trace_;
  SimulationOptions options_;
  // A budget in which the call takes longer than that is not one to ask for.
  std::optional<double> most_overhead_;  // none: less is allowed
  Effort effort_;
  std::uint64_t at_least_ = 0;  // what a simulation takes in which nothing has to go
};

}  // namespace

std::optional<Figure> enough_for(const Trace& trace, SimulationOptions options, std::size_t least,
                                 const Wording& wording) {
  Trial trial(trace, std::move(options));
  const std::optional<std::size_t> peak = trial.find_peak();
  if (!peak) return std::nullopt;
  Figure low = figure_of(least, wording);
  if (trial.fits(low.bytes)) return low;
  Figure enough = figure_of(std::max(*peak, low.bytes + 1), wording);
  while (!trial.fits(enough.bytes)) {
    if (trial.is_over()) return std::nullopt;
    low = std::move(enough);
    enough = figure_of(low.bytes + low.bytes / 4 + 1, wording);
  }
  while (!trial.is_over() && enough.bytes - low.bytes > least / 64) {
    Figure middle = figure_of(low.bytes + (enough.bytes - low.bytes) / 2, wording);
    if (middle.bytes >= enough.bytes) break;
    (trial.fits(middle.bytes) ? enough : low) = std::move(middle);
  }
  return enough;
}

std::string Advice::in_words() const {
  if (covers == Covers::kNothing) return "at least " + figure.text;
  if (covers == Covers::kAll) return figure.text + ", in which the whole call fits";
  const std::string so_far = "about " + figure.text + ", in which all fits up to here";
  if (covers == Covers::kSoFar) return so_far;
  return so_far + (covers == Covers::kAndBack ? ", and a backward from here" : ", and the rest of the backward");
}

// See Note [The figure is tried out]
Advice advise(const NoRoom& why, const ObservedCall* refused, bool expects_backward,
              const Wording& wording, double most_replays, std::optional<LinkOptions> link) {
  const Table& table = *why.table;
  const Domain& domain = *table.domain;
  const Advice lower_bound{figure_of(why.smallest_budget, wording)};
  // A custom score is Python's, and an inner level's budget is not the simulation's.
  if (&table != domain.root || table.policy.custom_score) return lower_bound;
  SimulationOptions options{.policy = table.policy, .link = std::move(link)};
  const auto tried_on = [&](const Trace& trace, std::size_t least) {
    options.most_overhead = most_replays == kNever ? kNever : most_replays * trace.cost();
    return enough_for(trace, options, least, wording);
  };
  std::optional<Trace> so_far;
  if (domain.observers.recorder) so_far = domain.observers.recorder->followed_by(refused);
  const Guide* const guide = domain.observers.guide.get();
  const bool as_known =
      domain.known && (!guide || guide->is_as_recorded()) &&
      (!guide || !refused || has_call(*domain.known, *refused)) &&
      (!so_far || begins_like(*domain.known, *so_far, refused != nullptr));
  if (as_known) {
    const auto enough = tried_on(*domain.known, why.smallest_budget);
    return enough ? Advice{*enough, Advice::Covers::kAll} : lower_bound;
  }
  if (!so_far) return lower_bound;
  const auto enough = tried_on(*so_far, why.smallest_budget);
  if (!enough) return lower_bound;
  const bool has_turned = !so_far->calls.empty() && so_far->calls.back().backward;
  const std::optional<Trace> and_back =
      expects_backward || has_turned ? Mirror(*std::move(so_far)).reflect() : std::nullopt;
  if (const auto more = and_back ? tried_on(*and_back, enough->bytes) : std::nullopt) {
    return {*more, has_turned ? Advice::Covers::kAndRest : Advice::Covers::kAndBack};
  }
  return {*enough, Advice::Covers::kSoFar};
}

}  // namespace rematfn
