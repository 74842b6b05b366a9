// SPDX-License-Identifier: Apache-2.0
//
// queue_lock.h: a recursive lock, and a queue for those who cannot wait for it.
//
// Note [One word for a lock and its queue]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
// Who releases the lock has to see to what was queued meanwhile, and who queues something must be
// sure that somebody will. Were lock and queue two things, the holder would look at the queue once
// more after it has released it; but by then another thread may have done so, and whatever the lock
// guards may be gone, with the lock. So both are one word: zero if the lock is free, else the newest
// entry of the queue, with a bit that says that it is taken. It becomes zero only when the queue is empty,
// and is not read after that. (Waiters are woken by its address; they hold what it stands in.)

#pragma once

#include <atomic>
#include <cstdint>
#include <thread>
#include <utility>

#include "base/interpreter.h"

namespace rematfn {

// An Entry has a pointer `next`, which is the queue's.
template <class Entry>
class QueueLock {
 public:
  // False if somebody has it, this thread perhaps.
  bool try_lock() {
    std::uintptr_t word = kFree;
    if (!word_.compare_exchange_strong(word, kTaken, std::memory_order_acquire,
                                       std::memory_order_relaxed)) {
      return false;
    }
    begin();
    return true;
  }

  // The same, and once more if it is this thread's.
  bool try_lock_again() {
    if (try_lock()) return true;
    if (!is_this_threads()) return false;
    ++depth_;
    return true;
  }

  // See Note [Who waits does not hold the interpreter]
  void lock() {
    if (try_lock_again()) return;
    const WithoutInterpreter scope;
    while (!try_lock()) {
      if (const std::uintptr_t word = word_.load(std::memory_order_relaxed); word != kFree) word_.wait(word);
    }
  }

  // Null: the lock is released. Else it is not, and this is what has been queued, oldest first.
  [[nodiscard]] Entry* unlock() {
    if (depth_ > 1) {
      --depth_;
      return nullptr;
    }
    depth_ = 0;
    owner_.store({}, std::memory_order_relaxed);
    std::uintptr_t word = kTaken;
    if (word_.compare_exchange_strong(word, kFree, std::memory_order_release,
                                      std::memory_order_relaxed)) {
      word_.notify_all();
      return nullptr;
    }
    begin();
    return oldest_first(entry_of(word_.exchange(kTaken, std::memory_order_acquire)));
  }

  // Queues `entry` for whoever has the lock; false if nobody has.
  bool leave(Entry* entry) {
    std::uintptr_t word = word_.load(std::memory_order_relaxed);
    while (word != kFree) {
      entry->next = entry_of(word);
      const std::uintptr_t with_entry = reinterpret_cast<std::uintptr_t>(entry) | kTaken;
      if (word_.compare_exchange_weak(word, with_entry, std::memory_order_release,
                                      std::memory_order_relaxed)) {
        return true;
      }
    }
    return false;
  }

  [[nodiscard]] bool is_this_threads() const {
    return owner_.load(std::memory_order_relaxed) == std::this_thread::get_id();
  }

  // Its owner asks: has it been taken more than once?
  [[nodiscard]] bool is_nested() const { return depth_ > 1; }

  [[nodiscard]] bool is_another_threads() const {
    return word_.load(std::memory_order_relaxed) != kFree &&
           owner_.load(std::memory_order_relaxed) != std::this_thread::get_id();
  }

 private:
  static constexpr std::uintptr_t kFree = 0;
  static constexpr std::uintptr_t kTaken = 1;

  static Entry* entry_of(std::uintptr_t word) {
    return reinterpret_cast<Entry*>(word & ~kTaken);
  }

  static Entry* oldest_first(Entry* newest) {
    Entry* first = nullptr;
    while (newest != nullptr) {
      Entry* next = std::exchange(newest->next, first);
      first = std::exchange(newest, next);
    }
    return first;
  }

  void begin() {
    owner_.store(std::this_thread::get_id(), std::memory_order_relaxed);
    depth_ = 1;
  }

  std::atomic<std::uintptr_t> word_{kFree};
  std::atomic<std::thread::id> owner_{};
  int depth_ = 0;  // the owner's
};

}  // namespace rematfn
