// SPDX-License-Identifier: Apache-2.0
#include "engine/moves.h"

#include <algorithm>
#include <deque>
#include <iterator>
#include <tuple>
#include <vector>

#include "base/errors.h"

namespace rematfn {
namespace {

// Of the first few, or null. Copies arrive about in the order in which they began, and there may be many.
Version* first_arrived(const std::deque<Version*>& moving) {
  constexpr std::ptrdiff_t kFew = 8;
  const auto end = moving.begin() + std::min<std::ptrdiff_t>(std::ssize(moving), kFew);
  const auto found =
      std::find_if(moving.begin(), end, [](Version* v) { return v->copied_by()->has_arrived(*v); });
  return found == end ? nullptr : *found;
}

}  // namespace

void Moves::evict(Version& version) {
  Way& way = *version.way;
  const Place place = way.leave(version);
  if (place == Place::kHere) return;
  observers.note_eviction(version, way.keeps_copy());
  if (place == Place::kLeaving) return start_leaving(version, way);
  way.keeps_copy() ? lose_bytes(version, Journal::What::kMoved, &way)
                   : lose_bytes(version, Journal::What::kDropped);
}

void Moves::drop(Version& version) {
  store.drop(version);
  note_gone(version);
}

void Moves::note_gone(Version& version) {
  if (version.copied_by() != nullptr) [[unlikely]] discard_copy(version);
  lose_bytes(version, Journal::What::kReleased);
}

void Moves::begin_to_fetch(Version& version, bool wanted) {
  start_coming(version);
  Place place;
  try {
    place = version.copied_by()->bring_back(version);
  } catch (const CopyLost& why) {
    stop_coming(version, /*again=*/false);
    return lose_copy(version, why, wanted);
  } catch (...) {
    stop_coming(version, /*again=*/true);
    throw;
  }
  observers.note_return(version);
  place == Place::kHere ? arrive_by_copy(version) : await(version);
}

void Moves::let_come(Version& version, bool wanted) {
  try {
    std::ignore = version.copied_by()->wait(version);
  } catch (const CopyLost& why) {
    stop_coming(version, /*again=*/false);
    observers.note(Journal::What::kTurnedBack, version);
    return lose_copy(version, why, wanted);
  }
  arrive_by_copy(version);
}

// What nothing can compute again is an error for whoever wants it, and for nobody before.
void Moves::lose_copy(Version& version, const CopyLost& why, bool wanted) {
  if (!version.producer && !wanted) return;
  if (!version.producer) raise(ErrorKind::kOffload, why.what());
  drop_copy(version);
}

void Moves::drop_copy(Version& version) {
  discard_copy(version);
  neighbourhood.note_change(version, /*came_back=*/false, foresees());
}

void Moves::finish_leaving(Version& version) {
  if (version.copied_by()->wait(version) == Place::kHere) return stay(version);
  lose_bytes(version, Journal::What::kMoved);
}

void Moves::call_back(Version& version) {
  discard_copy(version);
  enlist(version);
}

void Moves::note_arrivals() {
  while (Version* const gone = first_arrived(leaving())) finish_leaving(*gone);
  while (Version* const here = first_arrived(coming())) let_come(*here, /*wanted=*/false);
}

void Moves::let_one_leave(const Table& table) {
  const auto is_its = [&](const Version* v) { return is_within(v->table.get(), table); };
  finish_leaving(**std::ranges::find_if(leaving(), is_its));
}

bool Moves::turn_one_back(const Table& table) {
  Version* last = nullptr;
  for (Version* v : coming()) {
    if (!is_within(v->table.get(), table)) continue;
    if (last == nullptr || v->next_use >= last->next_use) last = v;
  }
  if (last == nullptr) return false;
  turn_back(*last);
  return true;
}

void Moves::turn_back(Version& version) {
  version.copied_by()->turn_back(version);
  stop_coming(version, /*again=*/true);
  observers.note_turned_back(version);
}

// The one that costs the least for its bytes, of those that can be.
bool Moves::relieve_one_copy(const Table& table) {
  struct Relief {
    double price;
    Version* version;
    Way* way;
  };
  std::vector<Relief> found;
  for (Version* v : packed()) {
    Way* const way = is_within(v->table.get(), table) ? relief_of(*v) : nullptr;
    if (way != nullptr) found.push_back({way->cost(*v) / static_cast<double>(v->packed_bytes), v, way});
  }
  std::ranges::stable_sort(found, {}, &Relief::price);
  for (const auto& [price, version, way] : found) {
    if (!way->keeps_copy()) return drop_copy(*version), true;
    if (way->take_copy(*version, *version->copied_by())) return hand_over(*version, *way), true;
  }
  return false;
}

void Moves::end_moves(const Table& table) {
  while (turn_one_back(table)) {}
  while (table.leaving() > 0) let_one_leave(table);
}

void Moves::give(Version& version, Table& heir) {
  if (version.place() == Place::kLeaving) call_back(version);
  if (version.place() == Place::kComing) turn_back(version);
  transfer(version, heir);
}

}  // namespace rematfn
