// SPDX-License-Identifier: Apache-2.0
#include "engine/table.h"

#include <algorithm>

#include "base/invariant.h"

namespace rematfn {

void Batch::add(Version& version) {
  version.batch_slot = versions.size();
  versions.push_back(&version);
}

void Batch::remove(Version& version) {
  if (version.batch_slot == kNoSlot) [[likely]] return;
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

void Recent::add(Version& version, double due) {
  if (due == kNever) return;
  first_due = std::min(first_due, due);
  version.recent_slot = versions.size();
  versions.push_back(&version);
}

void Recent::remove(Version& version) {
  if (version.recent_slot == kNoSlot) [[likely]] return;
  versions.back()->recent_slot = version.recent_slot;
  versions[version.recent_slot] = versions.back();
  versions.pop_back();
  version.recent_slot = kNoSlot;
}

Table::Table(const std::shared_ptr<Domain>& owner, Ledger& its_ledger, Table* outer, std::size_t bytes,
             Policy asked)
    : domain(owner),
      ledger(its_ledger),
      report(std::make_shared<Report>()),
      enclosing(outer),
      budget(bytes),
      policy(std::move(asked)),
      depth(outer == nullptr ? 1 : outer->depth + 1),
      is_bounded(bytes != kNoBudget || (outer != nullptr && outer->is_bounded)),
      leaves_early(outer != nullptr && outer->leaves_early),
      statistics(report->statistics),
      resident_bytes_(report->resident_bytes),
      has_copies_(outer != nullptr && outer->has_copies_) {
  report->budget = bytes;
  report->domain = domain;
  if (outer != nullptr) outer->inner.push_back(this);
}

Table::~Table() {
  if (enclosing) std::erase(enclosing->inner, this);
}

void Table::link(Version& version) {
  version.table = Ref<Table>(this);
  version.previous = newest;
  (newest == nullptr ? oldest : newest->next) = &version;
  newest = &version;
}

void Table::unlink(Version& version) {
  (version.previous == nullptr ? oldest : version.previous->next) = version.next;
  (version.next == nullptr ? newest : version.next->previous) = version.previous;
  version.previous = version.next = nullptr;
  version.table.reset();
}

std::size_t Table::with_inner(std::size_t Table::*nbytes) const {
  std::size_t sum = this->*nbytes;
  for (const Table* table : inner) sum += table->with_inner(nbytes);
  return sum;
}

void Table::note_peak(std::size_t in_flight) {
  for (Table* t = this; t != nullptr; t = t->enclosing.get()) {
    Statistics& s = t->statistics;
    s.peak_bytes = std::max(s.peak_bytes, t->used_bytes() + in_flight);
    const std::size_t would_be = t->unconstrained_bytes_ + t->unrecorded_bytes_ + in_flight;
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
  const std::size_t would_be = unconstrained_bytes_ + unrecorded_bytes_ + in_flight;
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

void Table::evict_by(std::vector<Way*> ways) {
  ways_ = std::move(ways);
  has_copies_ |= std::ranges::any_of(ways_, &Way::keeps_copy);
}

bool is_within(const Table* table, const Table& whole) {
  while (table != nullptr && table != &whole) table = table->enclosing.get();
  return table != nullptr;
}

void make_stale(const Version& version, bool lower) {
  Candidate& c = version.table->candidates[version.slot];
  c.stale = true;
  if (!lower) [[likely]] return;
  c.ancestors = 0;
  c.next_use = version.next_use;
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
    require_invariant(v.is_here() && v.nbytes > 0 && v.way != nullptr && v.way->applies(v),
                      "L2: a candidate can go");
    require_invariant(candidates[i].pinned == (v.pins > 0), "L4: a candidate knows its pins");
    if (v.pins == 0) loose += v.nbytes;
  }
  for (const Version* v = oldest; v != nullptr; v = v->next) {
    require_invariant(!v->must_be_replayed() || v->producer, "L1: what is away has a copy or a producer");
    require_invariant(v->is_here() == (v->copied_by() == nullptr) || v->must_be_replayed(),
                      "L1: what is here has no copy");
    require_invariant(v->pins == 0 || v->is_here(), "L4: pins imply that it is here");
    if (v->has_bytes()) own += v->nbytes;
    require_invariant(!v->is_packed() || v->copied_by() != nullptr, "L1: what is packed has a copy");
    own += v->packed_bytes;
    if (v->has_bytes() && v->trimmed) trimmed += v->nbytes;
    if (v->place() == Place::kLeaving) leaving += v->nbytes;
    if (v->place() == Place::kComing) coming += v->nbytes;
    if (v->has_tensor) unconstrained += v->nbytes;
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
    own += table->resident_bytes_;
    unconstrained += table->unconstrained_bytes_;
  }
  require_invariant(loose == loose_bytes_, "L5: loose bytes are the sum over unpinned candidates");
  require_invariant(leaving == leaving_bytes_, "L5: leaving bytes are the sum over what is leaving");
  require_invariant(coming == coming_bytes_, "L5: coming bytes are the sum over what is coming");
  require_invariant(trimmed == trimmed_bytes_, "L5: trimmed bytes are the sum over what was trimmed");
  require_invariant(unconstrained == unconstrained_bytes_,
                    "L7: unconstrained bytes are the sum over versions with tensors");
  require_invariant(own == resident_bytes_, "L5: bytes are the sum over resident versions");
}

// ---- what a table adds to the sum of a budget that others share -----------------------------------

bool is_shared_around(const std::shared_ptr<SharedBudget>& budget, const Table* table) {
  while (table != nullptr && table->shared != budget) table = table->enclosing.get();
  return table != nullptr;
}

void Table::count(std::size_t nbytes) {
  shared->recount(counted, nbytes);
  counted = nbytes;
}

std::size_t Table::available_bytes() const {
  if (!shared) return budget;
  const std::size_t own = counted + unrecorded_bytes_;
  const std::size_t all = shared->resident_bytes();
  return budget - std::min(all > own ? all - own : 0, budget);
}

}  // namespace rematfn
