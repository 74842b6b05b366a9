// SPDX-License-Identifier: Apache-2.0
#include "engine/domain.h"

#include <algorithm>

#include "engine/guide.h"

namespace rematfn {

Domain::Domain(Store& bytes) : store(bytes) {}

// ---- making room ------------------------------------------------------------------------------

void Domain::make_room(Table& table, std::size_t nbytes) {
  for (Table* t = &table; t != nullptr; t = t->enclosing.get()) {
    if (t->shared) {
      sharer.make_room(*t, nbytes);
      continue;
    }
    if (t->budget == kNoBudget || t->used_bytes() + nbytes <= t->budget) continue;
    list_candidates();
    // Whoever cannot have enough takes nothing.
    const std::size_t least = t->used_bytes() - t->evictable_bytes() + nbytes;
    if (least > t->budget && (replayer.is_running() || !t->give_way(least, nbytes))) {
      if (!replayer.is_running()) t->note_need(least);
      throw NoRoom{t, least, least - nbytes};
    }
    if (evictor.prices_pending(*t)) evictor.evict_by_price(*t, t->used_bytes() + nbytes - t->budget);
    while (t->used_bytes() + nbytes > t->budget) {
      // See Note [A version goes by a way], Rule 2
      const std::size_t leaving = t->leaving();
      const bool enough_leaves = t->used_bytes() - leaving + nbytes <= t->budget;
      if (leaving > 0 && (enough_leaves || !evictor.evict_one(*t))) {
        let_leave(*t, /*all=*/false);
      } else if (leaving == 0 && !evictor.evict_one(*t)) {
        if (!replayer.is_running() && t->give_way(t->used_bytes() + nbytes, nbytes)) break;
        if (!replayer.is_running()) t->note_need(t->used_bytes() + nbytes);
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
      if (v->place == Place::kHere) tables[i]->enlist(*v);
    }
    tables.insert(tables.end(), tables[i]->inner.begin(), tables[i]->inner.end());
  }
}

// ---- going and coming -------------------------------------------------------------------------

void Domain::evict(Version& version) {
  ++version.table->statistics.evictions;
  Way& way = *version.way;
  const Place place = way.leave(version);
  if (way.keeps_copy()) version.copied_by = &way;
  if (place == Place::kAway) return lose_bytes(version);
  version.table->delist(version);
  version.table->leaving_bytes += version.nbytes;
  version.place = Place::kLeaving;
  leaving_.push_back(&version);
}

void Domain::drop(Version& version) {
  store.drop(version);
  leave(version);
}

void Domain::leave(Version& version) {
  if (version.copied_by != nullptr) discard_copy(version);
  lose_bytes(version);
}

void Domain::lose_bytes(Version& version) {
  version.table->delist(version);
  version.table->discharge(version.nbytes);
  if (version.trimmed) version.table->discharge_trimmed(version.nbytes);
  version.trimmed = false;
  version.place = Place::kAway;
  neighbourhood.note_change(version, /*came_back=*/false, guide != nullptr);
}

void Domain::arrive(Version& version) {
  version.place = Place::kHere;
  version.raw = false;  // See Note [Uninitialised memory is kept]
  version.table->charge(version.nbytes);
  version.table->enlist(version);
  neighbourhood.note_change(version, /*came_back=*/true, guide != nullptr);
}

void Domain::fetch(Version& version) {
  version.table->charge(version.nbytes);
  try {
    version.place = version.copied_by->bring_back(version);
    if (version.place == Place::kComing) version.copied_by->wait(version);
  } catch (...) {
    version.place = Place::kAway;
    version.table->discharge(version.nbytes);
    throw;
  }
  version.place = Place::kHere;
  version.copied_by = nullptr;
  version.table->enlist(version);
  neighbourhood.note_change(version, /*came_back=*/true, guide != nullptr);
}

void Domain::stop_leaving(Version& version) {
  std::erase(leaving_, &version);
  version.table->leaving_bytes -= version.nbytes;
}

void Domain::call_back(Version& version) {
  discard_copy(version);
  version.table->enlist(version);
}

void Domain::discard_copy(Version& version) {
  if (version.place == Place::kLeaving) {
    stop_leaving(version);
    version.place = Place::kHere;
  }
  version.copied_by->discard(version);
  version.copied_by = nullptr;
}

void Domain::let_leave(const Table& table, bool all) {
  const std::vector<Version*> leaving = leaving_;
  for (Version* version : leaving) {
    const Table* around = version->table.get();
    while (around != nullptr && around != &table) around = around->enclosing.get();
    if (around == nullptr) continue;
    version->copied_by->wait(*version);
    stop_leaving(*version);
    lose_bytes(*version);
    if (!all) return;
  }
}

void Domain::snapshot(Version& version, Table& level) {
  Version* wanted = &version;
  if (version.table) materialize({&wanted, 1});
  const Pinned stays(version);
  make_room(level, version.nbytes);
  store.copy(version);
  if (version.table) version.table->expel(version);
  version.has_tensor = false;
  level.admit(version);
}

void Domain::cut(Version& version) {
  if (version.table) version.table->delist(version);
  auto& outputs = version.producer->outputs;
  std::replace(outputs.begin(), outputs.end(), &version, static_cast<Version*>(nullptr));
  store.keep_alive(version);
  version.producer.reset();
  if (version.table && version.place == Place::kHere) version.table->enlist(version);
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
      if (tables[i] == root) v->kept = v->marked;  // the rest a plan has said
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
