// SPDX-License-Identifier: Apache-2.0
//
// The disk tier without torch, but for what a storage is. The first argument is a folder on a disk; the
// others name tests.
#include "disk_model.h"

using namespace rematfn;

int main(int count, char** arguments) {
  folder = arguments[1];
  Tests tests;
  for (const auto& some : {random_tests, fault_tests, order_tests}) tests.merge(some());
  run_named(tests, count - 2, arguments + 2);
}
