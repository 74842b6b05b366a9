// SPDX-License-Identifier: Apache-2.0
//
// plan.h: what a trace tells about the next run of the same program.
//
// Note [Guided, never trusted]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
// A guide says when a value is read next, and a plan which values to hold dear. Both only move
// scores: what is evicted, never what is computed. So a guide that is wrong costs time and nothing
// else, and still it is compared with the program at each operator. At the first difference it is
// dropped, and the level scores as one that knows nothing.

#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "simulation.h"
#include "trace.h"

namespace rematfn {

// When each value is read next, at each point of a trace.
class Future {
 public:
  explicit Future(const Trace& trace);

  // After call number `call`: of its i-th read, and of the i-th value it makes.
  [[nodiscard]] double after_read(std::size_t call, std::size_t i) const {
    return next_[first_[call] + i];
  }
  [[nodiscard]] double after_made(std::size_t call, std::size_t i) const {
    return next_[first_[call + 1] - made_[call] + i];
  }

 private:
  std::vector<std::size_t> first_;  // where a call's entries begin
  std::vector<std::size_t> made_;
  std::vector<double> next_;
};

// How to choose victims on the next run.
struct Plan {
  Score score;
  std::vector<float> weights;  // by value; empty: all 1
  std::vector<bool> kept;      // by value; empty: none
  double replayed_cost = kNever;  // as simulated, seconds; kNever: it does not fit
};

// Which plans are tried out. The best of them is taken: the one that replays least.
enum class Strategy : std::uint8_t {
  kBest,       // a portfolio of scores, products, segments; then local search
  kSegments,   // segments.h: as many as asked for; 0: numbers of them
  kCutPoints,  // segments.h: every cut point, every second one, ...
};

class Guide {
 public:
  Guide(std::shared_ptr<const Trace> trace, std::shared_ptr<const Future> future,
        std::shared_ptr<const Plan> plan);

  // The program has called `name`, reading `reads` and making `made`. True if so did the trace;
  // then the versions know their next use.
  [[nodiscard]] bool follow(const ObservedCall& call);
  [[nodiscard]] const Plan& plan() const { return *plan_; }

 private:
  void advise(Version& version, Trace::Id value, double next_use) const;

  const std::shared_ptr<const Trace> trace_;
  const std::shared_ptr<const Future> future_;
  const std::shared_ptr<const Plan> plan_;
  std::size_t next_call_ = 0;
};

// Whether to try another plan, told what the best one so far replays.
using GoOn = std::function<bool(double replayed_cost)>;

// How much a search may do. It is counted in operators simulated, replays among them, and not in
// seconds: so it finds the same on every machine.
struct SearchLimits {
  std::uint64_t in_vain = 0;  // without coming to a plan that replays a hundredth less
  std::uint64_t in_all = 0;
  std::int64_t plans = -1;  // if not negative: so many plans
};
// `effort` is that of the search.
[[nodiscard]] GoOn while_it_pays(const SearchLimits& limits,
                                 std::shared_ptr<const Effort> effort);

// A program that was recorded, and the best plan for it so far. Any thread.
class Program {
 public:
  explicit Program(std::shared_ptr<const Trace> trace);

  // Looks for a better plan for `budget`, with kBest while `go_on` says so and at least until one is
  // found that fits; with the settings of `first`, if given, before all others. False if it was
  // stopped. A plan for another budget is forgotten.
  bool search(std::size_t budget, Strategy strategy, std::size_t segments, const GoOn& go_on,
              Effort& effort, std::optional<Score> first = {});
  // A search for this budget has come to its end.
  void note_searched(std::size_t budget);
  [[nodiscard]] bool has_searched(std::size_t budget) const;
  // Who guides the next run, or null if no plan fits.
  [[nodiscard]] std::shared_ptr<Guide> guide() const;
  [[nodiscard]] Plan plan() const;

  const std::shared_ptr<const Trace> trace;

 private:
  const std::shared_ptr<const Future> future_;
  // Under plans_mutex().
  std::shared_ptr<const Plan> plan_;
  std::size_t budget_ = 0;
  bool searched_ = false;
};

}  // namespace rematfn
