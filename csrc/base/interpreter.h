// SPDX-License-Identifier: Apache-2.0
//
// interpreter.h: what the core asks of the interpreter that it runs under, knowing nothing of it.
//
// Note [Who waits does not hold the interpreter]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
// A domain's lock is held while kernels run, and a kernel written in Python waits for the
// interpreter's lock. Most of torch's bindings release that one before they call an operator, but
// not all: `x[0]` and `x.T` do not. So a thread that holds it and has to wait for one of our locks
// releases it for the while; then whoever holds ours can always get the interpreter's, and the two
// threads do not wait for each other.
//
// Note [Interrupts are served between replays]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
// Python looks for Ctrl-C between its own instructions. One operator of a program may cause replays
// for minutes, so we look too, some ten times a second. What a signal handler does of its own with
// tensors of the level happens in the middle of a plan: it runs below the levels, and finds evicted
// tensors unreadable.

#pragma once

#include <cstdint>
#include <exception>
#include <string>

namespace rematfn {

struct Interpreter {
  // Releases the interpreter's lock; returns what acquire() wants, or null if this thread does
  // not hold it.
  void* (*release)();
  void (*acquire)(void* token);
  // Throws if the user wants the program to stop.
  void (*serve_signals)();
  // Whether an exception says so, and must not be swallowed.
  bool (*is_stop)(const std::exception& error);
  // Where in the user's program this thread is, by a number that is good for the life of the process;
  // 0: nowhere.
  std::uint32_t (*place)();
  std::string (*describe)(std::uint32_t place);
};

// Without one, nothing is asked.
void set_interpreter(const Interpreter& interpreter);

// Serves signals if that was last done on this thread a tenth of a second ago.
void serve_signals_now_and_then();

[[nodiscard]] bool is_stop(const std::exception& error);

[[nodiscard]] std::uint32_t place_in_program();
// Of a place that is not 0: "model.py:12 in forward".
[[nodiscard]] std::string describe_place(std::uint32_t place);

// For a scope: this thread does not hold the interpreter's lock.
class WithoutInterpreter {
 public:
  WithoutInterpreter();
  ~WithoutInterpreter();
  WithoutInterpreter(const WithoutInterpreter&) = delete;
  WithoutInterpreter& operator=(const WithoutInterpreter&) = delete;

 private:
  void* token_;
};

// See Note [Who waits does not hold the interpreter]
template <class Mutex>
void lock_without_interpreter(Mutex& mutex) {
  if (mutex.try_lock()) return;
  const WithoutInterpreter scope;
  mutex.lock();
}

}  // namespace rematfn
