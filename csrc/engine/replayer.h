// SPDX-License-Identifier: Apache-2.0
//
// replayer.h: has evicted versions made again.
//
// Note [Replay runs in program order]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
// The textbook way is recursion: to make a version, first make its producer's inputs, each locked
// until the producer has run. On a chain of 10^5 operators that overflows the stack, and on a U-Net
// the locks of all unfinished recursions together exceed a small budget. Instead:
//   1. Collect the closure of missing producers and run it from a heap, by place in the program.
//   2. Each version counts its pending readers; when the last has run and the program does not hold
//      the version, it goes at once, unless a reader that is still evicted will want it again.
//   3. Pending readers protect softly: such a version is evicted when nothing else is left, and
//      found missing when its reader's turn comes. The closure is then planned again.
//   4. Whoever had to plan again pins the inputs it still has until it has run. Each plan for an
//      operation thus pins one more input than the last, so the loop ends.
//   5. Just above the least budget, replays can be exponentially many. Past two for each recorded
//      operation, or where there is no room, they are given up, and what is still missing is made by
//      Note [Frugal replays]. If that does not find room, the above is tried once more, with twenty
//      for each operation. Then NoRoom says what the least was that would have done, or that replays
//      thrash.
//   6. Where versions may be moved as well, all this is not needed. What was made again and has to make
//      room is moved from then on, and never made twice; so replays cannot evict each other.

#pragma once

#include <span>
#include <utility>
#include <vector>

#include "engine/room.h"

namespace rematfn {

class Replayer {
 public:
  explicit Replayer(Room& room) : room_(room) {}

  // Makes all of `wanted` resident at once, by replays in program order; `before_call` of the program, also what a
  // schedule replays before it. Throws NoRoom.
  void materialize(std::span<Version* const> wanted, bool before_call);

 private:
  struct Later {
    bool operator()(const Ref<Operation>& a, const Ref<Operation>& b) const {
      return a->order > b->order;
    }
  };
  void follow_schedule(std::span<Version* const> wanted, bool before_call);
  void bring_back(std::span<Version* const> wanted);
  [[nodiscard]] NoRoom try_to_bring_back(std::span<Version* const> wanted);
  void run_replays(std::span<Version* const> wanted, std::size_t per_operation);
  void enqueue(Version& missing);
  void run_queue();
  void abandon_queue();
  void hold(Version& version, const Operation* reader);
  void unpin_inputs(const Operation* reader);
  void unpin_inputs_of_all();

  Room& room_;
  std::vector<Ref<Operation>> heap_;
  // Pins of Rule 4, innermost plan last: whose they are, and on what.
  std::vector<std::pair<const Operation*, Ref<Version>>> held_;
};

}  // namespace rematfn
