// SPDX-License-Identifier: Apache-2.0
//
// shared_budget.h: one budget for the levels of several calls.
//
// Note [A shared budget is a sum]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
// The blocks of a model, several microbatches, calls on two threads: each has a level, a table and a
// domain of its own, and what is to be bounded is what they hold together. So the outermost table of
// such a budget in each domain adds its bytes to a sum; inside it, another table of the same budget
// counts along with it, once. The sum is atomic, since domains have a lock each. While its domain is
// locked, a table counts with the most that it has held since, and settles when the lock is released.
// So bytes that only change hands do not leave the sum between. To make room is to count what is about
// to be allocated before it is there: else two threads would count on the same bytes.

#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <mutex>
#include <vector>

#include <c10/util/FunctionRef.h>

namespace rematfn {

class Table;

class SharedBudget {
 public:
  explicit SharedBudget(std::size_t bytes) : bytes(bytes) {}

  const std::size_t bytes;

  [[nodiscard]] std::size_t resident_bytes() const { return used_; }
  [[nodiscard]] std::size_t peak_bytes() const { return peak_; }
  // A table's part of what is left. Any thread.
  [[nodiscard]] std::size_t unused_of_each() const {
    const std::size_t used = used_;
    return used < bytes ? (bytes - used) / std::max<std::size_t>(count_, 1) : 0;
  }

  // What is allocated beside operators, until there is room for it. Any thread.
  void add(std::size_t nbytes) { used_ += nbytes; }
  void subtract(std::size_t nbytes) { used_ -= nbytes; }
  // Program time of all members together; and when a member is at `clock`.
  [[nodiscard]] double clock() const { return clock_; }
  double advance(double clock);
  // A member counts with so many bytes now.
  void recount(std::size_t before, std::size_t now);
  // The same, if they fit.
  [[nodiscard]] bool claim(std::size_t before, std::size_t now);
  void enter(Table& table);
  void leave(Table& table);
  // While nobody joins or leaves.
  void visit_tables(c10::function_ref<void(Table&)> visit) const;
  // Whose turn it is to take from others. See Note [Whoever needs room may take it]
  [[nodiscard]] static std::recursive_mutex& turn();

 private:
  std::atomic<std::size_t> used_{0};
  std::atomic<std::size_t> peak_{0};
  std::atomic<double> clock_{0};
  std::vector<Table*> tables_;    // under a lock
  std::atomic<std::size_t> count_{0};
};

}  // namespace rematfn
