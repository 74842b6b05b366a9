// SPDX-License-Identifier: Apache-2.0
//
// shared_budget.h: one budget for the levels of several calls.
//
// Note [A shared budget is a sum]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
// The blocks of a model, several microbatches, calls on two threads: each has a level, a table and a
// domain of its own, and what is to be bounded is what they hold together. So the outermost table of
// such a budget in each domain adds its bytes to a sum; inside it, another table of the same budget
// counts along with it, once. The sum is atomic, since domains have a lock each. Two things follow
// from that:
//   1. Room that was made has to be kept. Else two threads would count on the same bytes, each until
//      its operator has allocated them. So to make room is to claim: what is about to be allocated is
//      part of the sum at once ("in flight"). What the operator makes then counts in the place of its
//      claim, and the rest of it is given back when the lock is.
//   2. Where bytes only change hands, from one contents of a storage to the next or from a level to
//      the one around it, they must not leave the sum for the moment between: Table::hold().
// Which values go, and from whom, is decided by Note [Whoever needs room may take it].

#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

namespace rematfn {

class Domain;
class Table;

class SharedBudget {
 public:
  explicit SharedBudget(std::size_t bytes) : bytes(bytes) {}

  const std::size_t bytes;

  // Claims included.
  [[nodiscard]] std::size_t resident_bytes() const { return used_; }
  [[nodiscard]] std::size_t peak_bytes() const { return peak_; }

  // A member's part of what is left. Any thread.
  [[nodiscard]] std::size_t unused_of_each() const {
    const std::size_t used = used_;
    return used < bytes ? (bytes - used) / std::max<std::size_t>(member_count_, 1) : 0;
  }

  void add(std::size_t nbytes) { note_peak(used_ += nbytes); }
  // Bytes whose former owner is about to let go of them.
  void add_for_a_moment(std::size_t nbytes) { used_ += nbytes; }
  void subtract(std::size_t nbytes);
  // Puts `after` in the place of `before`, which is part of the sum, if that then fits.
  [[nodiscard]] bool try_replace(std::size_t before, std::size_t after);
  // How often anything has changed.
  [[nodiscard]] std::uint64_t changes() const { return changes_; }

  // Program time of all members together, in seconds.
  [[nodiscard]] double clock() const { return clock_; }
  void advance(double seconds);

  void join(Domain& domain);
  void leave(Domain& domain);
  [[nodiscard]] std::vector<std::shared_ptr<Domain>> domains() const;

 private:
  struct Member {
    Domain* domain;
    std::weak_ptr<Domain> alive;
    std::size_t tables;
  };

  void note_peak(std::size_t used);

  std::atomic<std::size_t> used_{0};
  std::atomic<std::size_t> peak_{0};
  std::atomic<std::uint64_t> changes_{0};
  std::atomic<double> clock_{0};
  std::atomic<std::size_t> member_count_{0};
  std::vector<Member> members_;  // under the lock of sharer.cpp
};

// In a fork: nobody is just changing who shares what with whom.
void lock_sharing();
void unlock_sharing();

// For a scope: what `domain` does not need just now may be evicted by this thread.
class Borrowed {
 public:
  explicit Borrowed(std::shared_ptr<Domain> domain);
  ~Borrowed();
  Borrowed(const Borrowed&) = delete;
  Borrowed& operator=(const Borrowed&) = delete;

  explicit operator bool() const { return how_ != How::kNot; }

 private:
  enum class How : std::uint8_t { kNot, kLocked, kLent };
  const std::shared_ptr<Domain> domain_;
  How how_ = How::kNot;
};

}  // namespace rematfn
