// SPDX-License-Identifier: Apache-2.0
//
// search_thread.h: the one thread of a process that looks for better plans.
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
//   - A fork: it holds no lock but one, which the fork waits for, and it is not in the child. What it
//     was searching for is searched for anew there, when it is asked for again.

#pragma once

#include <cstddef>
#include <memory>
#include <mutex>

#include "planning/program.h"

namespace rematfn {

// Has `program` look for a better plan for `budget`, after those that have been asked for before;
// nothing, if it has done so or is about to. A program that nobody else holds any more is not
// searched for.
void search_later(const std::shared_ptr<Program>& program, std::size_t budget,
                  const SearchLimits& limits);
// Whether some search runs, or is to.
[[nodiscard]] bool is_searching();
// For good: those that run are stopped and waited for, later ones are not begun.
void end_searches();

// Guards all plans that are found, and is free across a fork.
[[nodiscard]] std::mutex& plans_mutex();

}  // namespace rematfn
