// SPDX-License-Identifier: Apache-2.0
#include "memory/tier_account.h"

#include <algorithm>

namespace rematfn {

void TierAccount::Traffic::note(std::size_t nbytes, double seconds) {
  constexpr double kRemembered = 256 << 20;  // bytes
  if (nbytes < kTelling) return;
  const auto more = static_cast<double>(nbytes);
  const double keep = 1 - std::min(more / kRemembered, 1.0);
  recent_bytes_ = recent_bytes_ * keep + more;
  recent_seconds_ = recent_seconds_ * keep + seconds;
  bandwidth = recent_bytes_ / std::max(recent_seconds_, 1e-9);
}

std::size_t TierAccount::rounded(std::size_t nbytes) {
  if (nbytes > SIZE_MAX - kUnit) return SIZE_MAX / kUnit * kUnit;  // no room for it
  return (std::max<std::size_t>(nbytes, 1) + kUnit - 1) / kUnit * kUnit;
}

std::optional<std::size_t> TierAccount::take(std::size_t nbytes) {
  const std::size_t all = rounded(nbytes);
  if (!has_room(all)) return std::nullopt;
  const std::optional<std::size_t> offset = free_.take(all);
  hold(all);
  return offset;
}

void TierAccount::give_back(std::size_t offset, std::size_t nbytes) {
  free_.add(offset, rounded(nbytes));
  release(rounded(nbytes));
}

void TierAccount::set_held(std::size_t nbytes) {
  held_ = nbytes;
  peak_held_ = std::max(peak_held_, held_);
  largest_ = std::min(free_.largest().second, capacity_ - std::min(held_, capacity_));
}

void TierAccount::set_capacity(std::size_t capacity) {
  capacity_ = capacity / kUnit * kUnit;
  if (capacity_ > end_) {
    free_.add(end_, capacity_ - end_);
    end_ = capacity_;
  } else {
    end_ = free_.cut_off(end_, capacity_);
  }
  set_held(held_);
}

void TierAccount::limit(std::size_t capacity, const std::string& why) {
  if (capacity >= capacity_) return;
  set_capacity(capacity);
  trouble_ = why;
  may_have_room_again_ = false;
}

void TierAccount::try_again() {
  if (!may_have_room_again_) return;
  set_capacity(budget_);
  trouble_.clear();
  may_have_room_again_ = false;
}

TierFigures TierAccount::figures() const {
  const auto read = [](const Traffic& of) { return TierFigures::Traffic{of.bytes, of.bandwidth, of.queued}; };
  return {.out = read(out),
          .in = read(in),
          .held = held_,
          .peak_held = peak_held_,
          .capacity = capacity_,
          .trouble = trouble_};
}

}  // namespace rematfn
