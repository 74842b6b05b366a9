// SPDX-License-Identifier: Apache-2.0
//
// guide.h: what a trace tells the next run of the same program.
//
// Note [Guided, never trusted]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
// A guide says when a value is read next, and a plan which values to keep longest. Both only move
// scores: what is evicted, never what is computed. So a guide that is wrong costs time and nothing
// else, and still it is compared with the program at each operator. Where the two differ it looks for
// its place: Note [A guide finds its place again].

// Note [A guided call keeps its record's time]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
// Next uses are points in the program time of the record. Where costs are measured, no two calls take
// the same; so a guided call's clock is moved on by what the record says that an operator costs.
// What it did take is noted: a first call finds caches cold, and its times are not those of the others.
// So is what lies between an operator and the one before, the interpreter's time and the program's own: copies
// go on meanwhile. Of an LSTM's step it is an eighth (measured). Replays and waiting lie there as well; they
// are the plan's, and taken off.
// The record's time is that of the place where the guide is. It stands still while the program runs what is
// not in the record, and jumps where the program does; so a next use is as far away as the record has it,
// whatever came between. In a call that is as recorded it is the program's own.
//
// Note [A guide finds its place again]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
// Calls of one function differ: an optimiser has its state by now, a layer is dropped, a loop runs once more,
// a batch has other sizes. Sizes are not compared. An operator that is not what comes next in the record is
// looked for there, by its name (`add_` is found as `add`):
//   1. among the calls that read the same values;
//   2. among those that come after the same operators, the last kContext of them; such a call may read
//      values other than the record's, which take their names: one more iteration is the last one again.
// The nearest is taken, and the guide goes on behind it. What is found nowhere is the program's own: nothing
// is known of what it makes. Where most of what has run lately was not found, the guide is dormant, until
// most is again: what it predicted is forgotten, and the level scores as one that knows nothing. It scores so,
// too, where much of what was found had been passed before: the values of a loop that runs more often than
// recorded are all read at one place of the record, which says nothing of their order. Each of the two ends
// at half of where it begins, so that it is not left and entered at every other operator.

// Note [A plan for calls that differ]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
// A plan may say which values are kept or moved, and local search fits its score to one program in one
// budget. In a call of other sizes such a plan may cost many times what it promised. So a search also tells
// the best plan of its first stages, and that one is followed from where a call differs from its record, by
// an operator or a size. A call that is expected to differ follows it from the start.
// A schedule says of each operator what is replayed before it and evicted after it. So it suits a call of other
// sizes that runs the record's operators, and goes on until an operator differs. It evicts before room is wanted.
// Of a loop that runs less often than recorded, it would evict what the end reads, in a budget that nothing has
// to leave. So a call that is expected to differ follows one only if the last such call ran the record's
// operators to the end. Where its sizes are in other proportions the schedule may not fit as it is: then the score
// says what goes, too, and the schedule goes on.
// What a plan gains by a hundredth of the program on its record, it may lose where sizes differ. So it has to
// gain two hundredths (kWorthAGuide); otherwise these calls follow the level's own policy.

#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <limits>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "engine/call_index.h"
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
  const CallIndex index;

  // Program time when call number `call` has run.
  [[nodiscard]] double end_of(std::size_t call) const { return ends_[call]; }

  // After call number `call`: of its reads, and then of the values it makes.
  [[nodiscard]] std::span<const double> next_uses(std::size_t call) const {
    return std::span(next_).subspan(first_[call], first_[call + 1] - first_[call]);
  }

 private:
  std::vector<std::size_t> first_;  // where a call's entries begin
  std::vector<double> next_;
  std::vector<double> ends_;
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
  // For calls that differ from the trace: the best that says nothing of single values. Or null.
  std::shared_ptr<const Plan> general{};
  // The best that is carried out; or null.
  std::shared_ptr<const Plan> scheduled{};
  std::shared_ptr<Broken> broken{};  // of the search that found it; or null
  // Whether the last call that differed from the trace ran the trace's operators all the same; or null.
  std::shared_ptr<std::atomic<bool>> others_run_alike{};
};

class Guide {
 public:
  // `timings`: to be told what the operators of a whole call have taken; or null.
  explicit Guide(Followed followed, std::shared_ptr<Timings> timings = nullptr);
  ~Guide();
  Guide(const Guide&) = delete;
  Guide& operator=(const Guide&) = delete;

  // The program has run this call. The versions know their next use, if it is found and the guide foresees.
  // See Note [A guide finds its place again]
  void follow(const ObservedCall& call);
  // Whether it has lost its place.
  [[nodiscard]] bool is_dormant() const { return dormant_; }
  // So far, sizes included: what was simulated holds.
  [[nodiscard]] bool is_as_recorded() const { return as_recorded_; }
  // The record's time where the program is; next uses are in it.
  [[nodiscard]] double now() const { return now_; }
  // See Note [A plan for calls that differ]
  [[nodiscard]] const Plan& plan() const {
    const bool holds = as_recorded_ || (same_way_ && follows_schedule_);
    return holds || !followed_.general ? *followed_.plan : *followed_.general;
  }
  [[nodiscard]] Preference preference_for(const Version& version) const;
  // Whether it moves scores.
  [[nodiscard]] bool foresees() const { return !plan().online && !dormant_ && !loops_; }
  // What is carried out, or null. See Note [A schedule is carried out]
  [[nodiscard]] const Schedule* schedule() const {
    return follows_schedule_ && same_way_ && !dormant_ ? followed_.plan->schedule.get() : nullptr;
  }
  // What its next replay repeats, null if nothing can be replayed from it any more; and which values are
  // spent after it.
  struct Due {
    Operation* operation;
    std::span<const Trace::Id> spent;
  };
  // Whether one comes before the program's next call.
  [[nodiscard]] bool has_replays_due() const;
  [[nodiscard]] Due take_due();
  // The values spent after the latest call.
  [[nodiscard]] std::span<const Trace::Id> spent() const {
    return schedule()->spent_after_call[next_call_ - 1];
  }
  // To the end of the call.
  void leave_schedule() { follows_schedule_ = false; }
  // What is carried out has no room for so many bytes; and how many that were when it was noted first.
  void note_lack(std::size_t nbytes) { lacked_ = lacked_ == 0 ? nbytes : lacked_; }
  [[nodiscard]] std::size_t lacked() const { return lacked_; }
  void forget(const Operation& operation);
  // The operator that is about to be followed has taken `observed` seconds. So far, replays and waiting
  // took `overhead`, and copies `copying`.
  void note_taken(double observed, double overhead, double copying);
  // What the record says that it costs, if the call is as recorded; else `observed`.
  [[nodiscard]] double cost_of_next(double observed, std::size_t output_bytes);
  // What it says has passed since the operator before it ended.
  [[nodiscard]] double pause_before_next();
  // What replays cost at the most where the plan holds what it promises, by program time `clock`.
  [[nodiscard]] double most_replayed(double clock) const {
    const double scale = now_ > 0 ? std::max(clock / now_, 1.0) : 1;
    return scale * (2 * plan().replayed + future_.cost / 10);
  }
  // The plan does not suit this call: dormant to its end.
  void give_up() { given_up_ = dormant_ = true; }
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
  static constexpr std::size_t kNowhere = std::numeric_limits<std::size_t>::max();

  [[nodiscard]] bool is_next(const ObservedCall& seen) const;
  [[nodiscard]] std::size_t look_for(const ObservedCall& seen) const;
  // How many of its reads are of other values than those of call number `call`; kNowhere if they cannot be
  // compared.
  [[nodiscard]] std::size_t conflicts(const ObservedCall& seen, std::size_t call) const;
  void note_found(bool found);
  void note_place(std::size_t index);
  void note_way() const;
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
  std::vector<Operation*> operations_;  // by call, where there is a schedule; null once dead
  std::size_t due_ = 0;                 // replays of the schedule that were due so far
  double now_ = 0;
  CallIndex::Kinds recent_{};  // of the calls before
  std::size_t found_ = 0;
  std::size_t furthest_ = 0;
  std::size_t repeated_ = 0;  // at places that it had passed
  double doubt_ = 0;  // how much of what has run lately was not found
  bool as_recorded_ = true;
  bool same_way_ = true;  // the same operators, of whatever sizes
  bool loops_ = false;  // over parts of the record, more often than that does
  bool dormant_ = false;
  bool given_up_ = false;
  bool follows_schedule_ = false;
  std::size_t lacked_ = 0;
  bool may_know_useless_ = false;
};

}  // namespace rematfn
