// SPDX-License-Identifier: Apache-2.0
#include "thrash.h"

#include <algorithm>

namespace rematfn {
namespace {

constexpr double kWindow = 1.0 / 20;  // of the program so far

}  // namespace

// See Note [A backward reads in reverse]
bool Thrash::is_thrashing(double now) {
  const double window = kWindow * now;
  const double ran = now - clock_before_;
  const double replayed = replayed_ - replayed_before_;
  const bool costly = replayed > std::max(window, ran);
  if (costly || ran > window) {
    clock_before_ = now;
    replayed_before_ = replayed_;
  }
  if (costly && backward_) thrashing_ = true;
  return thrashing_;
}

}  // namespace rematfn
