// SPDX-License-Identifier: Apache-2.0
//
// What becomes of a version's bytes: they go, and come back. See Note [A version goes by a way]
#include "engine/domain.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <deque>
#include <iterator>
#include <tuple>

#include "base/errors.h"
#include "engine/guide.h"

namespace rematfn {
namespace {

// Of the first few, or null. Copies arrive about in the order in which they began, and there may be many.
Version* first_arrived(const std::deque<Version*>& moving) {
  constexpr std::ptrdiff_t kFew = 8;
  const auto end = moving.begin() + std::min<std::ptrdiff_t>(std::ssize(moving), kFew);
  const auto found =
      std::find_if(moving.begin(), end, [](Version* v) { return v->copied_by->has_arrived(*v); });
  return found == end ? nullptr : *found;
}

}  // namespace

void Domain::evict(Version& version) {
  Way& way = *version.way;
  if (journal) journal->note_score(version, evictor.score_of(version));
  const Place place = way.leave(version);
  if (place == Place::kHere) return;
  Statistics& statistics = version.table->statistics;
  ++statistics.evictions;
  if (way.keeps_copy()) {
    version.copied_by = &way;
    ++statistics.moves;
    statistics.moved_bytes += version.nbytes;
  }
  if (place == Place::kAway) {
    return lose_bytes(version, way.keeps_copy() ? Journal::What::kMoved : Journal::What::kDropped);
  }
  version.table->delist(version);
  version.table->leaving_bytes += version.nbytes;
  version.place = Place::kLeaving;
  leaving_.push_back(&version);
}

void Domain::drop(Version& version) {
  if (version.copied_by != nullptr) discard_copy(version);  // which may be reading the bytes
  store.drop(version);
  lose_bytes(version, Journal::What::kReleased);
}

void Domain::leave(Version& version) {
  if (version.copied_by != nullptr) discard_copy(version);
  lose_bytes(version, Journal::What::kReleased);
}

void Domain::lose_bytes(Version& version, Journal::What how) {
  version.table->delist(version);
  version.table->discharge(version.nbytes);
  if (journal) journal->note(how, version);
  if (version.trimmed) version.table->discharge_trimmed(version.nbytes);
  version.trimmed = false;
  version.place = Place::kAway;
  expect_use(version);
  neighbourhood.note_change(version, /*came_back=*/false, foresees());
}

void Domain::arrive(Version& version) {
  version.place = Place::kHere;
  version.raw = false;  // See Note [Uninitialised memory is kept]
  version.table->charge(version.nbytes);
  version.table->enlist(version);
  if (journal) journal->note(Journal::What::kReplayed, version);
  neighbourhood.note_change(version, /*came_back=*/true, foresees());
}

void Domain::fetch(Version& version) {
  begin_to_fetch(version);
  if (version.place == Place::kComing) let_come(version);
}

// What has a copy and is away.
void Domain::expect_use(Version& version) {
  const bool is_known = version.next_use != kUnknown && version.next_use != kNever;
  if (version.copied_by != nullptr && is_known) expected_.insert(Use(version));
}

void Domain::begin_to_fetch(Version& version) {
  for (;;) {
    try {
      return start_to_fetch(version, /*wanted=*/true);
    } catch (const c10::OutOfMemoryError&) {
      if (!evict_after_failure(version.nbytes)) throw;
    }
  }
}

void Domain::start_to_fetch(Version& version, bool wanted) {
  expected_.erase(Use(version));
  version.table->charge(version.nbytes);
  try {
    version.place = version.copied_by->bring_back(version);
  } catch (const CopyLost& why) {
    version.table->discharge(version.nbytes);
    return lose_copy(version, why, wanted);
  } catch (...) {
    version.table->discharge(version.nbytes);
    expect_use(version);
    throw;
  }
  if (journal) journal->note(Journal::What::kReturned, version);
  ++version.table->statistics.returns;
  version.table->statistics.returned_bytes += version.nbytes;
  if (version.place == Place::kHere) return finish_coming(version);
  coming_.push_back(&version);
  version.table->coming_bytes += version.nbytes;
}

void Domain::let_come(Version& version, bool wanted) {
  try {
    std::ignore = version.copied_by->wait(version);
  } catch (const CopyLost& why) {
    stop_coming(version);
    version.place = Place::kAway;
    version.table->discharge(version.nbytes);
    if (journal) journal->note(Journal::What::kTurnedBack, version);
    return lose_copy(version, why, wanted);
  }
  stop_coming(version);
  finish_coming(version);
}

void Domain::finish_coming(Version& version) {
  version.place = Place::kHere;
  version.copied_by = nullptr;
  if (!version.producer && version.readers != nullptr) store.keep_alive(version);
  version.table->enlist(version);
  neighbourhood.note_change(version, /*came_back=*/true, foresees());
}

void Domain::stop_coming(Version& version) {
  coming_.erase(std::ranges::find(coming_, &version));
  version.table->coming_bytes -= version.nbytes;
}

// What nothing can compute again is an error for whoever wants it, and for nobody before.
void Domain::lose_copy(Version& version, const CopyLost& why, bool wanted) {
  if (!version.producer && !wanted) return;
  if (!version.producer) raise(ErrorKind::kOffload, why.what());
  discard_copy(version);
  neighbourhood.note_change(version, /*came_back=*/false, foresees());
}

void Domain::stop_leaving(Version& version) {
  leaving_.erase(std::ranges::find(leaving_, &version));
  version.table->leaving_bytes -= version.nbytes;
}

void Domain::finish_leaving(Version& version) {
  const Place place = version.copied_by->wait(version);
  stop_leaving(version);
  if (place == Place::kAway) return lose_bytes(version, Journal::What::kMoved);
  version.place = Place::kHere;
  version.copied_by = nullptr;
  version.table->enlist(version);
}

void Domain::call_back(Version& version) {
  discard_copy(version);
  version.table->enlist(version);
}

void Domain::discard_copy(Version& version) {
  if (version.place == Place::kLeaving) stop_leaving(version);
  if (version.place == Place::kComing) stop_coming(version);
  if (version.has_bytes()) version.place = Place::kHere;
  if (version.place == Place::kAway) {
    expected_.erase(Use(version));
    if (journal) journal->note(Journal::What::kForgotten, version);
  }
  version.copied_by->discard(version);
  version.copied_by = nullptr;
}

void Domain::note_arrivals() {
  while (Version* const gone = first_arrived(leaving_)) finish_leaving(*gone);
  while (Version* const here = first_arrived(coming_)) let_come(*here, /*wanted=*/false);
}

void Domain::let_one_leave(const Table& table) {
  const auto is_its = [&](const Version* v) { return is_within(v->table.get(), table); };
  finish_leaving(**std::ranges::find_if(leaving_, is_its));
}

bool Domain::turn_one_back(const Table& table) {
  Version* last = nullptr;
  for (Version* v : coming_) {
    if (!is_within(v->table.get(), table)) continue;
    if (last == nullptr || v->next_use >= last->next_use) last = v;
  }
  if (last == nullptr) return false;
  turn_back(*last);
  return true;
}

void Domain::turn_back(Version& version) {
  version.copied_by->turn_back(version);
  stop_coming(version);
  version.place = Place::kAway;
  version.table->discharge(version.nbytes);
  if (journal) journal->note(Journal::What::kTurnedBack, version);
  expect_use(version);
  ++version.table->statistics.turned_back;
}

void Domain::fetch_ahead() {
  while (guide && !expected_.empty()) {
    const Use& next = *expected_.begin();
    Version& version = *next.version;
    if (!version.copied_by->is_due(version, next.when - clock) || !clear_for(version)) return;
    const std::size_t coming = coming_.size();
    try {
      start_to_fetch(version, /*wanted=*/false);
    } catch (const c10::Error&) {
      return;  // the device has no room, or the process, whatever the budget says
    }
    // It got the room of another that came, which would get it back, and so on.
    if (version.place == Place::kComing && coming_.size() <= coming) return;
  }
}

// Makes room for what will be read soon, of what will never be read; false if that is not enough.
bool Domain::clear_for(const Version& version) {
  const std::size_t wanted = version.nbytes + guide->bytes_ahead();
  for (Table* t = version.table.get(); t != nullptr; t = t->enclosing.get()) {
    if (t->shared) return false;
    while (t->budget != kNoBudget && t->used_bytes() + wanted > t->budget) {
      if (!guide->may_know_useless()) return false;
      guide->note_useless(evictor.evict_useless(*t));
    }
  }
  return true;
}

void Domain::end_moves(const Table& table) {
  while (turn_one_back(table)) {}
  while (table.leaving() > 0) let_one_leave(table);
}

}  // namespace rematfn
