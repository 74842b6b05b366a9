// SPDX-License-Identifier: Apache-2.0
#include "engine/room.h"

#include <c10/util/Exception.h>

#include <algorithm>

namespace rematfn {

void Room::make_room(Table& table, std::size_t nbytes) {
  for (Table* t = &table; t != nullptr; t = t->enclosing.get()) {
    if (t->budget == kNoBudget) [[unlikely]] continue;
    const std::size_t rounded = t->rounded_up();
    if (t->shared ? claim(*t, nbytes) : t->used_bytes() + nbytes + rounded <= t->budget) [[likely]] continue;
    list_candidates();
    if (observers.schedule() != nullptr) observers.guide->note_lack(t->used_bytes() + nbytes + rounded - t->budget);
    if (is_moving()) note_arrivals();
    // Whoever cannot have enough takes nothing.
    std::size_t least = least_with(*t, nbytes);
    if (least > t->budget && !is_replaying && t->give_back_dropped()) least = least_with(*t, nbytes);
    if (least > t->budget && (is_replaying || !t->give_way(least, nbytes))) {
      if (!is_replaying) t->note_need(least);
      throw NoRoom{t, least, least - nbytes};
    }
    if (t->shared) {
      take_from_others(*t, nbytes);
      continue;
    }
    const std::size_t wanted = t->used_bytes() + nbytes + rounded;  // by now it may fit
    if (wanted > t->budget) evictor.evict_by_price(*t, wanted - t->budget);
    while (t->used_bytes() + nbytes + rounded > t->budget) {
      // See Note [A version goes by a way], Rule 2
      const std::size_t leaving = t->leaving();
      const bool enough_leaves = t->used_bytes() - leaving + nbytes + rounded <= t->budget;
      if (leaving > 0 && (enough_leaves || !evictor.evict_one(*t))) {
        let_one_leave(*t);
      } else if (leaving == 0 && !evictor.evict_one(*t) && !turn_one_back(*t)) {
        if (t->used_bytes() + nbytes <= t->budget) break;
        if (!is_replaying && t->give_way(t->used_bytes() + nbytes, nbytes)) break;
        if (!is_replaying) t->note_need(t->used_bytes() + nbytes);
        throw NoRoom{t, t->used_bytes() + nbytes, t->used_bytes()};
      }
    }
  }
}

// What is packed is looked at only where it decides.
std::size_t Room::least_with(const Table& table, std::size_t nbytes) {
  const std::size_t least = table.used_bytes() - table.evictable_bytes() + nbytes;
  return least > table.budget ? least - relievable_bytes(table) : least;
}

bool Room::could_make_room(const Table& table, std::size_t nbytes) {
  for (const Table* t = &table; t != nullptr; t = t->enclosing.get()) {
    if (t->budget == kNoBudget || t->used_bytes() + nbytes <= t->budget) continue;
    list_candidates();
    if (least_with(*t, nbytes) > t->budget) return false;
  }
  return true;
}

bool Room::evict_after_failure(std::size_t nbytes) {
  // At a failure a device's allocator gives back all that it keeps, and waits for the device: better not often.
  return root != nullptr && evict_bytes(*root, std::max(2 * nbytes, root->resident_bytes() / 16)) > 0;
}

std::size_t Room::evict_bytes(Table& table, std::size_t nbytes) {
  const std::size_t before = table.resident_bytes();
  if (is_moving()) end_moves(table);
  while (before - table.resident_bytes() < nbytes && evictor.evict_one(table)) end_moves(table);
  return before - table.resident_bytes();
}

void Room::fetch_ahead() {
  while (foresees()) {
    Version* const version = read_next();
    if (version == nullptr || !version->copied_by()->is_due(*version, version->next_use - record_clock()) ||
        !clear_for(*version)) {
      return;
    }
    const std::size_t were_coming = coming().size();
    try {
      begin_to_fetch(*version, /*wanted=*/false);
    } catch (const c10::Error&) {
      return;  // the device has no room, or the process, whatever the budget says
    }
    // It got the room of another that came, which would get it back, and so on.
    if (version->place() == Place::kComing && coming().size() <= were_coming) return;
  }
}

// Makes room for what will be read soon, of what will never be read; false if that is not enough.
bool Room::clear_for(const Version& version) {
  Guide& guide = *observers.guide;
  const std::size_t wanted = version.nbytes + guide.bytes_ahead();
  for (Table* t = version.table.get(); t != nullptr; t = t->enclosing.get()) {
    if (t->shared) return false;
    while (t->budget != kNoBudget && t->used_bytes() + wanted > t->budget) {
      if (!guide.may_know_useless()) return false;
      guide.note_useless(evictor.evict_useless(*t));
    }
  }
  return true;
}

}  // namespace rematfn
