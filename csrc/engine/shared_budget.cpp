// SPDX-License-Identifier: Apache-2.0
#include "engine/shared_budget.h"

#include <chrono>
#include <deque>
#include <mutex>
#include <thread>
#include <utility>

#include "base/interpreter.h"
#include "engine/domain.h"

namespace rematfn {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::chrono::microseconds kMoment(200);
constexpr std::chrono::seconds kPatience(60);

struct Locks {
  std::mutex joining;
  std::recursive_mutex turn;
};
Locks*& locks() {
  static auto* instance = new Locks;  // outlives the tensors of a dying process
  return instance;
}

auto wait_for_turn(Domain& taker) {
  taker.lends = true;
  lock_without_interpreter(locks()->turn);
  taker.lends = false;
  return std::unique_lock(locks()->turn, std::adopt_lock);
}

template <class T>
void raise_to(std::atomic<T>& highest, T value) {
  T before = highest;
  while (before < value && !highest.compare_exchange_weak(before, value)) {
  }
}

}  // namespace

void lock_sharing() { locks()->joining.lock(); }
void unlock_sharing() { locks()->joining.unlock(); }
void forget_sharing_after_fork() { locks() = new Locks; }

// Whoever takes from us may need the interpreter: a score may be written in Python.
void lend(Domain& domain) {
  domain.lends = true;
  const detail::WithoutInterpreter scope;
  std::this_thread::sleep_for(kMoment);
  wait_for_turn(domain);
}

// ---- what a table adds to the sum -------------------------------------------------------------

bool is_shared_around(const std::shared_ptr<SharedBudget>& budget, const Table* table) {
  while (table != nullptr && table->shared != budget) table = table->enclosing.get();
  return table != nullptr;
}

void Table::join(std::shared_ptr<SharedBudget> budget_of_many) {
  shared = std::move(budget_of_many);
  shared_time = shared->clock_ - domain->clock;
  domain->sharing.push_back(this);
  const std::lock_guard guard(locks()->joining);
  shared->tables_.push_back(this);
  ++shared->count_;
}

void Table::leave_shared() {
  std::erase(domain->sharing, this);
  count(0);
  {
    const std::lock_guard guard(locks()->joining);
    std::erase(shared->tables_, this);
    --shared->count_;
  }
  shared.reset();
}

void Table::count(std::size_t nbytes) {
  const std::size_t used = shared->used_ += nbytes - counted;
  if (nbytes > counted) raise_to(shared->peak_, used);
  counted = nbytes;
}

bool Table::claim(std::size_t nbytes) {
  raise_to(shared->clock_, domain->clock + shared_time);
  shared_time = shared->clock_ - domain->clock;
  const std::size_t wanted = own_bytes() + nbytes;
  std::size_t used = shared->used_;
  do {
    if (used - counted + wanted > shared->bytes) return false;
  } while (!shared->used_.compare_exchange_weak(used, used - counted + wanted));
  raise_to(shared->peak_, used - counted + wanted);
  counted = wanted;
  return true;
}

std::size_t Table::available_bytes() const {
  if (!shared) return budget;
  const std::size_t own = counted + unrecorded_bytes;
  const std::size_t all = shared->used_;
  return budget - std::min(all > own ? all - own : 0, budget);
}

// ---- making room ------------------------------------------------------------------------------

void SharedBudget::visit_tables(c10::function_ref<void(const Table&)> visit) const {
  const std::lock_guard guard(locks()->joining);
  for (const Table* table : tables_) visit(*table);
}

// For a scope: this thread has the tables to itself, but for those where another runs an operator.
class SharedBudget::Sharers {
 public:
  Sharers(const SharedBudget& budget, Domain& taker) : turn_(wait_for_turn(taker)) {
    const std::lock_guard guard(locks()->joining);
    for (Table* table : budget.tables_) {
      locks_.emplace_back(table->domain, std::try_to_lock);
      if (!locks_.back() && !table->domain->lends) continue;
      table->domain->giving_to = &taker;
      tables.push_back(table);
    }
    are_all = tables.size() == budget.tables_.size();
  }
  ~Sharers() {
    for (Table* table : tables) table->domain->giving_to = nullptr;
  }

  std::vector<Table*> tables;
  bool are_all;

 private:
  std::unique_lock<std::recursive_mutex> turn_;
  std::deque<DomainLock> locks_;
};

// False if nothing is left to go.
bool SharedBudget::evict_for(Table& table, std::size_t nbytes, const std::vector<Table*>& members) {
  struct Offer {
    Table* table;
    Version* victim;
    double score = kNever;
  };
  const auto offer_of = [&](Table& member) {
    Domain& domain = *member.domain;
    Version* const victim = domain.evictor.find_victim(member, /*spare_pending=*/true);
    if (victim == nullptr) return Offer{&member, nullptr};
    const double now = clock_ - member.shared_time;
    return Offer{&member, victim, score({}, victim->table->candidates[victim->slot], {.now = now})};
  };
  std::vector<Offer> offers;
  for (Table* member : members) {
    member->domain->end_moves(*member);  // what leaves anyway goes first
    member->domain->list_candidates();
    if (member->domain == table.domain && member != &table) member->settle();
    offers.push_back(offer_of(*member));
  }
  while (!table.claim(nbytes)) {
    Offer& lowest = *std::ranges::min_element(offers, {}, &Offer::score);
    if (lowest.victim == nullptr) {
      lowest = {&table, table.domain->evictor.find_victim(table, /*spare_pending=*/false)};
    }
    if (lowest.victim == nullptr) return false;
    Domain& domain = *lowest.table->domain;
    domain.evict(*lowest.victim);
    domain.end_moves(*lowest.table);
    lowest = offer_of(*lowest.table);
  }
  return true;
}

void SharedBudget::make_room(Table& table, std::size_t nbytes) {
  Domain& domain = *table.domain;
  std::size_t before = used_;
  for (Clock::time_point last_change = Clock::now();;) {
    {
      const Sharers sharers(*this, domain);
      if (evict_for(table, nbytes, sharers.tables)) return;
      if (std::exchange(before, used_) != before) last_change = Clock::now();
      if (sharers.are_all || Clock::now() - last_change > kPatience) {
        const std::size_t held = used_ - table.counted + table.own_bytes();
        throw NoRoom{&table, held + nbytes, held};
      }
    }
    domain.store.serve_signals();
    lend(domain);
  }
}

}  // namespace rematfn
