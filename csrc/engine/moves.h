// SPDX-License-Identifier: Apache-2.0
//
// moves.h: a version's bytes go, and come back, by its way. See Note [A version goes by a way]

#pragma once

#include "engine/ledger.h"

namespace rematfn {

class Moves : public Ledger {
 public:
  using Ledger::Ledger;

  // A candidate goes, by its way.
  void evict(Version& version);
  // Frees the bytes of one that can be replayed and is of no use now.
  void drop(Version& version);
  // `version` has lost its bytes already.
  void note_gone(Version& version);
  // The bytes of `version`, for which there is room, come from its copy. If that is lost, `version` is to
  // be replayed; if it cannot be, this throws if it is `wanted`.
  void begin_to_fetch(Version& version, bool wanted);
  // `version` is leaving, and stays.
  void call_back(Version& version);
  // `version` is coming, and goes back.
  void turn_back(Version& version);
  // `version` is coming: waits for it. If its copy is lost: as begin_to_fetch().
  void let_come(Version& version, bool wanted = true);
  // Takes note of what has arrived by now.
  void note_arrivals();
  // What is leaving `table`, or one inside it, has gone when this returns; what was coming goes back.
  void end_moves(const Table& table);
  // Waits until what was the first to leave `table`, or one inside it, has gone.
  void let_one_leave(const Table& table);
  // Of what comes to `table`, or to one inside it, the last to be read goes back. False: nothing comes.
  bool turn_one_back(const Table& table);
  // Of what is packed in `table`, or in one inside it, a copy is dropped, or moves on to another way. False: there
  // is none that may.
  bool relieve_one_copy(const Table& table);
  // A version becomes `heir`'s, with its copy; one that is still being made is discarded.
  void give(Version& version, Table& heir);

 private:
  void finish_leaving(Version& version);
  void lose_copy(Version& version, const CopyLost& why, bool wanted);
  // It is replayed when it is read.
  void drop_copy(Version& version);
};

}  // namespace rematfn
