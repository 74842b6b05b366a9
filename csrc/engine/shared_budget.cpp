// SPDX-License-Identifier: Apache-2.0
#include "engine/shared_budget.h"

namespace rematfn {
namespace {

struct Locks {
  std::mutex joining;
  std::recursive_mutex turn;
};
Locks*& locks() {
  static auto* instance = new Locks;  // outlives the tensors of a dying process
  return instance;
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
std::recursive_mutex& SharedBudget::turn() { return locks()->turn; }

void SharedBudget::enter(Table& table) {
  const std::lock_guard guard(locks()->joining);
  tables_.push_back(&table);
  ++count_;
}

void SharedBudget::leave(Table& table) {
  const std::lock_guard guard(locks()->joining);
  std::erase(tables_, &table);
  --count_;
}

double SharedBudget::advance(double clock) {
  raise_to(clock_, clock);
  return clock_;
}

void SharedBudget::recount(std::size_t before, std::size_t now) {
  const std::size_t used = used_ += now - before;
  if (now > before) raise_to(peak_, used);
}

bool SharedBudget::claim(std::size_t before, std::size_t now) {
  std::size_t used = used_;
  do {
    if (used - before + now > bytes) return false;
  } while (!used_.compare_exchange_weak(used, used - before + now));
  raise_to(peak_, used - before + now);
  return true;
}

void SharedBudget::visit_tables(c10::function_ref<void(Table&)> visit) const {
  const std::lock_guard guard(locks()->joining);
  for (Table* table : tables_) visit(*table);
}

}  // namespace rematfn
