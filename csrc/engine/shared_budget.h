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
// locked, a table counts with the most that it has held since, and settles when the lock is let go of.
// So bytes that only change hands do not leave the sum between. To make room is to count what is about
// to be allocated before it is there: else two threads would count on the same bytes.
//
// Note [Whoever needs room may take it]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
// All members' values stand in one order, that of the default score. Each table names the one that its
// own policy would evict next, and the lowest of these goes. Time is the members' together: what a
// block made does not stay young because its level has ended and its clock stands still. So the blocks
// of a model evict as one level around all of them would, in the forward the oldest block's values
// first, which are read last. Values that a scheduled replay will read go after all others, and only
// their own domain's plan takes them.
//
// To wait for another domain's lock while one holds one is how threads come to wait for each other. So:
//   1. Whoever has to take from others waits for its turn, of which the process has one. Whose turn it
//      is has the members' domains to itself: their locks are tried, all at once, and none is waited for.
//   2. Whoever waits lends: it keeps its lock, so that no operator comes between, but whose turn it is
//      may evict from it. What it needs itself is pinned.
//   3. To wait makes sense as long as some domain is busy and does not lend: what its operator holds
//      will be free. If all have been looked at, there is no room: NoRoom, for the one that found out.
//      The others wait on, since it is about to let go of what it holds.
//   4. A busy operator may wait for something that the waiting one holds, where we cannot see it. So
//      nobody waits for longer than a minute in which nothing changes.
//
// Note [An address is good until its level's next operator]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
// What is read behind the dispatcher is made resident just before, and as no operator comes between,
// it is not evicted again. Where a budget is shared, an operator of another level may come between. So
// a version that was asked for in this way is not taken by others until its own domain has recorded
// another operator.

#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <vector>

#include <c10/util/FunctionRef.h>

namespace rematfn {

class Domain;
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
  // Evicts, wherever it is, until `table` has claimed `nbytes` more. Throws NoRoom.
  void make_room(Table& table, std::size_t nbytes);
  // While nobody joins or leaves.
  void visit_tables(c10::function_ref<void(const Table&)> visit) const;

 private:
  friend class Table;
  class Sharers;

  bool evict_for(Table& table, std::size_t nbytes, const std::vector<Table*>& members);

  std::atomic<std::size_t> used_{0};
  std::atomic<std::size_t> peak_{0};
  std::atomic<double> clock_{0};  // program time of all members together
  std::vector<Table*> tables_;    // under a lock
  std::atomic<std::size_t> count_{0};
};

// Waits for a moment, with the lock of `domain` held. Threads that share a budget may evict meanwhile.
void lend(Domain& domain);

// A fork waits until nobody is just joining. Whose turn it is in the parent has none in the child.
void lock_sharing();
void unlock_sharing();
void forget_sharing_after_fork();

}  // namespace rematfn
