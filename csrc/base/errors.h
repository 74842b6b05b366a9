// SPDX-License-Identifier: Apache-2.0
//
// errors.h: raising rematfn's own exceptions from code that knows no Python.

#pragma once

#include <c10/util/Exception.h>

#include <cstddef>
#include <string>

namespace rematfn {

enum class ErrorKind { kBudget, kReplay, kOffload };

// Throws the C++ exception that becomes rematfn.BudgetError, ReplayError or OffloadError. bindings.cpp
// sets the raiser; until then, c10::Error is thrown.
using Raiser = void (*)(ErrorKind, const std::string&);
void set_raiser(Raiser raiser);
[[noreturn]] void raise(ErrorKind kind, const std::string& message);
// Raises again what this thread raised last, if `text` quotes it: TorchScript's interpreter, which
// runs torch's forward-mode decompositions, makes a RuntimeError of every exception.
void raise_quoted(const std::string& text);
// What this thread raised last; empty if nothing.
[[nodiscard]] std::string last_message();

// A replay cannot give what the first run gave.
void check_replay(bool holds, const std::string& what);

// How the user wrote a budget.
struct Wording {
  std::string unit{};    // such as "MB"; none: bytes
  std::size_t peak = 0;  // if it was a fraction: of so many bytes
};

// In the largest binary unit that fits, or, where the user's is decimal, the largest of those.
[[nodiscard]] std::string format_bytes(std::size_t nbytes, const Wording& wording = {});

// A budget to ask for, as the user would write it, and what that stands for when it is typed in: what
// was to be written, or a little more.
struct Figure {
  std::size_t bytes;
  std::string text;
};
[[nodiscard]] Figure figure_of(std::size_t nbytes, const Wording& wording);

}  // namespace rematfn
