// SPDX-License-Identifier: Apache-2.0
//
// guide.h: what a trace tells the next run of the same program.
//
// Note [Guided, never trusted]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
// A guide says when a value is read next, and a plan which values to keep longest. Both only move
// scores: what is evicted, never what is computed. So a guide that is wrong costs time and nothing
// else, and still it is compared with the program at each operator. At the first difference it is
// dropped, and the level scores as one that knows nothing.

// Note [A guided call keeps its record's time]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
// Next uses are points in the program time of the record. Where costs are measured, no two calls take
// the same; so a guided call's clock is moved on by what the record says that an operator costs.
// What it did take is noted: a first call finds caches cold, and its times are not those of the others.
// So is what lies between an operator and the one before, the interpreter's time and the program's own: copies
// go on meanwhile. Of an LSTM's step it is an eighth (measured). Replays and waiting lie there as well; they
// are the plan's, and taken off.

#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "engine/feedback.h"
#include "engine/plan.h"
#include "engine/trace.h"

namespace rematfn {

// When each value is read next, at each point of a trace; and what leaves.
class Future {
 public:
  explicit Future(const Trace& trace);

  const std::size_t result_bytes;
  const double cost;  // of the program

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

// A plan for a trace, and what has been learnt of it.
//
// Note [Plans that break]
// ~~~~~~~~~~~~~~~~~~~~~~~
// A plan that both moves and drops may cascade: a copy that comes later than simulated has a replay evict
// what the next one reads. A call whose replays have cost more than Guide::most_replayed() marks what its
// plan prefers as broken, and later calls follow the best plan of another preference that the same search
// has found. A search by other times, or for another budget, begins with a clean slate.
struct Followed {
  std::shared_ptr<const Trace> trace{};
  std::shared_ptr<const Future> future{};
  std::shared_ptr<const Plan> plan{};
  std::shared_ptr<Leads> leads{};  // null where nothing moves
  std::shared_ptr<Broken> broken{};  // of the search that found it; or null
};

class Guide {
 public:
  // `timings`: to be told what the operators of a whole call have taken; or null.
  explicit Guide(Followed followed, std::shared_ptr<Timings> timings = nullptr);
  ~Guide();
  Guide(const Guide&) = delete;
  Guide& operator=(const Guide&) = delete;

  // The program has called `name`, reading `reads` and making `made`. True if so did the trace;
  // then the versions know their next use, if it foresees.
  [[nodiscard]] bool follow(const ObservedCall& call);
  [[nodiscard]] const Plan& plan() const { return *followed_.plan; }
  [[nodiscard]] Preference preference_for(const Version& version) const;
  // Whether it moves scores.
  [[nodiscard]] bool foresees() const { return !plan().online; }
  [[nodiscard]] Leads* leads() const { return followed_.leads.get(); }  // or null
  // The operator that is about to be followed has taken `observed` seconds. So far, replays and waiting
  // took `overhead`, and copies `copying`.
  void note_taken(double observed, double overhead, double copying);
  // What the record says that it costs; `observed` if it has no such.
  [[nodiscard]] double cost_of_next(double observed) const;
  // What it says has passed since the operator before it ended.
  [[nodiscard]] double pause_before_next() const;
  // What replays cost at the most where the plan holds what it promises.
  [[nodiscard]] double most_replayed() const { return 2 * plan().replayed + future_.cost / 10; }
  // They have cost more. See Note [Plans that break]
  void note_broken();
  // Whether, since nothing was found to be useless, something has been read for the last time.
  [[nodiscard]] bool may_know_useless() const { return may_know_useless_; }
  void note_useless(bool found) { may_know_useless_ = found; }
  // Of what the program will have handed out when it is over.
  [[nodiscard]] std::size_t result_bytes() const { return future_.result_bytes; }
  // The most that one of the next few operators will allocate.
  [[nodiscard]] std::size_t bytes_ahead() const;

 private:
  void advise(Version& version, Trace::Id value, double next_use);

  const Followed followed_;
  const Trace& trace_;
  const Future& future_;
  const std::shared_ptr<Timings> timings_;
  using Clock = std::chrono::steady_clock;
  Clock::time_point ended_;  // the latest operator
  double overhead_ = 0;      // by then
  Times taken_;
  std::size_t next_call_ = 0;
  bool may_know_useless_ = false;
};

}  // namespace rematfn
