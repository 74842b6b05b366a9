// SPDX-License-Identifier: Apache-2.0
//
// burial.h: buries what the program drops, or keeps it for what is replayed from it.

#pragma once

#include "engine/room.h"

namespace rematfn {

class Burial {
 public:
  explicit Burial(Room& room) : room_(room) {}

  // The program has no tensor on `version` any more.
  void bury(Ref<Version> version, Store::HoldBytes hold);
  // Whether the program, or a queued replay, has something that is to be replayed from a kept value.
  [[nodiscard]] bool is_kept_for_somebody(const Version& version);

 private:
  void drop_kept_for(const Version& version);

  // The program has dropped a constant, and what was made from it becomes constants, if that takes no replay,
  // nor more than it is worth. See Note [What an old value is needed for]
  void free_dropped(const Version& version);

  Room& room_;
  bool retains_ = false;  // something has been kept in this way
  std::uint64_t walked_in_vain_ = 0;  // `next_order` when free_dropped() last walked far, and freed nothing
};

}  // namespace rematfn
