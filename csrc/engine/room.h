// SPDX-License-Identifier: Apache-2.0
//
// room.h: room is made: what goes is chosen, and goes. One operation is replayed in it, and what the program drops is
// freed, or kept for replays.

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
  // An allocation of about `nbytes` failed: evicts about twice as much from all levels, and at least
  // a sixteenth of what they hold. False if nothing could go.
  bool evict_after_failure(std::size_t nbytes);
  // Evicts about so much of `table`, as far as it can, and waits until it has gone. Returns how much has.
  std::size_t evict_bytes(Table& table, std::size_t nbytes);
  // Begins to fetch what will be read soon, as far as there is room that nothing needs before. What will
  // never be read goes for it.
  void fetch_ahead();

  // burial.cpp
  // The program has no tensor on `version` any more.
  void bury(Ref<Version> version, Store::HoldBytes hold);

  // replays.cpp
  // So many more may run. See Note [Replay runs in program order], Rule 5
  std::size_t replays_left = 0;
  // Whether the version is not here. What is leaving is called back.
  [[nodiscard]] bool is_missing(Version& version);
  // Runs an operation whose inputs are there. Throws NoRoom.
  void replay(Operation& operation);
  // Has the bytes of a version that has a copy brought here, if need be after others have gone from the device. If
  // the copy is lost, `version` is to be replayed, or this throws. Throws NoRoom.
  void fetch(Version& version);
  void drop_if_useless(Version& version);
  [[nodiscard]] static NoRoom thrashing(Table& table);

  // The program has dropped a constant, and what was made from it becomes constants, if that takes no replay;
  // nor, if `weighs`, where more could go than the constant. See Note [What an old value is needed for]
  void free_dropped(const Version& version, bool weighs);

 private:
  // What `table` holds if all goes that may, with so many bytes more.
  [[nodiscard]] std::size_t least_with(const Table& table, std::size_t nbytes);
  // Of a budget that others share.
  virtual void take_from_others(Table& table, std::size_t nbytes) = 0;
  bool clear_for(const Version& version);
  // Whether the program, or a queued replay, has something that is to be replayed from a kept value.
  [[nodiscard]] bool is_kept_for_somebody(const Version& version);
  [[nodiscard]] bool makes_what_is_away(const Version& version) const;
  void drop_kept_for(const Version& version);

  bool retains_ = false;  // something has been kept though the program has dropped it
  std::uint64_t walked_in_vain_ = 0;  // `next_order` when free_dropped() last walked far, and freed nothing
};

}  // namespace rematfn
