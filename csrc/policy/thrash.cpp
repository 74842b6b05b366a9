// SPDX-License-Identifier: Apache-2.0
#include "policy/thrash.h"

#include <algorithm>

namespace rematfn {
namespace {

constexpr double kWindow = 1.0 / 20;  // of the program so far
constexpr double kTrust = 2;          // the same

}  // namespace

void Thrash::enter(bool backward) {
  if (!backward) {
    state_ = State::kWatching;
    front_ = kNowhere;
  }
  backward_ = backward;
}

// See Note [A backward reads in reverse]
bool Thrash::is_thrashing(double now) {
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
