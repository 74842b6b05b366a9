// SPDX-License-Identifier: Apache-2.0
//
// search_thread.h: who goes on with a search: the one thread of a process that does so beside the calls,
// and a call for which there is no plan yet.
//
// Note [A search needs nothing of the interpreter]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
// A thread of Python's that is inside C++ when the interpreter is finalised is ended when it comes
// back for it, by unwinding; through a frame that must not throw, that is std::terminate, and a script
// that has done its work dies. So the thread is not Python's. It reads traces, which are numbers, never
// asks for the interpreter, and takes no signals. It ends where the process does, however that comes:
//   - by atexit(), Python's and C's: it is told to stop, which it notices within one operator, and is
//     waited for, so that it reads no static object that is being destroyed;
//   - by _exit(), a signal or an abort: with the process. Nothing of it is to be destroyed.
//   - A fork: it holds no lock but one, which the fork waits for, and it is not in the child. The plan
//     that it was simulating is simulated anew there, when a plan is asked for again.
//
// Note [A search takes what nobody wants]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
// On Linux the thread runs only where no other thread would (SCHED_IDLE). A nicer thread would not do: OpenMP's
// threads spin as they wait for one another, and one that wakes up is put beside one that spins rather than on a
// core that a nicer thread keeps busy. The slowest of calls 2 to 8 over the median of calls 46 to 60, two threads on
// two cores, with a thread that is nicer by 10 and with SCHED_IDLE (two processes):
//
//   LSTM at 0.15              3.5   2.2, 1.5
//   DenseNet at 0.3           3.3   1.5
//   GPT at 0.2                2.1   1.7, 1.4
//   mixtures of experts, 0.5  2.3   1.1
//
// Forty calls take as long together. Where all cores are always busy, a search may take hundreds of calls; these
// follow the best plan so far.

#pragma once

#include <memory>
#include <mutex>

#include "planning/program.h"

namespace rematfn {

// Goes on with `search`. Of several threads that do so, the searching one among them, one simulates at a time; and
// no call waits for a search other than its own. `lock` holds plans_mutex(), but not meanwhile.
void go_on(Search& search, Until until, std::unique_lock<std::mutex>& lock);
// Has the thread go on with the search that `program` has begun, unless that is over. Programs take turns, so
// that each soon has a plan that is better than its first. A program that nobody else holds any more is
// not searched for.
void search_later(const std::shared_ptr<Program>& program);
// Whether some search runs, or is to.
[[nodiscard]] bool is_searching();
// For good: those that run are stopped and waited for, later ones are not begun.
void end_searches();

// Guards all plans that are found, and is free across a fork.
[[nodiscard]] std::mutex& plans_mutex();

}  // namespace rematfn
