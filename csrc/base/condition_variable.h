// SPDX-License-Identifier: Apache-2.0
//
// condition_variable.h: std::condition_variable, as the standard libraries of older systems have it.
//
// `wait` has a second version in GCC 12's standard library (GLIBCXX_3.4.30), which lets a thread be
// cancelled while it waits (GCC's bug 103382). We cancel none. A core that is linked with it does not
// load where GCC 11's library is the system's, as on RHEL 9. So we ask for the first one, which all
// libraries keep, in the function that calls it: link-time optimisation puts what stands outside of
// functions into a file of its own, and other files then have the second.

#pragma once

#include <condition_variable>
#include <mutex>

namespace rematfn {

[[gnu::noinline]] inline void wait_on(std::condition_variable& changed, std::unique_lock<std::mutex>& lock) {
#ifdef __GLIBCXX__
#define REMATFN_WAIT "_ZNSt18condition_variable4waitERSt11unique_lockISt5mutexE"
  __asm__(".symver " REMATFN_WAIT "," REMATFN_WAIT "@GLIBCXX_3.4.11");
#undef REMATFN_WAIT
#endif
  changed.wait(lock);
}

}  // namespace rematfn
