// SPDX-License-Identifier: Apache-2.0
#include "engine/sharer.h"

#include <algorithm>
#include <chrono>
#include <mutex>
#include <optional>
#include <thread>

#include "base/interpreter.h"
#include "engine/domain.h"

namespace rematfn {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::chrono::microseconds kTurn(200);
constexpr std::chrono::seconds kPatience(60);

std::mutex& sharing() {
  static auto* const instance = new std::mutex;  // outlives the tensors of a dying process
  return *instance;
}

}  // namespace

void lock_sharing() { sharing().lock(); }
void unlock_sharing() { sharing().unlock(); }

// ---- the sum ----------------------------------------------------------------------------------

void SharedBudget::subtract(std::size_t nbytes) {
  if (nbytes == 0) return;
  used_ -= nbytes;
  ++changes_;
}

bool SharedBudget::try_replace(std::size_t before, std::size_t after) {
  std::size_t used = used_;
  do {
    if (used - before + after > bytes) return false;
  } while (!used_.compare_exchange_weak(used, used - before + after));
  note_peak(used - before + after);
  if (before != after) ++changes_;
  return true;
}

void SharedBudget::note_peak(std::size_t used) {
  std::size_t peak = peak_;
  while (used > peak && !peak_.compare_exchange_weak(peak, used)) {
  }
}

void SharedBudget::advance(double seconds) {
  double before = clock_;
  while (!clock_.compare_exchange_weak(before, before + seconds)) {
  }
}

void SharedBudget::join(Domain& domain) {
  const std::lock_guard guard(sharing());
  const auto member = std::find_if(members_.begin(), members_.end(),
                                   [&](const Member& m) { return m.domain == &domain; });
  if (member != members_.end()) {
    ++member->tables;
  } else {
    members_.push_back({&domain, domain.weak_from_this(), 1});
    member_count_ = members_.size();
  }
}

void SharedBudget::leave(Domain& domain) {
  const std::lock_guard guard(sharing());
  ++changes_;
  const auto member = std::find_if(members_.begin(), members_.end(),
                                   [&](const Member& m) { return m.domain == &domain; });
  if (--member->tables == 0) members_.erase(member);
  member_count_ = members_.size();
}

std::vector<std::shared_ptr<Domain>> SharedBudget::domains() const {
  std::vector<std::shared_ptr<Domain>> found;
  const std::lock_guard guard(sharing());
  for (const Member& member : members_) {
    if (auto domain = member.alive.lock()) found.push_back(std::move(domain));
  }
  return found;
}

// ---- what a table adds to it ------------------------------------------------------------------

bool is_shared_around(const std::shared_ptr<SharedBudget>& budget, const Table* table) {
  while (table != nullptr && table->shared != budget) table = table->enclosing.get();
  return table != nullptr;
}

void Table::join(std::shared_ptr<SharedBudget> budget_of_many) {
  shared = std::move(budget_of_many);
  domain->sharer.tables.push_back(this);
  clock_before = domain->clock;
  time_before = shared->clock();
  shared->join(*domain);
}

void Table::leave_shared() {
  std::erase(domain->sharer.tables, this);
  take_claim_back();
  shared->subtract(resident_bytes);
  shared->leave(*domain);
  shared.reset();
}

void Table::charge_shared(std::size_t nbytes) {
  const std::size_t claimed = std::min(in_flight, nbytes);
  in_flight -= claimed;
  if (nbytes > claimed) shared->add(nbytes - claimed);
}

void Table::hold(std::size_t nbytes) {
  for (Table* t = this; t != nullptr; t = t->enclosing.get()) {
    if (!t->shared) continue;
    t->in_flight += nbytes;
    t->shared->add_for_a_moment(nbytes);
  }
}

bool Table::claim(std::size_t nbytes) {
  if (!shared->try_replace(in_flight, nbytes)) return false;
  in_flight = nbytes;
  return true;
}

void Table::take_claim_back() {
  if (shared) shared->subtract(std::exchange(in_flight, 0));
}

// ---- lending ----------------------------------------------------------------------------------

Borrowed::Borrowed(std::shared_ptr<Domain> domain) : domain_(std::move(domain)) {
  if (domain_->lost_to_fork()) return;
  if (domain_->lock_.try_lock()) {
    how_ = How::kLocked;
  } else {
    const std::lock_guard guard(sharing());
    if (domain_->sharer.lending_ != Sharer::Lending::kLent) return;
    domain_->sharer.lending_ = Sharer::Lending::kTaken;
    how_ = How::kLent;
  }
  domain_->sharer.is_borrowed_ = true;
}

Borrowed::~Borrowed() {
  if (how_ == How::kNot) return;
  domain_->sharer.is_borrowed_ = false;
  if (how_ == How::kLocked) {
    domain_->unlock();
  } else {
    const std::lock_guard guard(sharing());
    domain_->sharer.lending_ = Sharer::Lending::kLent;
  }
}

// Whoever takes from us may need the interpreter: a score may be written in Python.
void Sharer::lend() {
  const detail::WithoutInterpreter scope;
  {
    const std::lock_guard guard(sharing());
    lending_ = Lending::kLent;
  }
  for (;;) {
    std::this_thread::sleep_for(kTurn);
    const std::lock_guard guard(sharing());
    if (lending_ == Lending::kTaken) continue;
    lending_ = Lending::kNot;
    return;
  }
}

// See Note [A shared budget is a sum]
void Sharer::take_claims_back() {
  for (Table* table : tables) table->take_claim_back();
}

// See Note [A fork loses the domains of other threads]
void Sharer::after_fork() {
  lending_ = Lending::kNot;
  if (!domain_.lost_to_fork()) return;
  while (!tables.empty()) tables.back()->leave_shared();
}

// ---- making room ------------------------------------------------------------------------------

std::size_t Sharer::budget_of(const Table& table) {
  if (!table.shared) return table.budget;
  const std::size_t own = table.used_bytes() + table.in_flight;
  const std::size_t all = table.shared->resident_bytes();
  const std::size_t others = all > own ? all - own : 0;
  return table.budget - std::min(others, table.budget);
}

// The next of what this domain would evict for `budget`.
std::optional<Sharer::Offer> Sharer::offer_for(const SharedBudget& budget) {
  std::optional<Offer> lowest;
  for (Table* table : tables) {
    if (table->shared.get() != &budget) continue;
    domain_.list_candidates();
    const Version* victim = domain_.evictor.find_victim(*table, /*spare_pending=*/true);
    if (victim == nullptr) continue;
    Candidate candidate = victim->table->candidates[victim->slot];
    candidate.last_access -= budget.clock() - table->time_before;  // all members' time
    const double found = score({}, candidate, {.now = domain_.clock});
    if (!lowest || found < lowest->score) lowest = Offer{table, found};
  }
  return lowest;
}

bool Sharer::end_leaving(const SharedBudget& budget) {
  bool any = false;
  for (Table* table : tables) {
    if (table->shared.get() != &budget || table->leaving() == 0) continue;
    domain_.end_moves(*table);
    any = true;
  }
  return any;
}

// Evicts until `table` has its claim. See Note [Whoever needs room may take it].
Sharer::Taken Sharer::take(Table& table, std::size_t nbytes) {
  const SharedBudget& budget = *table.shared;
  Taken taken;
  struct Other {
    std::shared_ptr<Domain> domain;
    std::optional<Offer> offer;
  };
  std::vector<Other> others;
  const auto look_at = [&](std::shared_ptr<Domain> domain, bool evicts) {
    Other other{std::move(domain), {}};
    const Borrowed borrowed(other.domain);
    if (!borrowed) {
      taken.some_busy |= other.domain->is_held_elsewhere();
      return other;
    }
    if (evicts) {
      // Another thread may have been here since.
      if (const auto offer = other.domain->sharer.offer_for(budget)) {
        taken.any |= other.domain->evictor.evict_one(*offer->table, /*spare_pending=*/true);
        other.domain->end_moves(*offer->table);
      }
    }
    other.offer = other.domain->sharer.offer_for(budget);
    return other;
  };
  for (std::shared_ptr<Domain>& domain : budget.domains()) {
    if (domain.get() != &domain_) others.push_back(look_at(std::move(domain), /*evicts=*/false));
  }
  std::optional<Offer> own = offer_for(budget);
  while (!(taken.enough = table.claim(nbytes))) {
    Other* lowest = nullptr;
    for (Other& other : others) {
      const bool is_lower =
          other.offer && (lowest == nullptr || other.offer->score < lowest->offer->score);
      if (is_lower) lowest = &other;
    }
    if (lowest != nullptr && (!own || lowest->offer->score < own->score)) {
      *lowest = look_at(std::move(lowest->domain), /*evicts=*/true);
      continue;
    }
    if (!own) break;
    if (domain_.evictor.prices_pending(*own->table)) {
      const std::size_t needed = budget.resident_bytes() - table.in_flight + nbytes;
      if (needed > budget.bytes) domain_.evictor.evict_by_price(*own->table, needed - budget.bytes);
    } else {
      domain_.evictor.evict_one(*own->table, /*spare_pending=*/true);
    }
    domain_.end_moves(*own->table);
    taken.any = true;
    own = offer_for(budget);
  }
  const auto claim_after = [&](Sharer& sharer) {
    if (taken.enough || !sharer.end_leaving(budget)) return;
    taken.any = true;
    taken.enough = table.claim(nbytes);
  };
  claim_after(*this);
  for (Other& other : others) {
    if (const Borrowed borrowed(other.domain); borrowed) claim_after(other.domain->sharer);
  }
  while (!taken.enough && domain_.evictor.evict_one(table, /*spare_pending=*/false)) {
    domain_.end_moves(table);
    taken.any = true;
    taken.enough = table.claim(nbytes);
  }
  return taken;
}

void Sharer::make_room(Table& table, std::size_t nbytes) {
  SharedBudget& budget = *table.shared;
  budget.advance(domain_.clock - table.clock_before);
  table.clock_before = domain_.clock;
  table.time_before = budget.clock();
  if (table.claim(nbytes)) return;
  domain_.list_candidates();
  // Whoever cannot have enough takes nothing.
  const std::size_t least = table.used_bytes() - table.evictable_bytes() + nbytes;
  if (least > budget.bytes) {
    if (!domain_.replayer.is_running()) table.note_need(least);
    throw NoRoom{&table, least, least - nbytes};
  }
  Clock::time_point last_change = Clock::now();
  for (std::uint64_t before = budget.changes();;) {
    const Taken taken = take(table, nbytes);
    if (taken.enough) return;
    if (taken.any) continue;
    const bool changed = std::exchange(before, budget.changes()) != before;
    if (changed) last_change = Clock::now();
    const bool hopes = taken.some_busy && Clock::now() - last_change < kPatience;
    if (!changed && !hopes) {
      const std::size_t held = budget.resident_bytes() - table.in_flight;
      throw NoRoom{&table, held + nbytes, held};
    }
    domain_.store.serve_signals();
    lend();
  }
}

}  // namespace rematfn
