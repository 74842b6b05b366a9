// SPDX-License-Identifier: Apache-2.0
//
// background.h: threads that are nobody's but ours.

#pragma once

#include <c10/util/ScopeExit.h>
#include <signal.h>

#include <thread>
#include <utility>

namespace rematfn {

// A thread that takes no signals. Throws std::system_error if none is to be had.
template <class Work>
std::thread start_in_background(Work work) {
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  const auto restore = c10::make_scope_exit([&] { pthread_sigmask(SIG_SETMASK, &before, nullptr); });
  return std::thread(std::move(work));
}

}  // namespace rematfn
