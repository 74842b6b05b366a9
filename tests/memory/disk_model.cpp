// SPDX-License-Identifier: Apache-2.0
//
// The disk tier without torch, but for what a storage is. The first argument is a folder on a disk; the
// others name tests, all if there are none. Prints what went wrong, if anything did.
#include "disk_model.h"

#include <exception>

using namespace rematfn;

int main(int count, char** arguments) {
  folder = arguments[1];
  Tests tests;
  for (const auto& some : {random_tests, fault_tests, order_tests}) tests.merge(some());
  try {
    for (const auto& [name, test] : tests) {
      if (count == 2) test();
    }
    for (int i = 2; i < count; ++i) tests.at(arguments[i])();
  } catch (const std::exception& error) {
    expect(false, error.what());
  }
}
