// SPDX-License-Identifier: Apache-2.0
//
// thrash.h: notices that replays cost more than the program does, and what to do about it.
//
// Note [A backward reads in reverse]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
// A score that only looks back takes age for the time to the next use. In a forward that is as good a
// guess as any. In a backward it is a poor one: what will be read next is hardly younger than what will
// be read last, and has been as long unread as the whole pass took so far. Close to the least budget
// such a score evicts what the next operators read, and replays beget replays. But a backward reads
// what the forward made in reverse. What was asked for last shows where it is, its front; a value made
// before that is read the sooner the nearer it lies. So where replays cost more than the program
// itself, in a backward, that distance takes the place of age (ScoreContext::front). Elsewhere age does
// as well or better. And where this does not help either, at the floor of some programs, it can make
// things far worse; so once replays have cost twice the program since, age is what counts again.

#pragma once

#include <cstdint>

namespace rematfn {

class Thrash {
 public:
  // The program's next operator is, or is not, one of a backward.
  void enter(bool backward);
  // The program has asked for an evicted value that it last read at this program time.
  void note_miss(double last_access) {
    if (backward_) front_ = last_access;
  }
  void note_replay(double cost) { replayed_ += cost; }
  // Is it thrashing, at program time `now`, and is there hope? Once it is, it is so to the end of the
  // backward, or of hope.
  bool is_thrashing(double now);
  [[nodiscard]] double front() const { return front_; }
  // Have replays cost so many times the program, by program time `now`?
  [[nodiscard]] bool has_cost(double programs, double now) const {
    return replayed_ > programs * now;
  }

  // Before all that the program has made.
  static constexpr double kNowhere = -1;

 private:
  enum class State : std::uint8_t { kWatching, kThrashing, kGivenUp };

  bool backward_ = false;
  State state_ = State::kWatching;
  double front_ = kNowhere;
  double replayed_ = 0;  // seconds of the cost model
  double replayed_by_then_ = 0;  // when it was found to thrash
  // At the start of the window that is looked at.
  double replayed_before_ = 0;
  double clock_before_ = 0;
};

}  // namespace rematfn
