// SPDX-License-Identifier: Apache-2.0
//
// program.h: a recorded program, and the best plan for it that has been found.
//
// Note [No call waits for a search]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
// A thread searches beside the calls, and a call follows the best plan that there is. The first guided
// call finds none: it simulates plans until one fits, which is mostly the first. Which plan a call
// follows depends on how far the thread has come, so that two runs may replay other operators; results
// do not depend on plans.
// Where values move, what that takes is compared with times, and the first call's are those of cold
// caches. So the search waits until a few guided calls have shown how long operators take; beside it
// they would take longer. Calls that are not alike show nothing, and the search does not wait for them.
// While the search by new times runs, calls follow the plan that they have, or one that costs less.

#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <optional>

#include "engine/guide.h"
#include "planning/search.h"

namespace rematfn {

// A program that was recorded, and a plan for it. Any thread.
class Program : public std::enable_shared_from_this<Program> {
 public:
  explicit Program(std::shared_ptr<const Trace> trace);
  // The same program, to be planned for another budget.
  Program(const Program& other);

  // Begins a search for a plan for `budget`, unless one for as much has begun. `what` says what to try.
  // Over `link`, values may be moved.
  void begin(std::size_t budget, std::function<void(Search&)> what, std::optional<LinkOptions> link = {});
  // A call is about to follow it, one that is `alike` or not. Simulates until some plan fits or there is little
  // hope; the thread goes on from there. See Note [No call waits for a search].
  void follow(bool alike = true);
  // Simulates until the search that has begun is over.
  void finish();
  // Whether later calls go on by the plan that there is now.
  [[nodiscard]] bool is_settled() const;

  // Whether the last call that differed from the record ran its operators all the same.
  [[nodiscard]] bool others_run_alike() const { return *others_run_alike_; }
  // Of the search that has begun; zero: none has.
  [[nodiscard]] std::size_t budget() const;
  // Who guides the next run, or null if no plan fits. If that is not `alike`, by a plan for calls that differ: the
  // best of settings, or a schedule. See Note [A plan for calls that differ]
  [[nodiscard]] std::shared_ptr<Guide> guide(bool alike = true) const;
  [[nodiscard]] Plan plan() const;
  // Of that, in seconds; kNever if no plan fits. Each call asks, and a plan is large.
  [[nodiscard]] double overhead() const;
  // Whether `other`, a record of the same function, is the same program. If so, calls of other sizes are alike.
  [[nodiscard]] bool note_same(const Program& other);
  // What a search for `other`, a record of the same function, begins with: a schedule, if the program is the same; or
  // null.
  [[nodiscard]] std::shared_ptr<const Plan> start_for(const Trace& other) const;
  // Of the program itself, in seconds: its operators; and those with what lies between them, where that is
  // known.
  [[nodiscard]] double cost() const { return trace->cost(); }
  [[nodiscard]] double elapsed() const;
  // Whether it overwrites what it has not made.
  [[nodiscard]] bool writes_outside() const;
  // The search that has begun, or null. Under plans_mutex().
  [[nodiscard]] const std::shared_ptr<Search>& begun() const { return search_; }

  const std::shared_ptr<const Trace> trace;  // as it was recorded

 private:
  // Under plans_mutex().
  void begin_anew();
  void time_anew();
  [[nodiscard]] bool waits_for_times() const;
  [[nodiscard]] Followed best() const;

  // Under plans_mutex().
  std::shared_ptr<const Trace> timed_;  // by the times of later calls, once these are known
  std::shared_ptr<const Future> future_;
  std::function<void(Search&)> what_;  // to try
  std::size_t budget_ = 0;
  std::optional<LinkOptions> link_;
  std::shared_ptr<Search> search_;
  mutable Followed followed_;  // by the calls so far
  std::shared_ptr<Timings> timings_;  // where values may be moved
  unsigned untimed_calls_ = 0;
  const std::shared_ptr<std::atomic<bool>> others_run_alike_;  // whatever the budget
};

}  // namespace rematfn
