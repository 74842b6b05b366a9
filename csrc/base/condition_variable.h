// SPDX-License-Identifier: Apache-2.0
//
// condition_variable.h: std::condition_variable, as the standard libraries of older systems have it.
//
// `wait` has a second version in GCC 12's standard library (GLIBCXX_3.4.30), which lets a thread be
// cancelled while it waits (GCC's bug 103382). We cancel none. A core that is linked with it does not
// load where GCC 11's library is the system's, as on RHEL 9. So we ask for the first one, which all
// libraries keep.

#pragma once

#include <condition_variable>

#ifdef __GLIBCXX__
#define REMATFN_WAIT "_ZNSt18condition_variable4waitERSt11unique_lockISt5mutexE"
__asm__(".symver " REMATFN_WAIT "," REMATFN_WAIT "@GLIBCXX_3.4.11");
#undef REMATFN_WAIT
#endif
