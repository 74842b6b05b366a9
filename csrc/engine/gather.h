// SPDX-License-Identifier: Apache-2.0
//
// gather.h: what has to be resident together, made so one after another.

#pragma once

#include <deque>
#include <span>

#include "engine/domain.h"

namespace rematfn {

// What is there stays while the next is made: near the least budget more fits so than by one queue of
// replays for all. Throws NoRoom.
inline void gather(Domain& domain, std::span<Version* const> wanted) {
  std::deque<Pinned> there;
  for (Version* version : wanted) {
    domain.materialize({&version, 1});
    there.emplace_back(*version);
  }
}

}  // namespace rematfn
