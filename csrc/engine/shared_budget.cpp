// SPDX-License-Identifier: Apache-2.0
#include "engine/shared_budget.h"

#include <pthread.h>

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

// A fork waits until nobody is just joining. Whose turn it is in the parent has none in the child. When the library is
// loaded, and so before all others of ours: a fork takes it after them.
const int sharing_at_fork = pthread_atfork([] { locks()->joining.lock(); }, [] { locks()->joining.unlock(); },
                                           [] { locks() = new Locks; });

template <class T>
void raise_to(std::atomic<T>& highest, T value) {
  T before = highest;
  while (before < value && !highest.compare_exchange_weak(before, value)) {
  }
}

}  // namespace

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
