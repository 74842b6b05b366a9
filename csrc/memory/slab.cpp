// SPDX-License-Identifier: Apache-2.0
#include "memory/slab.h"

#include <algorithm>
#include <iterator>

#include "base/invariant.h"

namespace rematfn {

std::size_t Slab::rounded(std::size_t nbytes) {
  if (nbytes > SIZE_MAX - kAlignment) return SIZE_MAX / kAlignment * kAlignment;  // no room for it
  return (std::max<std::size_t>(nbytes, 1) + kAlignment - 1) / kAlignment * kAlignment;
}

std::optional<std::size_t> Slab::allocate(std::size_t nbytes) {
  nbytes = rounded(nbytes);
  if (held_ > capacity_ || nbytes > capacity_ - held_) return std::nullopt;
  std::size_t offset = 0;
  if (const auto best = by_size_.lower_bound({nbytes, 0}); best != by_size_.end()) {
    offset = best->second;
    const std::size_t left = best->first - nbytes;
    remove_hole(holes_.find(offset));
    if (left > 0) add_hole(offset + nbytes, left);
  } else {
    const std::size_t there = hole_at_end();
    offset = extent_ - there;
    if (offset > capacity_ || nbytes > capacity_ - offset) return std::nullopt;
    if (there > 0) remove_hole(std::prev(holes_.end()));
    extent_ = offset + nbytes;
  }
  held_ += nbytes;
  return offset;
}

void Slab::free(std::size_t offset, std::size_t nbytes) {
  nbytes = rounded(nbytes);
  held_ -= nbytes;
  const auto after = holes_.lower_bound(offset);
  if (after != holes_.end() && after->first == offset + nbytes) {
    nbytes += after->second;
    remove_hole(after);
  }
  if (const auto next = holes_.lower_bound(offset); next != holes_.begin()) {
    const auto before = std::prev(next);
    if (before->first + before->second == offset) {
      offset = before->first;
      nbytes += before->second;
      remove_hole(before);
    }
  }
  add_hole(offset, nbytes);
}

void Slab::set_capacity(std::size_t capacity) {
  capacity_ = capacity / kAlignment * kAlignment;
  const std::size_t there = hole_at_end();
  if (there == 0 || extent_ <= capacity_) return;
  const std::size_t begin = extent_ - there;
  remove_hole(std::prev(holes_.end()));
  extent_ = std::max(begin, capacity_);
  if (extent_ > begin) add_hole(begin, extent_ - begin);
}

std::size_t Slab::largest() const {
  if (held_ >= capacity_) return 0;
  const std::size_t hole = by_size_.empty() ? 0 : by_size_.rbegin()->first;
  const std::size_t end = extent_ - hole_at_end();
  return std::min(std::max(hole, end < capacity_ ? capacity_ - end : 0), capacity_ - held_);
}

void Slab::add_hole(std::size_t offset, std::size_t nbytes) {
  holes_.emplace(offset, nbytes);
  by_size_.emplace(nbytes, offset);
}

void Slab::remove_hole(Holes::iterator hole) {
  by_size_.erase({hole->second, hole->first});
  holes_.erase(hole);
}

std::size_t Slab::hole_at_end() const {
  if (holes_.empty()) return 0;
  const auto& [offset, nbytes] = *holes_.rbegin();
  return offset + nbytes == extent_ ? nbytes : 0;
}

void Slab::check() const {
  require_invariant(holes_.size() == by_size_.size(), "each hole is filed by its size");
  std::size_t free = 0;
  std::size_t end = 0;
  bool first = true;
  for (const auto& [offset, nbytes] : holes_) {
    require_invariant(nbytes > 0 && offset % kAlignment == 0 && nbytes % kAlignment == 0, "holes are whole");
    require_invariant(first || offset > end, "no two holes touch");
    require_invariant(by_size_.contains({nbytes, offset}), "each hole is filed by its size");
    end = offset + nbytes;
    free += nbytes;
    first = false;
  }
  require_invariant(end <= extent_, "holes lie where something has been");
  require_invariant(held_ + free == extent_, "what is no hole is held");
}

}  // namespace rematfn
