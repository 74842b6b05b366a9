// SPDX-License-Identifier: Apache-2.0
//
// candidates.cpp: the part of Ledger that lists what may go, by which way, and what keeps it from going.
#include <algorithm>
#include <utility>

#include "engine/ledger.h"

namespace rematfn {

// Note [Candidates are listed once something has to go]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
// Most levels without a budget never evict, nor do those whose budget is ample. Until something has to
// go or to be replayed, no table of the domain lists its candidates, and no operator pays for that.
void Ledger::list_candidates() {
  if (std::exchange(lists_candidates_, true)) return;
  for_each_table([&](Table& table) {
    for (Version* v = table.oldest; v != nullptr; v = v->next) {
      if (v->is_here()) enlist(*v);
    }
  });
}

// See Note [A version goes by a way]
void Ledger::enlist(Version& version) {
  // See Note [Candidates are listed once something has to go]
  if (!lists_candidates_ || version.nbytes == 0 || version.raw) [[unlikely]] return;
  Table& table = *version.table;
  if (!table.has_copies()) [[likely]] {
    version.way = drop_and_replay.applies(version) ? &drop_and_replay : nullptr;
  } else {
    version.way = cheapest_way(version, [](const Way&) { return true; });
  }
  if (version.way == nullptr) return;
  version.slot = table.candidates.size();
  Candidate& c = table.candidates.emplace_back();  // See Note [Records are filled in place]
  c.nbytes = static_cast<double>(version.nbytes);
  c.cost = version.way->cost(version);
  c.last_access = version.last_access;
  c.next_use = version.next_use;
  c.kept = version.kept;
  c.consumed = version.consumed;
  c.pinned = version.pins > 0;
  c.pending = version.pending > 0;
  table.candidate_versions.push_back(&version);
  if (version.pins > 0) [[unlikely]] return;
  table.loose_bytes_ += version.nbytes;
  offer(version);
}

void Ledger::delist(Version& version) {
  if (!version.is_candidate()) return;
  Table& table = *version.table;
  const std::size_t slot = version.slot;
  if (version.pins == 0) [[likely]] table.loose_bytes_ -= version.nbytes;
  table.candidates[slot] = table.candidates.back();
  table.candidate_versions[slot] = table.candidate_versions.back();
  table.candidate_versions[slot]->slot = slot;
  table.candidates.pop_back();
  table.candidate_versions.pop_back();
  version.slot = kNoSlot;
  table.batch.remove(version);
  recent.remove(version);
}

void Ledger::relist(Version& version) {
  if (!version.table || !version.table->has_copies()) return;
  delist(version);
  if (version.is_here()) enlist(version);
}

void Ledger::offer(Version& version) {
  Table& table = *version.table;
  if (table.leaves_early && version.recent_slot == kNoSlot) [[unlikely]] recent.add(version, due_to_go(version));
  Batch& batch = table.batch;
  if (batch.evictions_left == 0 || version.batch_slot != kNoSlot) [[likely]] return;
  if (batch.versions.size() > 2 * table.candidates.size()) batch.clear();  // nobody has looked for long
  batch.add(version);
}

void Ledger::mark(Version& version, std::string_view name) {
  Table& table = *version.table;
  version.kept = version.marked = table.policy.keeping.marked(name);
  if (version.is_candidate()) table.candidates[version.slot].kept = version.kept;
}

void Ledger::for_each_way(const Version& version, c10::function_ref<void(Way&)> visit) {
  const bool is_useless = version.next_use == kNever && version.pending == 0;
  if (is_useless && drop_and_replay.applies(version)) return visit(drop_and_replay);  // Rule 7
  for (const Table* t = version.table.get(); t != nullptr; t = t->enclosing.get()) {
    if (t->ways_.empty() && drop_and_replay.applies(version)) visit(drop_and_replay);
    for (Way* way : t->ways_) {
      if (way->keeps_copy() && version.is_addressed()) continue;  // Rule 4
      if (way->applies(version)) visit(*way);
    }
  }
}

Way* Ledger::cheapest_way(const Version& version, c10::function_ref<bool(const Way&)> counts) {
  Way* cheapest = nullptr;
  for_each_way(version, [&](Way& way) {
    if (!counts(way)) return;
    if (cheapest == nullptr || way.cost(version) < cheapest->cost(version)) cheapest = &way;
  });
  return cheapest;
}

// Of a scan of 16,000 small operators, whose gradients are added to each other, the first call took 7.5 times
// eager's time where nothing had to lie, and takes 2.3 times.
double Ledger::due_to_go(const Version& version) {
  constexpr double kMostWaiting = 0.25;  // of the time of operators
  double pays_after = kNever;
  for_each_way(version, [&](const Way& way) {
    if (way.keeps_copy()) pays_after = std::min(pays_after, way.pays_after(version));
  });
  if (pays_after == kNever) return kNever;
  const bool waits_too_long = root->statistics.waited > kMostWaiting * clock;
  const bool has_to_lie = version.next_use == kUnknown && waits_too_long;
  return version.last_access + (has_to_lie ? pays_after / 2 : 0);
}

// ---- what the program needs ------------------------------------------------------------------------

void pin(Version& version) {
  if (version.pins++ > 0 || !version.is_candidate()) return;
  version.table->loose_bytes_ -= version.nbytes;
  version.table->candidates[version.slot].pinned = true;
  version.table->batch.remove(version);
}

void unpin(Version& version) {
  if (--version.pins > 0 || !version.is_candidate()) return;
  version.table->loose_bytes_ += version.nbytes;
  version.table->candidates[version.slot].pinned = false;
  version.table->ledger.offer(version);
}

void expect(Version& version) {
  ++version.pending;
  if (version.is_candidate()) version.table->candidates[version.slot].pending = true;
}

void unexpect(Version& version) {
  if (--version.pending == 0 && version.is_candidate()) {
    version.table->candidates[version.slot].pending = false;
  }
}

void touch(Version& version, double now) {
  version.last_access = now;
  if (version.is_candidate()) {
    Candidate& c = version.table->candidates[version.slot];
    c.last_access = now;
    c.consumed = version.consumed;
  }
}

}  // namespace rematfn
