// SPDX-License-Identifier: Apache-2.0
//
// release.cpp: the part of Domain that locks, and queues what the program drops meanwhile.

#include <stdexcept>

#include "domain.h"
#include "interpreter.h"

namespace rematfn {

void Domain::release(Ref<Version> version, Ref<Table> level, Bytes bytes) {
  const std::shared_ptr<Domain> alive = shared_from_this();
  // See Note [The program may drop a tensor at any time]
  if (mutex_.try_lock()) {
    const bool busy = depth_ > 0;
    if (!busy) {
      bury_contents(std::move(version), bytes);
      level.reset();
      drain();
      mutex_.unlock();
      drain_if_free();
      return;
    }
    mutex_.unlock();
  }
  {
    const std::lock_guard guard(released_mutex_);
    released_.push_back({std::move(bytes), std::move(version), std::move(level)});
    any_released_ = true;
  }
  drain_if_free();
}

void Domain::drain_released_if_free() {
  while (any_released_ && mutex_.try_lock()) {
    const bool busy = depth_ > 0;
    if (!busy) drain();
    mutex_.unlock();
    if (busy) break;
  }
}

void Domain::drain_released() {
  while (any_released_) {
    std::vector<Released> batch;
    {
      const std::lock_guard guard(released_mutex_);
      batch.swap(released_);
      any_released_ = false;
    }
    for (Released& released : batch) bury_contents(std::move(released.version), released.bytes);
  }
}

// See Note [A fork loses the domains of other threads]
void Domain::after_fork() {
  lost_to_fork_ = !mutex_.try_lock();
  if (!lost_to_fork_) mutex_.unlock();
}

DomainLock::DomainLock(std::shared_ptr<Domain> domain) : domain_(std::move(domain)) {
  if (domain_->lost_to_fork_) {
    throw std::runtime_error(
        "rematfn: this tensor's level was running an operator on another thread when the process "
        "forked, and is lost to the child. Fork while no other thread is in the level, or pass a "
        "clone made outside of it.");
  }
  lock_without_interpreter(domain_->mutex_);
  if (domain_->depth_ == 0) domain_->drain();
  ++domain_->depth_;
}

DomainLock::~DomainLock() {
  if (--domain_->depth_ == 0) domain_->drain();
  domain_->mutex_.unlock();
  domain_->drain_if_free();
}

}  // namespace rematfn
