// SPDX-License-Identifier: Apache-2.0
//
// way_out.cpp: prints what a guard has done as an exception passed: two zeros. See flags() in setup.py.

#include <cstdio>
#include <span>

template <class F>
struct Guard {
  F leave;
  ~Guard() { leave(); }
};

struct Room {
  bool busy = false;
};

void run(Room& room, std::span<int* const> counts, void (*work)()) {
  room.busy = true;
  const Guard end{[&] {
    room.busy = false;
    for (int* count : counts) *count = 0;
  }};
  work();
}

int main() {
  void (*volatile work)() = [] { throw 1; };
  Room room;
  int one = 1;
  int* count = &one;
  try {
    run(room, {&count, 1}, work);
  } catch (int) {
  }
  std::printf("%d %d\n", room.busy, one);
}
