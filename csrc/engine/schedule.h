// SPDX-License-Identifier: Apache-2.0
//
// schedule.h: what is replayed before each call of a record, and what is evicted after each.
//
// Note [A schedule is carried out]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
// A score decides at each eviction anew, by what it knows of one value. A schedule was decided for the
// whole record, by what is in memory at each point of it (planning/shortening.h). A call that runs as
// recorded carries it out:
//   1. Before a call of the program its replays run, in the order of the schedule. One whose results are
//      there is passed over. If inputs are missing all the same, these are replayed as always.
//   2. What the schedule does not read before it is made again is evicted at once, after the last reader. So no
//      victim has to be chosen: what is resident is what the schedule takes into account.
//   3. What the program drops stays, as long as the schedule reads it.
// A call that departs from its record, that has no room for a replay, or in which a level begins, goes on
// by the score (Guide::schedule()). A schedule moves evictions and replays, never what is computed.

#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace rematfn {

// Numbers, in consecutive groups.
class Groups {
 public:
  void add(std::uint32_t item) { items_.push_back(item); }
  void end_group() { ends_.push_back(items_.size()); }
  [[nodiscard]] std::span<const std::uint32_t> operator[](std::size_t group) const {
    const std::size_t begin = begin_of(group);
    return std::span(items_).subspan(begin, ends_[group] - begin);
  }
  [[nodiscard]] std::size_t begin_of(std::size_t group) const { return group == 0 ? 0 : ends_[group - 1]; }
  [[nodiscard]] std::size_t end_of(std::size_t group) const { return ends_[group]; }
  [[nodiscard]] const std::vector<std::uint32_t>& items() const { return items_; }

 private:
  std::vector<std::uint32_t> items_;
  std::vector<std::size_t> ends_;
};

struct Schedule {
  Groups replays;            // calls of the record, by the call they come before; the last: by the end
  Groups spent_after_replay;  // values, by place in `replays`
  Groups spent_after_call;    // by call of the record
};

}  // namespace rematfn
