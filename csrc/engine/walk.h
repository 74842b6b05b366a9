// SPDX-License-Identifier: Apache-2.0
//
// walk.h: a walk over recorded operations that visits each once.
//
// Note [Closure walks are capped]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
// The default score sums the cost of a candidate's evicted ancestors. After some thousand evictions
// that closure can be most of the program, and walking it for every candidate would make eviction
// quadratic. The first 256 operations decide: what lies beyond only says "very expensive" more
// loudly.
//
// Each version that leaves or comes back needs a walk as well, to mark stale what depends on it. Where
// a guide knows the next uses, what lies far away changes a score little, and 16 operations do: plans
// cost what they did, and the simulator is up to 1.8 times as fast, which a search makes use of.
// Without a guide a score is made of ancestors alone, and replays would rise by a hundredth.

#pragma once

#include <cstdint>
#include <vector>

#include "engine/lineage.h"

namespace rematfn {

inline constexpr std::size_t kWalkCap = 256;
inline constexpr std::size_t kGuidedWalkCap = 16;
inline constexpr std::size_t kNoCap = static_cast<std::size_t>(-1);

// What the walks of a domain have in common.
struct Walks {
  std::uint64_t last = 0;  // the number of the latest
  std::vector<Operation*> found;
};

// Of a domain's walks the latest counts: one that begins ends those before.
class Walk {
 public:
  explicit Walk(Walks& walks) : number_(++walks.last), walks_(walks) { walks.found.clear(); }

  // False if the walk has been there.
  bool visit(Operation& operation) {
    if (!mark(operation)) return false;
    walks_.found.push_back(&operation);
    return true;
  }
  // The same, and the walk does not go on from there.
  bool mark(Operation& operation) {
    return std::exchange(operation.last_walk, number_) != number_;
  }
  // Goes on to the operations that read `version`, as long as there are fewer than `cap`.
  void visit_readers(const Version& version, std::size_t cap) {
    for (const Input* use = version.readers; use != nullptr && size() < cap; use = use->next) {
      visit(*use->reader);
    }
  }
  [[nodiscard]] std::size_t size() const { return walks_.found.size(); }
  [[nodiscard]] Operation& operator[](std::size_t i) const { return *walks_.found[i]; }
  // Whether no other has begun since.
  [[nodiscard]] bool is_latest() const { return walks_.last == number_; }

 private:
  const std::uint64_t number_;
  Walks& walks_;
};

}  // namespace rematfn
