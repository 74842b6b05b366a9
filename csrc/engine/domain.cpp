// SPDX-License-Identifier: Apache-2.0
#include "engine/domain.h"

#include "engine/guide.h"

namespace rematfn {

Domain::Domain(Store& bytes) : store(bytes) {}

// ---- making room ------------------------------------------------------------------------------

void Domain::make_room(Table& table, std::size_t nbytes) {
  for (Table* t = &table; t != nullptr; t = t->enclosing.get()) {
    if (t->budget == kNoBudget) continue;
    if (t->shared ? t->claim(nbytes) : t->used_bytes() + nbytes <= t->budget) continue;
    list_candidates();
    if (is_moving()) note_arrivals();
    // Whoever cannot have enough takes nothing.
    const std::size_t least = t->used_bytes() - t->evictable_bytes() + nbytes;
    if (least > t->budget && (replayer.is_running() || !t->give_way(least, nbytes))) {
      if (!replayer.is_running()) t->note_need(least);
      throw NoRoom{t, least, least - nbytes};
    }
    if (t->shared) {
      t->shared->make_room(*t, nbytes);
      continue;
    }
    const std::size_t wanted = t->used_bytes() + nbytes;  // by now it may fit
    if (wanted > t->budget && evictor.prices_pending(*t)) evictor.evict_by_price(*t, wanted - t->budget);
    while (t->used_bytes() + nbytes > t->budget) {
      // See Note [A version goes by a way], Rule 2
      const std::size_t leaving = t->leaving();
      const bool enough_leaves = t->used_bytes() - leaving + nbytes <= t->budget;
      if (leaving > 0 && (enough_leaves || !evictor.evict_one(*t))) {
        let_one_leave(*t);
      } else if (leaving == 0 && !evictor.evict_one(*t) && !turn_one_back(*t)) {
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

bool Domain::evict_after_failure(std::size_t nbytes) {
  return root != nullptr && evict_bytes(*root, 2 * nbytes) > 0;
}

std::size_t Domain::evict_bytes(Table& table, std::size_t nbytes) {
  const std::size_t before = table.resident_bytes;
  if (is_moving()) end_moves(table);
  while (before - table.resident_bytes < nbytes && evictor.evict_one(table)) end_moves(table);
  return before - table.resident_bytes;
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

// ---- what the program does with a version -----------------------------------------------------

Table* Domain::snapshot(Version& version, Table& level) {
  Version* wanted = &version;
  if (version.table) materialize({&wanted, 1});
  const Pinned stays(version);
  make_room(level, version.nbytes);
  store.copy(version);
  Table* const home = version.table.get();  // the operator keeps it alive
  if (home != nullptr) home->expel(version);
  version.has_tensor = false;
  level.admit(version, /*unconstrained=*/false);
  if (home != nullptr) home->charge_original(version.nbytes);
  return home;
}

void Domain::cut(Version& version) {
  if (version.table) version.table->delist(version);
  auto& outputs = version.producer->outputs;
  std::replace(outputs.begin(), outputs.end(), &version, static_cast<Version*>(nullptr));
  if (version.has_bytes()) store.keep_alive(version);
  version.producer.reset();
  if (journal) journal->note_cut(version);
  if (version.table && version.place == Place::kHere) version.table->enlist(version);
}

void Domain::note_addressed(Version& version) {
  if (std::exchange(version.addressed, true)) return;
  if (recorder) recorder->note_addressed(version);
  if (version.table) version.table->relist(version);
}

void Domain::note_communicated(Version& version, bool communicated) {
  if (std::exchange(version.communicated, communicated) == communicated || !version.table) return;
  version.table->relist(version);
}

// ---- what is known of the program --------------------------------------------------------------

double Domain::spent() const { return thrash.replayed() + root->statistics.waited; }

bool Domain::foresees() const { return guide && guide->foresees(); }

void Domain::note_call(const ObservedCall& call) {
  if (recorder) {
    recorder->note(call);
    if (recorder->is_too_long()) {
      recorder.reset();
      root->report->trace.reset();
    }
  }
  if (guide && !guide->follow(call)) {
    root->report->lost_at = call.name;
    lose_guide();
  }
  if (journal) journal->note_reads(call);
  // What has been written has other contents now, which are another value.
  for (const ObservedCall::Read& read : call.reads) {
    if (read.written && !read.version->table) read.version->value = kNoValue;
  }
}

// See Note [Guided, never trusted]
void Domain::lose_guide() {
  guide.reset();
  expected_.clear();
  guide_lost = root->report->guide_lost = true;
  root->results_ahead = 0;
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
