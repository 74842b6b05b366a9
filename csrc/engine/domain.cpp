// SPDX-License-Identifier: Apache-2.0
#include "engine/domain.h"

#include <algorithm>

#include "engine/guide.h"

namespace rematfn {

// ---- making room ------------------------------------------------------------------------------

void Domain::make_room(Table& table, std::size_t nbytes) {
  for (Table* t = &table; t != nullptr; t = t->enclosing.get()) {
    if (t->shared) {
      make_shared_room(*t, nbytes);
      continue;
    }
    if (t->budget == kNoBudget || t->used_bytes() + nbytes <= t->budget) continue;
    list_candidates();
    // Whoever cannot have enough takes nothing.
    const std::size_t least = t->used_bytes() - t->evictable_bytes() + nbytes;
    if (least > t->budget && (planning_ || !t->give_way(least, nbytes))) {
      if (!planning_) t->note_need(least);
      throw NoRoom{t, least, least - nbytes};
    }
    if (prices_pending(*t)) evict_by_price(*t, t->used_bytes() + nbytes - t->budget);
    while (t->used_bytes() + nbytes > t->budget) {
      if (!evict_one(*t)) {
        if (!planning_ && t->give_way(t->used_bytes() + nbytes, nbytes)) break;
        if (!planning_) t->note_need(t->used_bytes() + nbytes);
        throw NoRoom{t, t->used_bytes() + nbytes, t->used_bytes()};
      }
    }
  }
}

bool Domain::could_make_room(const Table& table, std::size_t nbytes) {
  for (const Table* t = &table; t != nullptr; t = t->enclosing.get()) {
    if (t->budget == kNoBudget || t->used_bytes() + nbytes <= t->budget) continue;
    list_candidates();
    if (t->used_bytes() - t->evictable_bytes() + nbytes > t->budget) return false;
  }
  return true;
}

// Note [Candidates are listed once something has to go]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
// Most levels without a budget never evict, nor do those whose budget is ample. Until something has to
// go or to be replayed, no table of the domain lists its candidates, and no operator pays for that.
void Domain::list_candidates() {
  if (lists_candidates_) return;
  lists_candidates_ = true;
  std::vector<Table*> tables{root};
  for (std::size_t i = 0; i < tables.size(); ++i) {
    for (Version* v = tables[i]->oldest; v != nullptr; v = v->next) {
      if (v->resident) tables[i]->enlist(*v);
    }
    tables.insert(tables.end(), tables[i]->inner.begin(), tables[i]->inner.end());
  }
}

bool Domain::evict_one(Table& table) {
  list_candidates();
  return evict_one(table, /*spare_pending=*/true) || evict_one(table, /*spare_pending=*/false);
}

bool Domain::evict_one(Table& table, bool spare_pending) {
  Version* victim = find_victim(table, spare_pending);
  if (victim != nullptr) evict(*victim);
  return victim != nullptr;
}

Version* Domain::find_victim(Table& table, bool spare_pending) {
  Version* victim = choose(table, spare_pending);
  for (std::size_t i = 0; victim == nullptr && i < table.inner.size(); ++i) {
    victim = find_victim(*table.inner[i], spare_pending);
  }
  return victim;
}

void Domain::evict(Version& version) {
  drop(version);
  ++version.table->statistics.evictions;
  leave(version);
}

void Domain::leave(Version& version) {
  version.table->delist(version);
  version.table->discharge(version.nbytes);
  if (version.trimmed) version.table->discharge_trimmed(version.nbytes);
  version.trimmed = false;
  version.resident = false;
  const bool is_eq = version.table->score.kind == ScoreKind::kEq;
  if (version.producer && is_eq) join_component(*version.producer);
  mark_dependents_stale(version, /*came_back=*/false);
  mark_sources_stale(version, /*came_back=*/false);
}

void Domain::evict_all(Table& table, bool spare_kept) {
  list_candidates();
  for (std::size_t i = table.candidates.size(); i-- > 0;) {
    // Evicting the last candidate keeps the places of those before it.
    Version& version = *table.candidate_versions[i];
    if (!(spare_kept && version.kept)) evict_if_free(version);
  }
  for (Table* inner : table.inner) evict_all(*inner, spare_kept);
}

bool Domain::evict_if_free(Version& version) {
  list_candidates();
  const bool free = version.slot != kNoSlot && version.pins == 0 && version.pending == 0 &&
                    !held_elsewhere(version);
  if (free) evict(version);
  return free;
}

void Domain::arrive(Version& version) {
  version.resident = true;
  version.raw = false;  // See Note [Uninitialised memory is kept]
  version.table->charge(version.nbytes);
  version.table->enlist(version);
  if (version.table->score.kind == ScoreKind::kEq) leave_component(*version.producer);
  mark_dependents_stale(version, /*came_back=*/true);
  mark_sources_stale(version, /*came_back=*/true);
}

void Domain::cut(Version& version) {
  if (version.table) version.table->delist(version);
  auto& outputs = version.producer->outputs;
  std::replace(outputs.begin(), outputs.end(), &version, static_cast<Version*>(nullptr));
  keep_alive(version);
  version.producer.reset();
}

// ---- what is known of the program --------------------------------------------------------------

void Domain::note_call(const ObservedCall& call) {
  if (recorder) {
    recorder->note(call);
    if (recorder->is_too_long()) {
      recorder.reset();
      root->report->trace.reset();
    }
  }
  if (guide && !guide->follow(call)) lose_guide();
}

// See Note [Guided, never trusted]
void Domain::lose_guide() {
  guide.reset();
  guide_lost = root->report->guide_lost = true;
  root->is_estimate |= root->is_estimate_unguided;
  std::vector<Table*> tables{root};
  for (std::size_t i = 0; i < tables.size(); ++i) {
    for (Version* v = tables[i]->oldest; v != nullptr; v = v->next) {
      v->next_use = kUnknown;
      v->weight = 1;
      if (tables[i] == root) v->kept = false;  // only a plan has said so
    }
    for (std::size_t k = 0; k < tables[i]->candidates.size(); ++k) {
      Candidate& c = tables[i]->candidates[k];
      c.next_use = kUnknown;
      c.weight = weight_of(*tables[i]->candidate_versions[k]);
      c.stale = true;
    }
    tables.insert(tables.end(), tables[i]->inner.begin(), tables[i]->inner.end());
  }
}

}  // namespace rematfn
