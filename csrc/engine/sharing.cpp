// SPDX-License-Identifier: Apache-2.0
#include "engine/sharing.h"

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

auto wait_for_turn(Domain& taker) {
  taker.lends = true;
  lock_without_interpreter(SharedBudget::turn());
  taker.lends = false;
  return std::unique_lock(SharedBudget::turn(), std::adopt_lock);
}

}  // namespace

// Whoever takes from us may need the interpreter: a score may be written in Python.
void lend(Domain& domain) {
  domain.lends = true;
  const WithoutInterpreter scope;
  std::this_thread::sleep_for(kMoment);
  wait_for_turn(domain);
}

namespace {

// For a scope: this thread has the tables to itself, but for those where another runs an operator.
class Sharers {
 public:
  Sharers(const SharedBudget& budget, Domain& taker) : turn_(wait_for_turn(taker)) {
    budget.visit_tables([&](Table& table) {
      locks_.emplace_back(table.domain, std::try_to_lock);
      if (!locks_.back() && !table.domain->lends) return;
      table.domain->giving_to = &taker;
      tables.push_back(&table);
    });
    are_all = tables.size() == locks_.size();
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
bool evict_for(Table& table, std::size_t nbytes, const std::vector<Table*>& members) {
  struct Offer {
    Table* table;
    Version* victim;
    double score = kNever;
  };
  const auto offer_of = [&](Table& member) {
    Domain& domain = *member.domain;
    Version* const victim = domain.evictor.find_victim(member, /*spare_pending=*/true);
    if (victim == nullptr) return Offer{&member, nullptr};
    const double now = table.shared->clock() - member.shared_time;
    return Offer{&member, victim, score({}, victim->table->candidates[victim->slot], {.now = now})};
  };
  std::vector<Offer> offers;
  for (Table* member : members) {
    member->domain->end_moves(*member);  // what leaves anyway goes first
    member->domain->list_candidates();
    if (member->domain == table.domain && member != &table) member->settle();
    offers.push_back(offer_of(*member));
  }
  while (!table.ledger.claim(table, nbytes)) {
    Offer& lowest = *std::ranges::min_element(offers, {}, &Offer::score);
    if (lowest.victim == nullptr) {
      lowest = {&table, table.domain->evictor.find_victim(table, /*spare_pending=*/false)};
    }
    if (lowest.victim == nullptr) return false;
    Domain& domain = *lowest.table->domain;
    domain.evictor.evict(*lowest.victim);
    domain.end_moves(*lowest.table);
    lowest = offer_of(*lowest.table);
  }
  return true;
}

}  // namespace

void Domain::take_from_others(Table& table, std::size_t nbytes) {
  const SharedBudget& budget = *table.shared;
  std::size_t before = budget.resident_bytes();
  for (Clock::time_point last_change = Clock::now();;) {
    {
      const Sharers sharers(budget, *this);
      if (evict_for(table, nbytes, sharers.tables)) return;
      const std::size_t used = budget.resident_bytes();
      if (std::exchange(before, used) != before) last_change = Clock::now();
      if (sharers.are_all || Clock::now() - last_change > kPatience) {
        const std::size_t held = used - table.counted + table.own_bytes();
        throw NoRoom{&table, held + nbytes, held};
      }
    }
    store.serve_signals();
    lend(*this);
  }
}

}  // namespace rematfn
