// SPDX-License-Identifier: Apache-2.0
#include "engine/replays.h"

#include <c10/util/ScopeExit.h>

#include <algorithm>
#include <cassert>

namespace rematfn {

// See Note [A handle may outlive its storage]
bool Replays::is_missing(Version& version) {
  if (version.place() == Place::kLeaving) room_.call_back(version);
  if (version.place() == Place::kComing) room_.let_come(version);
  if (version.has_bytes() && room_.store.lost(version)) {
    room_.lose_tensor(version);
    if (room_.store.forget(version)) room_.leave(version);
  }
  return !version.is_here();
}

void Replays::run(Operation& operation) {
  if (left == 0) throw thrashing(*operation.table);  // Rule 5
  --left;
  assert(std::ranges::all_of(operation.inputs,
                             [](const Input& i) { return i.version->is_here(); }));
  for (Input& input : operation.inputs) pin(*input.version);
  {
    const auto unpin_all = c10::make_scope_exit([&] {
      for (Input& input : operation.inputs) unpin(*input.version);
    });
    room_.make_room(*operation.table, operation.replay_bytes());
    room_.store.serve_signals();
    room_.observers.note_replay(operation);
    operation.replay(room_);
  }
  for (Table* t = operation.table.get(); t != nullptr; t = t->enclosing.get()) t->settle();
  room_.observers.note_replayed(operation);
  room_.thrash.note_replay(operation.cost);
  Guide* const guide = room_.observers.guide.get();
  if (guide == nullptr || room_.thrash.replayed() <= guide->most_replayed(room_.clock)) return;
  if (!guide->is_as_recorded() && guide->foresees()) room_.give_up_plan();
  if (room_.floor.moved) {
    guide->note_broken();
    room_.evictor.move_from_now_on();  // Rule 6
  }
}

void Replays::fetch(Version& version) {
  expect(version);  // so that its copy is not dropped for the room that it needs
  try {
    room_.make_room(*version.table, version.nbytes);
  } catch (...) {
    unexpect(version);
    throw;
  }
  unexpect(version);
  room_.store.serve_signals();
  room_.fetch(version);
}

void Replays::drop_if_useless(Version& version) {
  if (!version.may_go() || !version.producer) return;
  if (room_.observers.schedule() != nullptr) return;  // which says what goes
  // See Note [A kept value outlives the program's tensors]
  if (is_wanted(version) || burial_.is_kept_for_somebody(version)) return;
  room_.drop(version);
}

NoRoom Replays::thrashing(Table& table) {
  return {&table, table.budget + table.budget / 8 + 1, table.used_bytes(),
          /*thrashing=*/true};
}

}  // namespace rematfn
