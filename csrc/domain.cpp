// SPDX-License-Identifier: Apache-2.0
#include "domain.h"

#include <algorithm>

#include "plan.h"

namespace rematfn {
namespace {

// See Note [Victims are chosen a batch at a time]
constexpr std::size_t kFew = 128;
constexpr std::size_t kBatchShare = 32;
constexpr std::size_t kLookedAt = 16;

bool is_exact(ScoreKind kind) { return kind == ScoreKind::kDtr || kind == ScoreKind::kEq; }

bool has_neighbourhood(ScoreKind kind) {
  return is_exact(kind) || kind == ScoreKind::kOn || kind == ScoreKind::kMsps;
}

}  // namespace

// ---- making room ------------------------------------------------------------------------------

void Domain::make_room(Table& table, std::size_t nbytes) {
  for (Table* t = &table; t != nullptr; t = t->enclosing.get()) {
    if (t->budget == kNoBudget || t->used_bytes() + nbytes <= t->budget) continue;
    list_candidates();
    // Whoever cannot have enough takes nothing.
    const std::size_t least = t->used_bytes() - t->evictable_bytes() + nbytes;
    if (least > t->budget) {
      if (!planning_) t->note_need(least);
      throw NoRoom{t, least, least - nbytes};
    }
    const std::size_t used = t->used_bytes() + nbytes;
    if (used > t->budget && prices_pending(*t)) evict_by_price(*t, used - t->budget);
    while (t->used_bytes() + nbytes > t->budget) {
      if (!evict_one(*t)) {
        if (!planning_) t->note_need(t->used_bytes() + nbytes);
        throw NoRoom{t, t->used_bytes() + nbytes, t->used_bytes()};
      }
    }
  }
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
  if (Version* victim = choose(table, spare_pending)) {
    evict(*victim);
    return true;
  }
  return std::any_of(table.inner.begin(), table.inner.end(),
                     [&](Table* inner) { return evict_one(*inner, spare_pending); });
}

// See Note [Pending readers have a price]
bool Domain::prices_pending(const Table& table) const {
  // What a judge says, and what inner levels do, cannot be compared with it.
  if (table.score.kind != ScoreKind::kOn || table.judge || !table.inner.empty()) return false;
  const Score& score = guide != nullptr ? guide->plan().score : table.score;
  return thrash.has_cost(score.patience, clock);
}

// Makes room for `nbytes`, of what is not pinned, as far as there is any.
void Domain::evict_by_price(Table& table, std::size_t nbytes) {
  Score kind = score_in_force(table);
  kind.prices_pending = true;
  const auto refresh_at = [&](std::size_t i) {
    refresh(table.candidates[i], *table.candidate_versions[i], kind.kind);
  };
  const Victims in_order = choose_victims(kind, table.candidates, clock, /*spare_pending=*/false,
                                          table.candidates.size(), refresh_at);
  std::vector<Version*> victims;
  std::size_t freed = 0;
  for (const std::size_t index : in_order.indices) {
    Version* version = table.candidate_versions[index];
    if (freed >= nbytes || held_elsewhere(*version)) continue;
    victims.push_back(version);
    freed += version->nbytes;
  }
  std::for_each(victims.rbegin(), victims.rend(), [&](Version* version) {  // Rule 2
    const bool is_necessary = freed - version->nbytes < nbytes;
    if (is_necessary) return evict(*version);
    freed -= version->nbytes;
  });
}

Score Domain::score_in_force(const Table& table) {
  if (table.score.kind != ScoreKind::kOn) return table.score;
  Score score = guide != nullptr ? guide->plan().score : table.score;
  // See Note [A backward reads in reverse]
  if (score.horizon == Horizon::kAge && thrash.is_thrashing(clock)) {
    score.horizon = Horizon::kMirrored;
    score.front = thrash.front();
  }
  return score;
}

// Note [Victims are chosen a batch at a time]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
// Ages change the scores with every operator, and each eviction those of its neighbours, so no order
// of the candidates lasts; but to score all of them for each eviction makes a program of n operators
// cost n^2. What is among the lowest now will be so for a while. So one look at all n picks enough for
// the next n / 32 evictions; what becomes a candidate meanwhile stands in line behind. The victim is
// the lowest of the first few of both, scored anew; what is dearer by then than the cheapest that was
// not picked leaves the line. Up to 128 candidates, and for h_DTR and h_eq, which are references, all
// are looked at for each eviction.
Version* Domain::choose(Table& table, bool spare_pending) {
  if (table.judge) return choose_by_judge(table, spare_pending);
  const Score kind = score_in_force(table);
  Batch& batch = table.batch;
  if (batch.evictions_left == 0) batch.clear();
  bool refused = false;
  Version* victim = lowest_of_batch(table, kind, spare_pending);
  for (;;) {
    if (victim == nullptr) {
      if (!pick_batch(table, kind, spare_pending)) break;
      victim = lowest_of_batch(table, kind, spare_pending);
    }
    if (!held_elsewhere(*victim)) break;
    table.candidates[victim->slot].refused = refused = true;
    batch.remove(*victim);
    victim = lowest_of_batch(table, kind, spare_pending);
  }
  if (refused) {
    for (Candidate& c : table.candidates) c.refused = false;
  }
  if (victim != nullptr) --batch.evictions_left;
  return victim;
}

// The judge may throw; nothing has changed then.
Version* Domain::choose_by_judge(Table& table, bool spare_pending) {
  Version* victim = nullptr;
  double lowest = 0;
  for (std::size_t i = 0; i < table.candidates.size(); ++i) {
    const Candidate& c = table.candidates[i];
    Version& version = *table.candidate_versions[i];
    if (c.pinned || (spare_pending && c.pending) || held_elsewhere(version)) continue;
    const double next = next_use(version);
    const bool known = next != kUnknown && next != kNever;
    const double found = table.judge({.nbytes = c.nbytes,
                                      .cost = c.cost,
                                      .ancestors = neighbourhood(version, ScoreKind::kOn),
                                      .age = clock - c.last_access,
                                      .next_use = known ? std::max(next - clock, 0.0) : next,
                                      .consumed = c.consumed,
                                      .producer = version.producer->name()});
    if (victim != nullptr && found >= lowest) continue;
    victim = &version;
    lowest = found;
  }
  return victim;
}

// See Note [Stale scores are too low]
Version* Domain::lowest_of_batch(Table& table, const Score& kind, bool spare_pending) {
  Batch& batch = table.batch;
  struct Scored {
    Version* version;
    double score;
  };
  c10::SmallVector<Scored, 2 * kLookedAt> looked_at;
  const auto look = [&](std::size_t& first, std::size_t end) {
    while (first < end && batch.versions[first] == nullptr) ++first;
    const std::size_t most = looked_at.size() + kLookedAt;
    for (std::size_t i = first; i < end && looked_at.size() < most; ++i) {
      Version* version = batch.versions[i];
      if (version == nullptr) continue;
      const Candidate& c = table.candidates[version->slot];
      if (spare_pending && c.pending) continue;
      const double s = score(kind, c, clock);
      s > batch.limit ? batch.remove(*version) : looked_at.push_back({version, s});
    }
  };
  look(batch.first_picked, batch.picked);
  look(batch.first_offered, batch.versions.size());
  while (!looked_at.empty()) {
    const auto lowest = std::min_element(
        looked_at.begin(), looked_at.end(),
        [](const Scored& a, const Scored& b) { return a.score < b.score; });
    Candidate& c = table.candidates[lowest->version->slot];
    if (!c.stale) return lowest->version;
    refresh(c, *lowest->version, kind.kind);
    lowest->score = score(kind, c, clock);
    if (lowest->score > batch.limit) {
      batch.remove(*lowest->version);
      looked_at.erase(lowest);
    }
  }
  return nullptr;
}

bool Domain::pick_batch(Table& table, const Score& kind, bool spare_pending) {
  const std::size_t count = table.candidates.size();
  const auto refresh_at = [&](std::size_t i) {
    refresh(table.candidates[i], *table.candidate_versions[i], kind.kind);
  };
  if (is_exact(kind.kind)) {
    for (std::size_t i = 0; i < count; ++i) {
      if (!table.candidates[i].pinned) refresh_at(i);
    }
  }
  const std::size_t most = is_exact(kind.kind) || count <= kFew ? 1 : count / kBatchShare;
  const Victims victims =
      choose_victims(kind, table.candidates, clock, spare_pending, most, refresh_at);
  table.batch.clear();
  for (const std::size_t index : victims.indices) {
    table.batch.add(*table.candidate_versions[index]);
  }
  table.batch.picked = table.batch.first_offered = table.batch.versions.size();
  table.batch.limit = victims.lowest_left;
  table.batch.evictions_left = most;
  return !victims.indices.empty();
}

void Domain::refresh(Candidate& c, const Version& version, ScoreKind kind) {
  c.stale = false;
  if (!has_neighbourhood(kind)) return;
  any_refreshed_ = true;
  c.next_use = next_use(version);
  const bool is_free = kind == ScoreKind::kOn && c.next_use == kNever;  // whatever is around it
  c.neighbours = is_free ? 0 : neighbourhood(version, kind);
}

void Domain::evict(Version& version) {
  drop(version);
  ++version.table->statistics.evictions;
  leave(version);
}

void Domain::leave(Version& version) {
  version.table->delist(version);
  version.table->discharge(version.nbytes);
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

void Domain::trim(Table& table) {
  for (Version* v = table.oldest; v != nullptr && live_operations > most_operations / 2;
       v = v->next) {
    if (v->resident && v->producer) cut(*v);
  }
}

// ---- what is known of the program --------------------------------------------------------------

void Domain::note_call(const ObservedCall& call) {
  if (recorder) recorder->note(call);
  if (guide && !guide->follow(call)) lose_guide();
}

// See Note [Guided, never trusted]
void Domain::lose_guide() {
  guide.reset();
  guide_lost = true;
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
