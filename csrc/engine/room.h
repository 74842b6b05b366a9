// SPDX-License-Identifier: Apache-2.0
//
// room.h: room is made: what goes is chosen, and goes.

#pragma once

#include "engine/evictor.h"
#include "engine/moves.h"

namespace rematfn {

class Room : public Moves {
 public:
  using Moves::Moves;

  Evictor evictor{*this};
  // While replays run, nothing gives way to them.
  bool is_replaying = false;

  // Evicts until `table` and every table around it can hold `nbytes` more. Throws NoRoom.
  void make_room(Table& table, std::size_t nbytes);
  // Whether it looks as if it can.
  [[nodiscard]] bool could_make_room(const Table& table, std::size_t nbytes);
  // An allocation of about `nbytes` failed: evicts about twice as much from all levels. False if
  // nothing could go.
  bool evict_after_failure(std::size_t nbytes);
  // Evicts about so much of `table`, as far as it can, and waits until it has gone. Returns how much has.
  std::size_t evict_bytes(Table& table, std::size_t nbytes);
  // The bytes of `version`, for which the budget has room, come from its copy, if need be after others have
  // gone from the device. If it is lost, `version` is to be replayed, or this throws.
  void fetch(Version& version);
  // Begins to fetch what will be read soon, as far as there is room that nothing needs before. What will
  // never be read goes for it.
  void fetch_ahead();

 private:
  // What `table` holds if all goes that may, with so many bytes more.
  [[nodiscard]] std::size_t least_with(const Table& table, std::size_t nbytes);
  // Of a budget that others share.
  virtual void take_from_others(Table& table, std::size_t nbytes) = 0;
  bool clear_for(const Version& version);
};

}  // namespace rematfn
