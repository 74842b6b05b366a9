// SPDX-License-Identifier: Apache-2.0
#include "memory/idle_pages.h"

#include <pthread.h>

#include <atomic>
#include <chrono>
#include <system_error>
#include <thread>

#include "base/background.h"
#include "memory/pages.h"

namespace rematfn {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::chrono::seconds kWhile{10};  // as in jemalloc

std::atomic<Clock::time_point> until;
std::atomic<bool> runs{false};  // the thread, which nobody waits for

void work() {
  do {
    for (auto then = until.load(); Clock::now() < then; then = until) std::this_thread::sleep_until(then);
    pages().give_back_kept();
    runs = false;
  } while (Clock::now() < until.load() && !runs.exchange(true));  // somebody came, and saw it run
}

}  // namespace

void keep_pages_for_a_while() {
  if (!pages().keeps()) return;
  static const int in_child = pthread_atfork(nullptr, nullptr, [] { runs = false; });
  static_cast<void>(in_child);
  until = Clock::now() + kWhile;
  if (runs.exchange(true)) return;
  try {
    start_in_background(work).detach();
  } catch (const std::system_error&) {
    runs = false;
    pages().give_back_kept();
  }
}

}  // namespace rematfn
