// SPDX-License-Identifier: Apache-2.0
//
// model.h: what programs have in common that put parts of the core to the test.

#pragma once

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <functional>
#include <map>
#include <string>
#include <string_view>

namespace rematfn {

inline void expect(bool holds, std::string_view what) {
  if (holds) return;
  std::printf("failed: %.*s\n", static_cast<int>(what.size()), what.data());
  std::exit(1);
}

using Tests = std::map<std::string, std::function<void()>>;

// Runs those that are named; prints the names of all if none is. Prints what went wrong, if anything did.
inline void run_named(const Tests& tests, int count, char** names) {
  if (count == 0) {
    for (const auto& test : tests) std::printf("%s\n", test.first.c_str());
  }
  try {
    for (int i = 0; i < count; ++i) tests.at(names[i])();
  } catch (const std::exception& error) {
    expect(false, error.what());
  }
}

}  // namespace rematfn
