// SPDX-License-Identifier: Apache-2.0
//
// errors.h: raising rematfn's own exceptions from code that knows no Python.

#pragma once

#include <c10/util/Exception.h>

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

[[nodiscard]] std::string format_bytes(std::size_t nbytes);
// What the printed number stands for when it is typed back in: `nbytes` or a little more.
[[nodiscard]] std::size_t as_printed(std::size_t nbytes);

}  // namespace rematfn
