// SPDX-License-Identifier: Apache-2.0
#include "memory/idle_pages.h"

#include <pthread.h>

#include <chrono>
#include <exception>
#include <mutex>
#include <thread>

#include "base/background.h"
#include "memory/pages.h"

namespace rematfn {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::chrono::seconds kWhile{10};  // as in jemalloc

// Of this process; a forked child has one of its own. Never destroyed, so that the thread, which
// nobody waits for, may still sleep when the process ends.
struct Watch {
  std::mutex mutex;
  Clock::time_point until;
  bool runs = false;  // the thread, which will look at `until` once more
};

Watch* watch = nullptr;

void work(Watch& own) {
  std::unique_lock lock(own.mutex);
  while (Clock::now() < own.until) {
    const Clock::time_point until = own.until;
    lock.unlock();
    std::this_thread::sleep_until(until);
    lock.lock();
  }
  pages().give_back_kept();  // if a level lives, at most addresses that are dear
  own.runs = false;
}

Watch& the_watch() {
  static const bool made = [] {
    watch = new Watch;
    pthread_atfork([] { watch->mutex.lock(); }, [] { watch->mutex.unlock(); },
                   [] { watch = new Watch; });
    return true;
  }();
  static_cast<void>(made);
  return *watch;
}

}  // namespace

void keep_pages_for_a_while() {
  if (!pages().keeps()) return;
  try {
    Watch& own = the_watch();
    const std::lock_guard guard(own.mutex);
    own.until = Clock::now() + kWhile;
    if (own.runs) return;
    start_in_background([&own] { work(own); }).detach();
    own.runs = true;
  } catch (const std::exception&) {
    pages().give_back_kept();  // no thread is to be had, or no memory for one
  }
}

}  // namespace rematfn
