// SPDX-License-Identifier: Apache-2.0
#include "engine/table.h"

#include <algorithm>

#include "base/invariant.h"
#include "engine/domain.h"

namespace rematfn {

void Batch::add(Version& version) {
  version.batch_slot = versions.size();
  versions.push_back(&version);
}

void Batch::remove(Version& version) {
  if (version.batch_slot == kNoSlot) return;
  versions[version.batch_slot] = nullptr;
  version.batch_slot = kNoSlot;
}

void Batch::clear() {
  for (Version* version : versions) {
    if (version != nullptr) version->batch_slot = kNoSlot;
  }
  versions.clear();
  picked = first_picked = first_offered = evictions_left = 0;
  limit = kNever;
}

Table::Table(std::shared_ptr<Domain> owner, Table* outer, std::size_t bytes, Policy asked)
    : domain(std::move(owner)),
      report(std::make_shared<Report>()),
      enclosing(outer),
      budget(bytes),
      policy(std::move(asked)),
      depth(outer == nullptr ? 1 : outer->depth + 1),
      leaves_early(outer != nullptr && outer->leaves_early),
      resident_bytes(report->resident_bytes),
      statistics(report->statistics),
      ways_{&domain->drop_and_replay},
      has_copies_(outer != nullptr && outer->has_copies_) {
  report->budget = bytes;
  report->domain = domain;

  if (outer != nullptr) outer->inner.push_back(this);
  if (outer == nullptr) domain->root = this;
}

Table::~Table() {
  if (enclosing) std::erase(enclosing->inner, this);
}

void Table::admit(Version& version, bool unconstrained) {
  version.table = Ref<Table>(this);
  version.previous = newest;
  (newest == nullptr ? oldest : newest->next) = &version;
  newest = &version;
  version.unconstrained = unconstrained;
  for (Table* t = this; unconstrained && t != nullptr; t = t->enclosing.get()) {
    t->unconstrained_bytes += version.nbytes;
  }
  if (version.has_bytes()) {
    charge(version.nbytes);
    if (version.trimmed) charge_trimmed(version.nbytes);
    enlist(version);
    if (domain->journal) domain->journal->note_made(version);
  }
}

void Table::let_go(Version& version) {
  if (!version.unconstrained) return;
  version.unconstrained = false;
  for (Table* t = this; t != nullptr; t = t->enclosing.get()) t->unconstrained_bytes -= version.nbytes;
}

void Table::expel(Version& version) {
  delist(version);
  let_go(version);
  if (version.copied_by != nullptr) domain->discard_copy(version);
  if (version.has_bytes()) discharge(version.nbytes);
  if (version.has_bytes() && version.trimmed) discharge_trimmed(version.nbytes);
  if (version.has_bytes() && domain->journal) {
    const bool is_dead = version.references == 0;
    domain->journal->note(is_dead ? Journal::What::kReleased : Journal::What::kLeft, version);
  }
  (version.previous == nullptr ? oldest : version.previous->next) = version.next;
  (version.next == nullptr ? newest : version.next->previous) = version.previous;
  version.previous = version.next = nullptr;
  version.table.reset();
}

void Table::give(Version& version, Table& heir) {
  if (version.place == Place::kLeaving) domain->call_back(version);
  if (version.place == Place::kComing) domain->turn_back(version);
  Way* const copied_by = std::exchange(version.copied_by, nullptr);
  const bool unconstrained = version.unconstrained;
  expel(version);
  heir.admit(version, unconstrained);
  version.copied_by = copied_by;
}

void Table::note_result(const Version& version) {
  Table& root = *domain->root;
  root.results_left += version.nbytes;
  root.results_ahead -= std::min<std::size_t>(root.results_ahead, version.nbytes);
  if (root.hands_out_) root.results_waiting += version.nbytes;
}

void Table::end_handing_out() {
  hands_out_ = false;
  results_waiting = 0;
}

void Table::charge(std::size_t nbytes) {
  for (Table* t = this; t != nullptr; t = t->enclosing.get()) {
    t->resident_bytes += nbytes;
    if (t->shared && t->own_bytes() > t->counted) t->count(t->own_bytes());
  }
  note_peak(0);
}

void Table::discharge(std::size_t nbytes) {
  for (Table* t = this; t != nullptr; t = t->enclosing.get()) {
    t->resident_bytes -= nbytes;
    if (t->shared && domain->giving_to != nullptr) t->count(t->counted - nbytes);
    if (t->resident_bytes == 0) t->emptied();
  }
}

void Table::charge_original(std::size_t nbytes) {
  for (Table* t = this; t != nullptr; t = t->enclosing.get()) t->unconstrained_bytes += nbytes;
  charge(nbytes);
}

void Table::discharge_original(std::size_t nbytes) {
  for (Table* t = this; t != nullptr; t = t->enclosing.get()) t->unconstrained_bytes -= nbytes;
  discharge(nbytes);
}

void Table::charge_trimmed(std::size_t nbytes) {
  for (Table* t = this; t != nullptr; t = t->enclosing.get()) t->trimmed_bytes += nbytes;
}

void Table::discharge_trimmed(std::size_t nbytes) {
  for (Table* t = this; t != nullptr; t = t->enclosing.get()) t->trimmed_bytes -= nbytes;
}

std::size_t Table::leaving() const {
  std::size_t sum = leaving_bytes;
  for (const Table* table : inner) sum += table->leaving();
  return sum;
}

std::size_t Table::evictable_bytes() const {
  std::size_t sum = loose_bytes + leaving_bytes + coming_bytes;
  for (const Table* table : inner) sum += table->evictable_bytes();
  return sum;
}

void Table::note_peak(std::size_t in_flight) {
  for (Table* t = this; t != nullptr; t = t->enclosing.get()) {
    Statistics& s = t->statistics;
    s.peak_bytes = std::max(s.peak_bytes, t->used_bytes() + in_flight);
    const std::size_t would_be = t->unconstrained_bytes + t->unrecorded_bytes + in_flight;
    if (would_be <= s.unconstrained_bytes) continue;
    s.unconstrained_bytes = would_be;
    t->report->unconstrained_bytes = would_be;
    if (t->fraction > 0) [[unlikely]] {
      t->raise_budget(t->fraction * static_cast<double>(would_be));
    }
  }
}

// Note [A fraction of what is not known yet]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
// The budget of a fraction is that of the largest of the peaks that are known: the one that was
// expected, and the one that the call would have had so far, which note_peak() sees to. What was
// expected may be far too little: a call of another size, or another program under the same
// arguments. Then an operator may not fit although the whole call would. The operator's own bytes
// are part of the call's peak, so they count first. If that is not enough and the peak was only an
// estimate, the budget gives way to what the operator needs, for the peak is still to come. If it does
// not come, Python sees at the call's end that the budget was more than its fraction, and the calls that
// are alike do not give way.
bool Table::give_way(std::size_t nbytes, std::size_t in_flight) {
  const std::size_t would_be = unconstrained_bytes + unrecorded_bytes + in_flight;
  if (nbytes > budget) raise_budget(fraction * static_cast<double>(would_be));
  if (nbytes > budget && is_estimate) raise_budget(static_cast<double>(nbytes));
  return nbytes <= budget;
}

[[gnu::noinline]] void Table::raise_budget(double bytes) {
  budget = std::max(budget, static_cast<std::size_t>(bytes));
  report->budget = budget;
}

void Table::note_need(std::size_t nbytes) {
  for (Table* t = this; t != nullptr; t = t->enclosing.get()) {
    t->statistics.min_budget = std::max(t->statistics.min_budget, nbytes);
  }
}

void Table::mark(Version& version, std::string_view name) {
  version.kept = version.marked = policy.keeping.marked(name);
  if (version.is_candidate()) candidates[version.slot].weight = weight_of(version);
}

void Table::let_go_by(std::vector<Way*> ways) {
  ways_ = std::move(ways);
  has_copies_ |= std::ranges::any_of(ways_, &Way::keeps_copy);
}

void Table::for_each_way(const Version& version, c10::function_ref<void(Way&)> visit) const {
  Way& drop = domain->drop_and_replay;
  const bool is_useless = version.next_use == kNever && version.pending == 0;
  if (is_useless && drop.applies(version)) return visit(drop);  // Rule 7
  for (const Table* t = this; t != nullptr; t = t->enclosing.get()) {
    for (Way* way : t->ways_) {
      if (way->keeps_copy() && version.is_addressed()) continue;  // Rule 4
      if (way->applies(version)) visit(*way);
    }
  }
}

Way* Table::cheapest_way(const Version& version) const {
  Way* const drop = &domain->drop_and_replay;
  if (!has_copies_) return drop->applies(version) ? drop : nullptr;
  Way* cheapest = nullptr;
  for_each_way(version, [&](Way& way) {
    const bool is_cheaper = cheapest == nullptr || way.cost(version) < cheapest->cost(version);
    if (is_cheaper) cheapest = &way;
  });
  return cheapest;
}

// See Note [A version goes by a way]
void Table::enlist(Version& version) {
  // See Note [Candidates are listed once something has to go]
  if (!domain->lists_candidates() || version.nbytes == 0 || version.raw) return;
  version.way = cheapest_way(version);
  if (version.way == nullptr) return;
  version.slot = candidates.size();
  Candidate& c = candidates.emplace_back();  // See Note [Records are filled in place]
  c.nbytes = static_cast<double>(version.nbytes);
  c.cost = version.way->cost(version);
  c.last_access = version.last_access;
  c.next_use = version.next_use;
  c.weight = weight_of(version);
  c.consumed = version.consumed;
  c.pinned = version.pins > 0;
  c.pending = version.pending > 0;
  candidate_versions.push_back(&version);
  if (version.pins > 0) return;
  loose_bytes += version.nbytes;
  offer(version);
}

void Table::relist(Version& version) {
  if (!has_copies_) return;
  delist(version);
  if (version.place == Place::kHere) enlist(version);
}

void Table::offer(Version& version) {
  if (leaves_early) domain->evictor.note_touched(version);
  if (batch.evictions_left == 0 || version.batch_slot != kNoSlot) return;
  if (batch.versions.size() > 2 * candidates.size()) batch.clear();  // nobody has looked for long
  batch.add(version);
}

void Table::delist(Version& version) {
  if (!version.is_candidate()) return;
  const std::size_t slot = version.slot;
  if (version.pins == 0) loose_bytes -= version.nbytes;
  candidates[slot] = candidates.back();
  candidate_versions[slot] = candidate_versions.back();
  candidate_versions[slot]->slot = slot;
  candidates.pop_back();
  candidate_versions.pop_back();
  version.slot = kNoSlot;
  batch.remove(version);
  domain->evictor.forget(version);
}

bool is_within(const Table* table, const Table& whole) {
  while (table != nullptr && table != &whole) table = table->enclosing.get();
  return table != nullptr;
}

// Scores of values that matter lie within some twenty orders of magnitude.
double weight_of(const Version& version) {
  constexpr double kKept = 1e40;
  return version.kept ? version.weight * kKept : version.weight;
}

void make_stale(const Version& version, bool lower) {
  Candidate& c = version.table->candidates[version.slot];
  c.stale = true;
  if (!lower) return;
  c.ancestors = 0;
  c.next_use = version.next_use;
}

void pin(Version& version) {
  if (version.pins++ > 0 || !version.is_candidate()) return;
  version.table->loose_bytes -= version.nbytes;
  version.table->candidates[version.slot].pinned = true;
  version.table->batch.remove(version);
}

void unpin(Version& version) {
  if (--version.pins > 0 || !version.is_candidate()) return;
  version.table->loose_bytes += version.nbytes;
  version.table->candidates[version.slot].pinned = false;
  version.table->offer(version);
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

void Table::check() const {
  std::size_t own = 0;
  std::size_t unconstrained = 0;
  std::size_t loose = 0;
  std::size_t trimmed = 0;
  std::size_t leaving = 0;
  std::size_t coming = 0;
  for (std::size_t i = 0; i < candidates.size(); ++i) {
    const Version& v = *candidate_versions[i];
    require_invariant(v.slot == i && v.table.get() == this, "L2: a candidate is listed by its table");
    require_invariant(v.place == Place::kHere && v.nbytes > 0 && v.way != nullptr && v.way->applies(v),
                      "L2: a candidate can go");
    require_invariant(candidates[i].pinned == (v.pins > 0), "L4: a candidate knows its pins");
    if (v.pins == 0) loose += v.nbytes;
  }
  for (const Version* v = oldest; v != nullptr; v = v->next) {
    require_invariant(!v->must_be_replayed() || v->producer, "L1: what is away has a copy or a producer");
    require_invariant((v->place == Place::kHere) == (v->copied_by == nullptr) || v->must_be_replayed(),
                      "L1: what is here has no copy");
    require_invariant(v->pins == 0 || v->place == Place::kHere, "L4: pins imply that it is here");
    if (v->has_bytes()) own += v->nbytes;
    if (v->has_bytes() && v->trimmed) trimmed += v->nbytes;
    if (v->place == Place::kLeaving) leaving += v->nbytes;
    if (v->place == Place::kComing) coming += v->nbytes;
    if (v->unconstrained) unconstrained += v->nbytes;
    for (const Input* use = v->readers; use != nullptr; use = use->next) {
      const auto& inputs = use->reader->inputs;
      require_invariant(use->version.get() == v && inputs.begin() <= use && use < inputs.end(),
                        "L6: readers mirror inputs");
      require_invariant((use->previous == nullptr ? v->readers : use->previous->next) == use,
                        "L6: readers are linked");
    }
    if (v->producer) {
      const auto& outputs = v->producer->outputs;
      require_invariant(std::find(outputs.begin(), outputs.end(), v) != outputs.end(),
                        "L6: outputs mirror producers");
      for (const Input& input : v->producer->inputs) {
        const Operation* earlier = input.version->producer.get();
        require_invariant(earlier == nullptr || earlier->order < v->producer->order,
                          "L3: inputs come before their readers");
      }
    }
  }
  for (const Table* table : inner) {
    own += table->resident_bytes;
    unconstrained += table->unconstrained_bytes;
    trimmed += table->trimmed_bytes;
  }
  require_invariant(loose == loose_bytes, "L5: loose bytes are the sum over unpinned candidates");
  require_invariant(leaving == leaving_bytes, "L5: leaving bytes are the sum over what is leaving");
  require_invariant(coming == coming_bytes, "L5: coming bytes are the sum over what is coming");
  require_invariant(trimmed == trimmed_bytes, "L5: trimmed bytes are the sum over what was trimmed");
  require_invariant(unconstrained == unconstrained_bytes,
                    "L7: unconstrained bytes are the sum over versions that count in them");
  require_invariant(own == resident_bytes, "L5: bytes are the sum over resident versions");
}

}  // namespace rematfn
