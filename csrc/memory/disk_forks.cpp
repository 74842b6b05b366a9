// SPDX-License-Identifier: Apache-2.0
#include <pthread.h>

#include <utility>

#include "memory/disk_state.h"

namespace rematfn {

// When the library is loaded, and so before all others. See Note [No transfer runs across a fork]
const int Disk::State::Forks::watching =
    pthread_atfork(&Forks::before, &Forks::after_in_parent, &Forks::after_in_child);

Disk::State::Forks& Disk::State::Forks::get() {
  static auto* const forks = new Forks;  // outlives what is destroyed at exit
  return *forks;
}

void Disk::State::Forks::before() {
  Forks& forks = get();
  forks.mutex.lock();
  for (State* state : forks.states) {
    std::unique_lock lock(state->mutex_);
    state->paused_ = true;
    state->done_.wait(lock, [&] { return state->in.under_way + state->out.under_way == 0; });
    lock.release();  // until the fork is over
  }
}

void Disk::State::Forks::after_in_parent() {
  Forks& forks = get();
  for (State* state : forks.states) {
    state->paused_ = false;
    state->mutex_.unlock();
    state->work_.notify_all();
  }
  forks.mutex.unlock();
}

// What the parent's threads may have waited for is not touched any more.
void Disk::State::Forks::after_in_child() {
  Forks& forks = get();
  const std::set<State*> before = std::exchange(forks.states, {});
  for (State* state : before) {
    state->lost_ = true;
    if (state->file_) state->file_->close();
  }
  forks.mutex.unlock();
  for (State* state : before) {
    if (state->disk_ == nullptr) continue;
    state->disk_->state_ = make(state->options_, state->calls_, state->disk_);
  }
}

}  // namespace rematfn
