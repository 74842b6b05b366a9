// SPDX-License-Identifier: Apache-2.0
//
// replays.h: one recorded operation runs again, for those that choose which.

#pragma once

#include "engine/burial.h"
#include "engine/room.h"

namespace rematfn {

class Replays {
 public:
  Replays(Room& room, Burial& burial) : room_(room), burial_(burial) {}

  // So many more may run. See Note [Replay runs in program order], Rule 5
  std::size_t left = 0;

  // Whether the version is not here. What is leaving is called back.
  [[nodiscard]] bool is_missing(Version& version);
  // Runs an operation whose inputs are there. Throws NoRoom.
  void run(Operation& operation);
  // Has the bytes of a version that has a copy brought here.
  void fetch(Version& version);
  void drop_if_useless(Version& version);
  [[nodiscard]] static NoRoom thrashing(Table& table);

 private:
  Room& room_;
  Burial& burial_;
};

}  // namespace rematfn
