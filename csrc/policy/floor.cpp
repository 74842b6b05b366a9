// SPDX-License-Identifier: Apache-2.0
#include "policy/floor.h"

#include <algorithm>

namespace rematfn {

void Thrash::enter(bool backward) {
  if (!backward) {
    state_ = State::kWatching;
    front_ = kNowhere;
  }
  backward_ = backward;
}

// See Note [Near the floor], Rule 1
bool Thrash::is_thrashing(double now) {
  constexpr double kWindow = 1.0 / 20;  // of the program so far
  constexpr double kTrust = 2;          // the same
  if (state_ == State::kThrashing && replayed_ - replayed_by_then_ > kTrust * now) {
    state_ = State::kGivenUp;
  }
  const double window = kWindow * now;
  const double ran = now - clock_before_;
  const double replayed = replayed_ - replayed_before_;
  const bool costly = replayed > std::max(window, ran);
  if (costly || ran > window) {
    clock_before_ = now;
    replayed_before_ = replayed_;
  }
  if (costly && backward_ && state_ == State::kWatching) {
    state_ = State::kThrashing;
    replayed_by_then_ = replayed_;
  }
  return state_ == State::kThrashing;
}

}  // namespace rematfn
