// SPDX-License-Identifier: Apache-2.0
//
// floor.h: what is done differently near the floor, the least budget in which a program runs.
//
// Note [Near the floor]
// ~~~~~~~~~~~~~~~~~~~~~~
// Where little fits, replays evict what the next replay reads, and cost more than the program. Five
// rules change what is done then. docs/design/floor.md has a table of what each buys.
//   1. Mirrored: in a backward, once replays have cost more than the program over a window of a
//      twentieth of it, ON() replaces age. A backward reads what the forward made in reverse. The
//      program's latest miss tells where it is, its front; a value made before the front is read the
//      sooner the nearer it lies. So the distance from the front to the last access takes the place of
//      age (ScoreContext::front), to the end of the backward, or until replays have cost twice the
//      program since. Evictor::context_for.
//   2. Priced: what a queued replay will read is scored like all else, and the time to its next use
//      is one operator's. A gradient is spared by it: all of the backward would be replayed for the
//      gradient, and two operators for the activation that goes instead. Without it one operator of a
//      force field's step at half of its peak had 3,220 replays. Of the victims so found, those that
//      the costlier ones make unnecessary stay: else the few bytes of a weight's gradient go for
//      nothing, as the next victim frees a hundred times as much. Evictor::evict_by_price.
//   3. Pinned: an operation whose replay found an input missing pins the others until it has run.
//      Replayer::run_queue; this is Rule 4 of Note [Replay runs in program order].
//   4. Moved: past two replays for each recorded operation what can be moved is not dropped any more, to
//      the end of the call; nor where replays have cost twice what a plan predicted, as a plan that does
//      both may come to where copies take longer than predicted. Replayer::try_to_bring_back, Room::replay;
//      this is Rule 6 there.
//   5. Frugal: where two replays for each recorded operation are not enough, and nothing can be moved, versions
//      are made in the order that takes the least memory. Note [Frugal replays]; this is Rule 5 there.

#pragma once

#include <cstdint>

namespace rematfn {

// What replays have cost, and where a backward is.
class Thrash {
 public:
  // The program's next operator is, or is not, one of a backward.
  void enter(bool backward);
  // The program has asked for an evicted value that it last read at this program time.
  void note_miss(double last_access) {
    if (backward_) front_ = last_access;
  }
  void note_replay(double cost) { replayed_ += cost; }
  void note_operator(double cost) {
    if (!backward_) forward_ += cost;
  }
  // What the program's operators outside of backwards have cost.
  [[nodiscard]] double forward() const { return forward_; }
  [[nodiscard]] double replayed() const { return replayed_; }
  // Whether Rule 1 holds at program time `now`.
  bool is_thrashing(double now);
  [[nodiscard]] double front() const { return front_; }

  // Before all that the program has made.
  static constexpr double kNowhere = -1;

 private:
  enum class State : std::uint8_t { kWatching, kThrashing, kGivenUp };

  bool backward_ = false;
  State state_ = State::kWatching;
  double front_ = kNowhere;
  double forward_ = 0;   // seconds of the cost model
  double replayed_ = 0;
  double replayed_by_then_ = 0;  // when it was found to thrash
  // At the start of the window that is looked at.
  double replayed_before_ = 0;
  double clock_before_ = 0;
};

}  // namespace rematfn
