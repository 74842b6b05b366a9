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

std::optional<std::size_t> TierAccount::take(std::size_t nbytes) {
  const std::optional<std::size_t> offset = slab_.allocate(nbytes);
  peak_held_ = std::max(peak_held_, slab_.held());
  return offset;
}

void TierAccount::limit(std::size_t capacity, const std::string& why) {
  if (capacity >= slab_.capacity()) return;
  slab_.set_capacity(capacity);
  trouble_ = why;
  may_have_room_again_ = false;
}

void TierAccount::try_again() {
  if (!may_have_room_again_) return;
  slab_.set_capacity(budget_);
  trouble_.clear();
  may_have_room_again_ = false;
}

TierFigures TierAccount::figures() const {
  const auto read = [](const Traffic& of) { return TierFigures::Traffic{of.bytes, of.bandwidth, of.queued}; };
  return {.out = read(out),
          .in = read(in),
          .held = slab_.held(),
          .peak_held = peak_held_,
          .capacity = slab_.capacity(),
          .trouble = trouble_};
}

}  // namespace rematfn
