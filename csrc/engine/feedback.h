// SPDX-License-Identifier: Apache-2.0
//
// feedback.h: what guided calls have shown of a program and its plans.

#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "engine/trace.h"

namespace rematfn {

// Of what calls have taken, and of the figures of packed memory: one for the process, held for a few
// instructions, also by who holds plans_mutex(). A fork waits for it.
[[nodiscard]] std::mutex& feedback_mutex();

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

}  // namespace rematfn
