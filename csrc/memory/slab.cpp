// SPDX-License-Identifier: Apache-2.0
#include "memory/slab.h"

#include <algorithm>

namespace rematfn {

std::size_t Slab::rounded(std::size_t nbytes) {
  if (nbytes > SIZE_MAX - kAlignment) return SIZE_MAX / kAlignment * kAlignment;  // no room for it
  return (std::max<std::size_t>(nbytes, 1) + kAlignment - 1) / kAlignment * kAlignment;
}

std::optional<std::size_t> Slab::allocate(std::size_t nbytes) {
  nbytes = rounded(nbytes);
  if (held_ > capacity_ || nbytes > capacity_ - held_) return std::nullopt;
  std::optional<std::size_t> offset = holes_.take(nbytes);
  if (!offset) {
    const std::size_t there = hole_at_end();
    offset = extent_ - there;
    if (*offset > capacity_ || nbytes > capacity_ - *offset) return std::nullopt;
    if (there > 0) holes_.take_all(*offset);
    extent_ = *offset + nbytes;
  }
  held_ += nbytes;
  find_largest();
  return offset;
}

void Slab::free(std::size_t offset, std::size_t nbytes) {
  nbytes = rounded(nbytes);
  holes_.add(offset, nbytes);
  held_ -= nbytes;
  find_largest();
}

void Slab::set_capacity(std::size_t capacity) {
  capacity_ = capacity / kAlignment * kAlignment;
  const std::size_t there = hole_at_end();
  if (there > 0 && extent_ > capacity_) {
    const std::size_t begin = extent_ - there;
    holes_.take_all(begin);
    extent_ = std::max(begin, capacity_);
    if (extent_ > begin) holes_.add(begin, extent_ - begin);
  }
  find_largest();
}

void Slab::find_largest() {
  const std::size_t left = capacity_ - std::min(held_, capacity_);
  const std::size_t end = extent_ - hole_at_end();
  largest_ = std::min(std::max(holes_.largest(), capacity_ - std::min(end, capacity_)), left);
}

std::size_t Slab::hole_at_end() const {
  if (holes_.all().empty()) return 0;
  const auto& last = holes_.all().back();
  return last.begin + last.nbytes == extent_ ? last.nbytes : 0;
}

}  // namespace rematfn
