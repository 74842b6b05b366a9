// SPDX-License-Identifier: Apache-2.0
//
// release.cpp: the part of Domain that locks, and queues what the program drops meanwhile.

#include <algorithm>
#include <optional>
#include <stdexcept>
#include <utility>

#include "engine/domain.h"

namespace rematfn {

// See Note [The program may drop a tensor at any time]
void Domain::release(Ref<Version> version, Ref<Table> level, Store::HoldBytes hold) {
  std::unique_ptr<Released> released;
  while (!lock_.try_lock()) {
    if (!released) [[likely]] {
      released = std::make_unique<Released>(hold(), std::move(version), std::move(level));
    }
    if (lock_.leave(released.get())) [[likely]] return static_cast<void>(released.release());
  }
  if (released) [[unlikely]] {
    const std::shared_ptr<Domain> alive = shared_from_this();
    bury_released(std::move(released));
    return unlock();
  }
  bury(std::move(version), hold);
  // The domain lives as long as any of its levels.
  const std::shared_ptr<Domain> alive = level->references == 1 ? level->domain : nullptr;
  level.reset();
  unlock();
}

void Domain::bury_released(std::unique_ptr<Released> released) {
  bury(std::move(released->version), [&] { return released->bytes; });
}

// See Note [One word for a lock and its queue]
void Domain::unlock() {
  std::shared_ptr<Domain> alive;
  for (;;) {
    if (!lock_.is_nested()) [[likely]] std::ranges::for_each(sharing, &Table::settle);
    Released* released = lock_.unlock();
    if (released == nullptr) [[likely]] return;
    if (!alive) alive = shared_from_this();
    while (released != nullptr) {
      Released* next = released->next;
      bury_released(std::unique_ptr<Released>(released));
      released = next;
    }
  }
}

// See Note [A fork loses the domains of other threads]
void Domain::after_fork() {
  lost_to_fork_ = lock_.is_another_threads();
  while (lost_to_fork_ && !sharing.empty()) leave_shared(*sharing.back());
}

REMATFN_THREAD_LOCAL int DomainLock::held_ = 0;

DomainLock::DomainLock(std::shared_ptr<Domain> domain)
    : alive_(std::move(domain)), domain_(*alive_) {
  domain_.lock();
  ++held_;
}

DomainLock::DomainLock(Domain& domain) : domain_(domain) {
  domain_.lock();
  ++held_;
}

DomainLock::DomainLock(std::shared_ptr<Domain> domain, std::try_to_lock_t)
    : alive_(std::move(domain)), domain_(*alive_), locks_(domain_.lock_.try_lock_again()) {
  held_ += locks_;
}

DomainLock::~DomainLock() {
  if (!locks_) return;
  --held_;
  domain_.unlock();
}

void Domain::lock() {
  if (lost_to_fork_) {
    throw std::runtime_error(
        "rematfn: this tensor's level was running an operator on another thread when the process "
        "forked, and is lost to the child. Fork while no other thread is in the level, or pass a "
        "clone made outside of it.");
  }
  lock_.lock();
}

// ---- what others read under the lock ----------------------------------------------------------------

std::unique_ptr<DomainLock> Report::lock() const {
  const std::shared_ptr<Domain> owner = domain.lock();
  const bool has_one = owner && !owner->lost_to_fork() && !owner->is_held_here();
  return has_one ? std::make_unique<DomainLock>(owner) : nullptr;
}

Statistics Report::read() const {
  const auto locked = lock();
  return statistics;
}

std::shared_ptr<Trace> Report::take_trace(bool waits) {
  const std::shared_ptr<Domain> owner = domain.lock();
  std::optional<DomainLock> lock;
  if (owner && !owner->lost_to_fork()) {
    if (waits) {
      lock.emplace(owner);
    } else if (!lock.emplace(owner, std::try_to_lock)) {
      return nullptr;
    }
    if (owner->observers.recorder && owner->observers.recorder->trace == trace) owner->observers.recorder.reset();
  }
  return std::move(trace);
}

}  // namespace rematfn
