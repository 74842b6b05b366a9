// SPDX-License-Identifier: Apache-2.0
#include "base/interpreter.h"

#include <chrono>

namespace rematfn {
namespace {

Interpreter the_interpreter{};

}  // namespace

void set_interpreter(const Interpreter& interpreter) { the_interpreter = interpreter; }

void serve_signals_now_and_then() {
  using Clock = std::chrono::steady_clock;
  constexpr std::chrono::milliseconds kEvery(100);
  thread_local Clock::time_point last = Clock::now();
  const Clock::time_point now = Clock::now();
  if (now - last < kEvery) return;
  last = now;
  if (the_interpreter.serve_signals != nullptr) the_interpreter.serve_signals();
}

bool is_stop(const std::exception& error) {
  return the_interpreter.is_stop != nullptr && the_interpreter.is_stop(error);
}

std::uint32_t place_in_program() {
  return the_interpreter.place == nullptr ? 0 : the_interpreter.place();
}

std::string describe_place(std::uint32_t place) {
  return the_interpreter.describe == nullptr ? "" : the_interpreter.describe(place);
}

WithoutInterpreter::WithoutInterpreter()
    : token_(the_interpreter.release == nullptr ? nullptr : the_interpreter.release()) {}

WithoutInterpreter::~WithoutInterpreter() {
  if (token_ != nullptr) the_interpreter.acquire(token_);
}

}  // namespace rematfn
