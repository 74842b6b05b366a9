// SPDX-License-Identifier: Apache-2.0
//
// sharer.h: makes room in a budget that domains share.
//
// Note [Whoever needs room may take it]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
// All members' values stand in one order, that of the default score. Each domain names the one that
// its own policy would evict next, and the lowest of these goes. Time is the members' together: what
// a block made does not stay young because its level has ended and its clock stands still. So the
// blocks of a model evict as one level around all of them would, in the forward the oldest block's
// values first, which are read last. Values that a scheduled replay will read go after all others, and
// only their own domain's plan takes them.
//
// To evict from another domain takes its lock, and to wait for one while one holds another is how
// threads come to wait for each other. So:
//   1. Another domain's lock is only ever tried.
//   2. Whoever has to wait lends: it keeps its lock, so that no operator comes between, but others
//      may evict from it meanwhile. What it needs itself is pinned.
//   3. To wait makes sense as long as some domain is busy and does not lend: what its operator holds
//      will be free. If all have been looked at, and nothing has changed, there is no room: NoRoom,
//      for the one that found out. The others wait on, since it is about to let go of what it holds.
//   4. A busy operator may wait for something that the waiting one holds, where we cannot see it. So
//      nobody waits for longer than a minute in which nothing changes.
// A lock of its own says who lends. It is held for a few instructions, in which nothing else is locked.
//
// Note [An address is good until its level's next operator]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
// What is read behind the dispatcher is made resident just before, and as no operator comes between,
// it is not evicted again. Where a budget is shared, an operator of another level may come between. So
// a version that was asked for in this way is not taken by others until its own domain has recorded
// another operator.

#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "engine/table.h"

namespace rematfn {

class Sharer {
 public:
  explicit Sharer(Domain& domain) : domain_(domain) {}

  // Evicts, here and elsewhere, until the budget of `table` can hold `nbytes` more. Throws NoRoom.
  void make_room(Table& table, std::size_t nbytes);
  // What `table` may have, as things stand.
  [[nodiscard]] static std::size_t budget_of(const Table& table);
  // Waits for a moment, with the lock held. Threads that share a budget may evict meanwhile.
  void lend();
  // Whether another domain's thread is evicting here.
  [[nodiscard]] bool is_borrowed() const { return is_borrowed_; }
  void take_claims_back();
  void after_fork();

  std::vector<Table*> tables;  // those that share their budget

 private:
  friend class Borrowed;

  struct Offer {
    Table* table;
    double score;
  };
  struct Taken {
    bool enough = false;
    bool any = false;
    bool some_busy = false;
  };
  [[nodiscard]] std::optional<Offer> offer_for(const SharedBudget& budget);
  Taken take(Table& table, std::size_t nbytes);
  // Waits for what is leaving, of this domain's members; false: nothing is.
  bool end_leaving(const SharedBudget& budget);

  enum class Lending : std::uint8_t { kNot, kLent, kTaken };

  Domain& domain_;
  Lending lending_ = Lending::kNot;  // under the lock of sharer.cpp
  bool is_borrowed_ = false;
};

}  // namespace rematfn
