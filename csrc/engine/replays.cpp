// SPDX-License-Identifier: Apache-2.0
//
// replays.cpp: the part of Room that runs one recorded operation again, for those that choose which.

#include <c10/util/Exception.h>
#include <c10/util/ScopeExit.h>

#include <algorithm>
#include <cassert>

#include "engine/room.h"

namespace rematfn {

// See Note [A handle may outlive its storage]
bool Room::is_missing(Version& version) {
  if (version.place() == Place::kLeaving) call_back(version);
  if (version.place() == Place::kComing) let_come(version);
  if (version.has_bytes() && store.lost(version)) {
    lose_tensor(version);
    if (store.forget(version)) note_gone(version);
  }
  return !version.is_here();
}

void Room::replay(Operation& operation) {
  if (replays_left == 0) throw thrashing(*operation.table);  // See Note [Replay runs in program order], Rule 5
  --replays_left;
  assert(std::ranges::all_of(operation.inputs,
                             [](const Input& i) { return i.version->is_here(); }));
  for (Input& input : operation.inputs) pin(*input.version);
  {
    const auto unpin_all = c10::make_scope_exit([&] {
      for (Input& input : operation.inputs) unpin(*input.version);
    });
    make_room(*operation.table, operation.replay_bytes());
    store.serve_signals();
    observers.note_replay(operation);
    operation.replay(*this);
  }
  for (Table* t = operation.table.get(); t != nullptr; t = t->enclosing.get()) t->settle();
  observers.note_replayed(operation);
  thrash.note_replay(operation.cost);
  Guide* const guide = observers.guide.get();
  if (guide == nullptr || thrash.replayed() <= guide->most_replayed(clock)) return;
  if (!guide->is_as_recorded() && guide->foresees()) give_up_plan();
  guide->note_broken();
  evictor.move_from_now_on();  // See Note [Near the floor], Rule 4
}

void Room::fetch(Version& version) {
  expect(version);  // so that its copy is not dropped for the room that it needs
  try {
    make_room(*version.table, version.nbytes);
  } catch (...) {
    unexpect(version);
    throw;
  }
  unexpect(version);
  store.serve_signals();
  for (bool begun = false; !begun;) {
    try {
      begin_to_fetch(version, /*wanted=*/true);
      begun = true;
    } catch (const c10::OutOfMemoryError&) {
      if (!evict_after_failure(version.nbytes)) throw;
    }
  }
  if (version.place() == Place::kComing) let_come(version);
}

void Room::drop_if_useless(Version& version) {
  if (!version.may_go() || !version.producer) return;
  if (observers.schedule() != nullptr) return;  // which says what goes
  // See Note [A kept value outlives the program's tensors]
  if (is_wanted(version) || is_kept_for_somebody(version)) return;
  drop(version);
}

NoRoom Room::thrashing(Table& table) {
  return {&table, table.budget + table.budget / 8 + 1, table.used_bytes(),
          /*thrashing=*/true};
}

}  // namespace rematfn
