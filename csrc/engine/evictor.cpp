// SPDX-License-Identifier: Apache-2.0
#include "engine/evictor.h"

#include <algorithm>
#include <limits>
#include <ranges>
#include <utility>

#include "engine/moves.h"

namespace rematfn {
namespace {

// See Note [Victims are chosen a batch at a time]
constexpr std::size_t kFew = 128;
constexpr std::size_t kBatchShare = 32;
constexpr std::size_t kLookedAt = 16;

// Whether one of its ways is to drop, as far as a candidate shows.
bool drops_what_is_read(Ledger& ledger, const Table& table) {
  for (const Version* version : table.candidate_versions) {
    if (version->next_use == kNever) continue;
    bool drops = false;
    ledger.for_each_way(*version, [&](const Way& way) { drops |= !way.keeps_copy(); });
    return drops;
  }
  return false;
}

}  // namespace

void Evictor::evict(Version& version) {
  if (Journal* const journal = moves_.observers.journal.get()) journal->note_score(version, score_of(version));
  moves_.evict(version);
}

bool Evictor::evict_one(Table& table) {
  moves_.list_candidates();
  for (const bool spare_pending : {true, false}) {
    Version* const victim = find_victim(table, spare_pending);
    if (victim == nullptr) continue;
    evict(*victim);
    return true;
  }
  return moves_.relieve_one_copy(table);
}

// Where nobody knows which values will be dropped, what is dropped now may be missed by way of several. Without
// it a Hessian-vector product that may only move takes 1.14 in place of 1.10 at 0.2.
bool Evictor::evict_useless(Table& table) {
  moves_.list_candidates();
  const Preference prefers = moves_.observers.guide->plan().prefers;
  const bool is_known = prefers == Preference::kMoving || prefers == Preference::kByValue;
  if (!is_known && drops_what_is_read(moves_, table)) return false;
  const Score& kind = score_in_force(table);
  for (std::size_t i = table.candidates.size(); i-- > 0;) {
    Version& version = *table.candidate_versions[i];
    if (version.next_use != kNever || !version.may_go() || version.pending > 0) continue;
    if (may_be_missed(version) || moves_.neighbourhood.next_use(version) != kNever) continue;
    refresh(table.candidates[i], version, kind);
    if (has_to_stay(version)) continue;
    evict(version);
    return true;
  }
  return std::ranges::any_of(table.inner, [&](Table* inner) { return evict_useless(*inner); });
}

// Whether something that is read again, and may be dropped until then, is made from it.
bool Evictor::may_be_missed(const Version& version) const {
  const auto goes_by_copy = [&](const Version& v) {
    const Plan& plan = moves_.observers.guide->plan();
    const bool moves = plan.prefers == Preference::kByValue
                           ? moves_.observers.guide->preference_for(v) == Preference::kMoving
                           : v.way != nullptr && v.way->keeps_copy();
    return moves || v.copied_by() != nullptr;
  };
  for (const Input* use = version.readers; use != nullptr; use = use->next) {
    for (const Version* output : use->reader->outputs) {
      if (output != nullptr && output->next_use != kNever && !goes_by_copy(*output)) return true;
    }
  }
  return false;
}

Version* Evictor::find_victim(Table& table, bool spare_pending) {
  Version* victim = choose(table, spare_pending);
  for (Table* inner : table.inner) {
    if (victim != nullptr && !victim->kept) break;
    Version* other = find_victim(*inner, spare_pending);
    if (other != nullptr && (victim == nullptr || !other->kept)) victim = other;
  }
  return victim;
}

void Evictor::evict_all(Table& table, bool spare_kept) {
  moves_.list_candidates();
  for (std::size_t i = table.candidates.size(); i-- > 0;) {
    // Evicting the last candidate keeps the places of those before it.
    Version& version = *table.candidate_versions[i];
    if (!(spare_kept && version.kept)) evict_if_free(version);
  }
  for (Table* inner : table.inner) evict_all(*inner, spare_kept);
}

bool Evictor::evict_if_free(Version& version) {
  moves_.list_candidates();
  const bool by_plan = moves_.observers.schedule() != nullptr && version.may_go() && version.table->has_copies();
  if (by_plan) refresh(version.table->candidates[version.slot], version, score_in_force(*version.table));
  const bool free = version.may_go() && version.pending == 0 &&
                    !moves_.store.held_elsewhere(version) && find_way(version);
  if (free) evict(version);
  return free;
}

const Score& Evictor::score_in_force(const Table& table) const {
  return moves_.foresees() ? moves_.observers.guide->plan().score : table.policy.score;
}

double Evictor::score_of(const Version& version) {
  const Table& table = *version.table;
  if (table.candidates[version.slot].next_use == kNever) return -kNever;
  if (table.policy.custom_score) return std::numeric_limits<double>::quiet_NaN();
  const Score& kind = score_in_force(table);
  return score(kind, table.candidates[version.slot], context_for(kind));
}

// See Note [Near the floor], Rule 1
ScoreContext Evictor::context_for(const Score& kind) {
  ScoreContext context{.now = moves_.clock, .record_now = moves_.record_clock()};
  if (kind.horizon == Horizon::kAge && moves_.thrash.is_thrashing(moves_.clock)) {
    context.front = moves_.thrash.front();
  }
  return context;
}

// Note [Victims are chosen a batch at a time]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
// Ages change the scores with every operator, and each eviction those of its neighbours, so no order
// of the candidates lasts; but to score all of them for each eviction makes a program of n operators
// cost n^2. What is among the lowest now will be so for a while. So one look at all n picks enough for
// the next n / 32 evictions; what becomes a candidate meanwhile stands in line behind. The victim is
// the lowest of the first few of both, scored anew; what is costlier by then than the cheapest that was
// not picked leaves the line. Of up to 128 candidates all are looked at for each eviction.
Version* Evictor::choose(Table& table, bool spare_pending) {
  if (table.policy.custom_score) return choose_by_custom_score(table, spare_pending);
  const Score& kind = score_in_force(table);
  std::vector<Version*> refused;
  Version* victim = choose(table, kind, context_for(kind), spare_pending, refused);
  for (Version* version : refused) table.candidates[version->slot].refused = false;
  return victim;
}

// What has to stay is marked as refused.
Version* Evictor::choose(Table& table, const Score& kind, const ScoreContext& context, bool spare_pending,
                         std::vector<Version*>& refused) {
  Batch& batch = table.batch;
  if (batch.evictions_left == 0) batch.clear();
  Version* victim = lowest_of_batch(table, kind, context, spare_pending);
  for (;;) {
    if (victim == nullptr) {
      if (!pick_batch(table, kind, context, spare_pending)) break;
      victim = lowest_of_batch(table, kind, context, spare_pending);
    }
    if (!has_to_stay(*victim)) break;
    refuse(*victim, refused);
    victim = lowest_of_batch(table, kind, context, spare_pending);
  }
  if (victim != nullptr) --batch.evictions_left;
  return victim;
}

// It is not to be found again.
void Evictor::refuse(Version& version, std::vector<Version*>& refused) {
  version.table->candidates[version.slot].refused = true;
  version.table->batch.remove(version);
  refused.push_back(&version);
}

// See Note [An address is good until its level's next operator]
bool Evictor::has_to_stay(Version& version) {
  if (moves_.store.held_elsewhere(version)) {
    moves_.observers.note_held(version);
    return true;
  }
  const bool is_others = moves_.giving_to != nullptr && moves_.giving_to != &moves_;
  return (is_others && version.exposed == moves_.next_order) || !find_way(version);
}

// Whether there is room by its way, or else by another one, which is its way then.
bool Evictor::find_way(Version& version) const {
  const bool has_room = version.way->has_room(version);
  const bool would_rather_move = moves_all_ && !version.way->keeps_copy();
  if (has_room && !would_rather_move) return true;
  Way* const other = moves_.cheapest_way(version, [&](const Way& way) {
    return way.has_room(version) && (!has_room || way.keeps_copy());
  });
  if (other != nullptr) version.way = other;
  return has_room || other != nullptr;
}

// The custom score may throw; nothing has changed then.
Version* Evictor::choose_by_custom_score(Table& table, bool spare_pending) {
  Version* victim = nullptr;
  std::pair<bool, double> lowest;  // what is kept comes last
  for (std::size_t i = 0; i < table.candidates.size(); ++i) {
    const Candidate& c = table.candidates[i];
    Version& version = *table.candidate_versions[i];
    if (c.pinned || (spare_pending && c.pending) || has_to_stay(version)) continue;
    const double next = moves_.neighbourhood.next_use(version);
    const bool known = next != kUnknown && next != kNever;
    const double found_score = table.policy.custom_score({.nbytes = c.nbytes,
                                      .cost = c.cost,
                                      .ancestors = moves_.neighbourhood.ancestors(version),
                                      .descendants = moves_.neighbourhood.descendants(version),
                                      .age = moves_.clock - c.last_access,
                                      .next_use = known ? std::max(next - moves_.record_clock(), 0.0) : next,
                                      .consumed = c.consumed,
                                      .producer = version.producer ? version.producer->name() : ""});
    const std::pair found(version.kept, found_score);
    if (victim != nullptr && found >= lowest) continue;
    victim = &version;
    lowest = found;
  }
  return victim;
}

// See Note [Stale scores are too low]
Version* Evictor::lowest_of_batch(Table& table, const Score& kind, const ScoreContext& context,
                                  bool spare_pending) {
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
      const double s = score(kind, c, context);
      s > batch.limit ? batch.remove(*version) : looked_at.push_back({version, s});
    }
  };
  look(batch.first_picked, batch.picked);
  look(batch.first_offered, batch.versions.size());
  while (!looked_at.empty()) {
    auto* const lowest = std::ranges::min_element(looked_at, {}, &Scored::score);
    Candidate& c = table.candidates[lowest->version->slot];
    if (!c.stale) return lowest->version;
    refresh(c, *lowest->version, kind);
    lowest->score = score(kind, c, context);
    if (lowest->score > batch.limit) {
      batch.remove(*lowest->version);
      looked_at.erase(lowest);
    }
  }
  return nullptr;
}

bool Evictor::pick_batch(Table& table, const Score& kind, const ScoreContext& context,
                         bool spare_pending) {
  const std::size_t count = table.candidates.size();
  const std::size_t most = count <= kFew ? 1 : count / kBatchShare;
  const Victims victims =
      choose_victims(kind, table.candidates, context, spare_pending, most, [&](std::size_t i) {
        refresh(table.candidates[i], *table.candidate_versions[i], kind);
      });
  table.batch.clear();
  for (const std::size_t index : victims.indices) {
    table.batch.add(*table.candidate_versions[index]);
  }
  table.batch.picked = table.batch.first_offered = table.batch.versions.size();
  table.batch.limit = victims.lowest_left;
  table.batch.evictions_left = most;
  return !victims.indices.empty();
}

void Evictor::refresh(Candidate& c, Version& version, const Score& kind) {
  c.stale = false;
  c.next_use = moves_.neighbourhood.next_use(version);
  const bool is_free = c.next_use == kNever;  // whatever is around it
  constexpr double kTimesDropped = 2;  // See Note [Ancestors that nobody holds]
  c.ancestors = is_free ? 0 : moves_.neighbourhood.ancestors(version, kTimesDropped);
  if (version.table->has_copies()) choose_way(c, version, kind);
}

// See Note [A version goes by a way]
void Evictor::choose_way(Candidate& c, Version& version, const Score& kind) {
  const double replayed_first = c.ancestors;
  constexpr double kBeyondAll = 1e9;
  const Preference prefers = moves_all_      ? Preference::kMoving
                             : moves_.observers.guide ? moves_.observers.guide->preference_for(version)
                                                      : Preference::kCheaper;
  double least = kNever;
  moves_.for_each_way(version, [&](Way& way) {
    const double ancestors = way.keeps_copy() ? 0 : replayed_first;
    const Preference avoided = way.keeps_copy() ? Preference::kDropping : Preference::kMoving;
    const double price = prefers == avoided ? kBeyondAll : 1;
    const double whole = price * (way.cost(version) + kind.ancestors * ancestors);
    if (whole >= least) return;
    least = whole;
    version.way = &way;
    c.cost = way.cost(version);
    c.ancestors = ancestors;
  });
}

// See Note [Near the floor], Rule 2
void Evictor::evict_by_price(Table& table, std::size_t nbytes) {
  // What a custom score says, and what inner levels do, cannot be compared with it.
  if (table.policy.custom_score || !table.inner.empty()) return;
  const Score& kind = score_in_force(table);
  ScoreContext context = context_for(kind);
  context.prices_pending = true;
  std::vector<Version*> victims;
  std::vector<Version*> refused;
  std::size_t freed = 0;
  while (freed < nbytes) {
    Version* version = choose(table, kind, context, /*spare_pending=*/false, refused);
    if (version == nullptr) break;
    refuse(*version, refused);
    victims.push_back(version);
    freed += version->nbytes;
  }
  for (Version* version : refused) table.candidates[version->slot].refused = false;
  for (Version* version : std::views::reverse(victims)) {  // Rule 2
    const bool is_necessary = freed - version->nbytes < nbytes;
    if (!is_necessary) {
      freed -= version->nbytes;
      moves_.offer(*version);
    } else if (find_way(*version)) {  // those before may have taken the room
      evict(*version);
    }
  }
}

}  // namespace rematfn
