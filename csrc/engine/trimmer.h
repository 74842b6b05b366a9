// SPDX-License-Identifier: Apache-2.0
//
// trimmer.h: shortens a record that has become too long.
//
// Note [A record that is too long is trimmed]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
// A loop that feeds on its own result would remember every step it ever made. So beyond a limit of
// live operations resident versions become constants, the oldest first, until half as many are left:
// what only they needed dies. But a constant cannot be evicted, and a level whose constants fill its
// budget refuses the next operator. Hence:
//   1. What trimming pins is at most half of the budget that neither the largest operator so far nor
//      anything else that cannot go has need of.
//   2. A version is worth its bytes if so many evicted operations lead to it that, at that price, half
//      of the room pays for all that is to go. The state of a loop is. A result that is held for
//      itself, one operation away from what is resident, is not, and would take the room of one that
//      is. How many there are is not what goes at once: a second version may need them too, until it
//      is cut as well.
//   3. What then is still too long stays so: evicted versions of the program need their lineage. The
//      next attempt is made when the record has grown by a quarter, so that it costs next to nothing
//      for each operator that attempts are in vain.
// Without a budget nothing is refused for want of room, and all that is resident may be cut.

#pragma once

#include "engine/ledger.h"

namespace rematfn {

class Trimmer {
 public:
  explicit Trimmer(Ledger& ledger) : ledger_(ledger) {}

  static constexpr std::size_t kMostOperations = std::size_t{1} << 18;
  void limit(std::size_t most) { most_ = beyond_ = most; }
  // The record is too long from so many live operations on.
  [[nodiscard]] std::size_t beyond() const { return beyond_; }
  void trim();

 private:
  struct Goal;
  void trim(Table& table, Goal& goal);
  [[nodiscard]] bool has_ancestors(const Version& version, std::size_t count);

  Ledger& ledger_;
  std::size_t most_ = kMostOperations;
  std::size_t beyond_ = kMostOperations;
};

}  // namespace rematfn
