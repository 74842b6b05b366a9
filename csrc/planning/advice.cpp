// SPDX-License-Identifier: Apache-2.0
#include "planning/advice.h"

#include <algorithm>
#include <chrono>
#include <memory>
#include <optional>

#include "base/errors.h"

namespace rematfn {
namespace {

// See Note [What a forward holds, a backward reads]
class Mirror {
 public:
  explicit Mirror(Trace trace)
      : trace_(std::move(trace)),
        held_(trace_.values.size()),
        gradients_(trace_.values.size(), kNoValue) {
    for (const Trace::Event& event : trace_.events) {
      if (event.what == Trace::What::kCall) note_call(trace_.calls[event.index]);
      if (event.what == Trace::What::kRelease || event.what == Trace::What::kSeal) {
        held_[event.index] = false;
      }
    }
  }

  // The record and its image, or none if no backward is to be expected.
  [[nodiscard]] std::optional<Trace> reflect() {
    const bool has_turned = std::any_of(trace_.calls.begin(), trace_.calls.end(),
                                        [](const Trace::Call& call) { return call.backward; });
    const bool holds = std::find(held_.begin(), held_.end(), true) != held_.end();
    if (has_turned || !holds) return std::nullopt;
    for (std::size_t i = trace_.calls.size(); i-- > 0;) add_image_of(i);
    return std::move(trace_);
  }

 private:
  void note_call(const Trace::Call& call) {
    for (const Trace::Read& read : call.reads) {
      held_[read.value] = trace_.values[read.value].counted;
    }
    for (const Trace::Made& made : call.makes) {
      if (made.over >= 0) held_[call.reads[made.over].value] = false;
    }
  }

  void add_image_of(std::size_t index) {
    const Trace::Call call = trace_.calls[index];
    Trace::Call image(call.name, call);
    image.replayable = image.backward = true;
    image.raw = false;
    std::vector<Trace::Id> done;  // read here for the last time
    const auto take = [&](Trace::Id value) {
      image.reads.push_back({value});
      done.push_back(value);
    };
    for (const Trace::Made& made : call.makes) {
      if (gradients_[made.value] != kNoValue) take(gradients_[made.value]);
    }
    if (image.reads.empty()) image.scratch_bytes += call.output_bytes;  // what would have come in
    for (const Trace::Made& made : call.makes) {
      if (held_[made.value]) take(made.value);
    }
    std::vector<Trace::Id> inputs;  // each once
    for (const Trace::Read& read : call.reads) {
      const bool again = std::find(inputs.begin(), inputs.end(), read.value) != inputs.end();
      if (trace_.values[read.value].counted && !again) inputs.push_back(read.value);
    }
    const bool reads_any = std::any_of(inputs.begin(), inputs.end(),
                                       [&](Trace::Id input) { return held_[input]; });
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
    for (const Trace::Id value : done) trace_.add_release(value);
  }

  Trace trace_;
  std::vector<bool> held_;             // by value of the record
  std::vector<Trace::Id> gradients_;
};

class Trial {
 public:
  Trial(const Trace& trace, SimulationOptions options)
      : trace_(trace), options_(std::move(options)) {
    if (options_.most_overhead != kNever) return;
    double cost = 0;
    for (const Trace::Call& call : trace.calls) cost += call.cost;
    // A budget in which the call takes longer than that is not one to ask for.
    const double operators = static_cast<double>(trace.calls.size()) + 1;
    options_.most_overhead = cost * std::clamp(kMostReplays / operators, 2.0, 10.0);
  }

  [[nodiscard]] bool fits(std::size_t budget) {
    options_.budget = budget;
    try {
      return simulate(trace_, options_).overhead() <= options_.most_overhead;
    } catch (const NoRoom&) {
      return false;
    }
  }
  [[nodiscard]] bool is_over() const { return std::chrono::steady_clock::now() > end_; }

 private:
  static constexpr double kMostReplays = 2e5;
  const Trace& trace_;
  SimulationOptions options_;
  const std::chrono::steady_clock::time_point end_ =
      std::chrono::steady_clock::now() + std::chrono::seconds(1);
};

}  // namespace

std::optional<std::size_t> enough_for(const Trace& trace, SimulationOptions options,
                                      std::size_t least) {
  constexpr std::size_t kMost = 64;  // times the least
  Trial trial(trace, std::move(options));
  std::size_t low = as_printed(least);
  if (trial.fits(low)) return low;
  std::optional<std::size_t> enough;
  for (std::size_t step = low / 32 + 1; !enough && low < kMost * least; step *= 2) {
    if (trial.is_over()) return std::nullopt;
    const std::size_t next = as_printed(low + step);
    (trial.fits(next) ? enough.emplace() : low) = next;
  }
  while (enough && !trial.is_over()) {
    const std::size_t middle = as_printed(low + (*enough - low) / 2);
    if (middle >= *enough || *enough - low <= least / 64) break;
    (trial.fits(middle) ? *enough : low) = middle;
  }
  return enough;
}

std::string covered_by(const Advice& advice) {
  switch (advice.covers) {
    case Advice::Covers::kNothing:
      break;
    case Advice::Covers::kSoFar:
      return ", in which all fits up to here";
    case Advice::Covers::kAndBack:
      return ", in which all fits up to here, and a backward from here";
    case Advice::Covers::kAll:
      return ", in which the whole call fits";
  }
  return "";
}

// See Note [The figure is tried out]
Advice advise(const NoRoom& why, const ObservedCall* refused, bool expects_backward,
              std::optional<LinkOptions> link) {
  const Table& table = *why.table;
  const Domain& domain = *table.domain;
  const Advice lower_bound{why.smallest_budget, Advice::Covers::kNothing};
  // A custom score is Python's, and an inner level's budget is not the simulation's.
  if (&table != domain.root || table.policy.custom_score) return lower_bound;
  const SimulationOptions options{.policy = table.policy, .link = link};
  std::optional<std::size_t> enough;
  auto covers = Advice::Covers::kAll;
  if (domain.known && !domain.guide_lost) {
    enough = enough_for(*domain.known, options, why.smallest_budget);
  } else if (domain.recorder) {
    covers = Advice::Covers::kSoFar;
    Trace so_far = domain.recorder->followed_by(refused);
    enough = enough_for(so_far, options, why.smallest_budget);
    const std::optional<Trace> and_back =
        enough && expects_backward ? Mirror(std::move(so_far)).reflect() : std::nullopt;
    if (const auto more = and_back ? enough_for(*and_back, options, *enough) : std::nullopt) {
      return {*more, Advice::Covers::kAndBack};
    }
  }
  return enough ? Advice{*enough, covers} : lower_bound;
}

}  // namespace rematfn
