// SPDX-License-Identifier: Apache-2.0
//
// feedback.h: what guided calls have shown of a program and its plans.

#pragma once

#include <atomic>
#include <cstddef>
#include <memory>
#include <mutex>
#include <vector>

#include "engine/trace.h"

namespace rematfn {

// Of what calls have shown of plans: one for the process, held for a few instructions, also by who holds
// plans_mutex(). A fork waits for it.
[[nodiscard]] std::mutex& feedback_mutex();

// At least one; of an even number the lower of two: what disturbs a call makes it longer.
[[nodiscard]] double median(std::vector<double> seconds);

// What the operators of a call have taken, and what lay between each and the one before. In seconds.
struct Times {
  std::vector<double> costs;
  std::vector<double> pauses;
  double copying = 0;  // that copies took meanwhile
};

// Those of guided calls. Any thread.
class Timings {
 public:
  // `clocked`: the host's clock tells what lies between two operators. `drag`: so much longer operators
  // take while something is on its way.
  explicit Timings(bool clocked, double drag) : clocked_(clocked), drag_(drag) {}

  // Of a whole call. One that others disturbed, so that it took longer than another, does not count. What
  // it took longer for its copies is taken off: other plans move other values, and their simulation adds it.
  void add(Times times);
  // `trace`, by the medians of all that count; null if those are too few.
  [[nodiscard]] std::shared_ptr<const Trace> applied_to(const Trace& trace) const;

 private:
  static constexpr std::size_t kEnough = 3;
  const bool clocked_;
  const double drag_;
  std::vector<Times> calls_;
};

// By value: how much earlier than the plan says its return begins, as calls that followed the plan have
// shown. See Note [What moving costs].
//
// Note [Leads are put to the test]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
// What a late return teaches is right for its value and may be wrong for the call: a return that begins
// earlier takes room earlier, for which others go, and come late. An LSTM in a tenth of its peak waited for
// 0.02 s in its twelfth call and for 0.15 s in its twenty-second, and moved a seventh more. So what a call
// spends on replays and waiting is compared with the least that a call has spent. After one that has spent
// clearly more, the leads are again those that the best call began with. Disks change: each time that this
// happens, the least is taken to be a little more.
class Leads {
 public:
  explicit Leads(std::size_t values) : values_(values) {}

  [[nodiscard]] double of(Trace::Id value) const;
  // It was waited for; it lay waiting; or it was turned back, since its room was wanted.
  void note_late(Trace::Id value);
  void note_early(Trace::Id value);
  void note_turned_back(Trace::Id value);

  using Factors = std::vector<float>;  // by value
  [[nodiscard]] Factors factors() const;
  // A call that began with these has spent so many seconds on replays and waiting; the program takes so many.
  void note_call(Factors began_with, double spent, double program);

 private:
  void change(Trace::Id value, float by);

  struct Lead {
    std::atomic<float> factor = 1;
    std::atomic<bool> was_late = false;  // and has not been turned back since
  };
  std::vector<Lead> values_;
  // Under feedback_mutex().
  Factors best_;
  double least_spent_ = kNever;  // with these
};

}  // namespace rematfn
