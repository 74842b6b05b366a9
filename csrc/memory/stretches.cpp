// SPDX-License-Identifier: Apache-2.0
#include "memory/stretches.h"

#include <algorithm>
#include <iterator>

namespace rematfn {

void Stretches::add(std::size_t begin, std::size_t nbytes) {
  const auto after = std::ranges::lower_bound(all_, begin, {}, &Stretch::begin);
  const auto before = after == all_.begin() ? all_.end() : std::prev(after);
  const bool touches_before = before != all_.end() && before->begin + before->nbytes == begin;
  const bool touches_after = after != all_.end() && begin + nbytes == after->begin;
  const std::uint64_t now = ++now_;
  if (touches_before) {
    before->nbytes += nbytes + (touches_after ? after->nbytes : 0);
    before->freed = now;
    if (touches_after) all_.erase(after);
  } else if (touches_after) {
    *after = {begin, nbytes + after->nbytes, now};
  } else {
    all_.insert(after, {begin, nbytes, now});
  }
  nbytes_ += nbytes;
}

std::optional<std::size_t> Stretches::take(std::size_t nbytes) {
  auto best = all_.end();
  for (auto s = all_.begin(); s != all_.end(); ++s) {
    if (s->nbytes >= nbytes && (best == all_.end() || s->nbytes < best->nbytes)) best = s;
  }
  if (best == all_.end()) return std::nullopt;
  return take_front(best, nbytes).begin;
}

Stretches::Stretch Stretches::take_oldest(std::size_t nbytes) {
  return take_front(std::ranges::min_element(all_, {}, &Stretch::freed), nbytes);
}

std::size_t Stretches::cut_off(std::size_t end, std::size_t from) {
  if (all_.empty() || all_.back().begin + all_.back().nbytes != end) return end;
  Stretch& last = all_.back();
  const std::size_t left = std::max(from, last.begin);
  if (left >= end) return end;
  nbytes_ -= end - left;
  last.nbytes = left - last.begin;
  if (last.nbytes == 0) all_.pop_back();
  return left;
}

// What is left of it is as old as it was.
Stretches::Stretch Stretches::take_front(At at, std::size_t nbytes) {
  const Stretch taken{at->begin, std::min(nbytes, at->nbytes), at->freed};
  nbytes_ -= taken.nbytes;
  at->begin += taken.nbytes;
  at->nbytes -= taken.nbytes;
  if (at->nbytes == 0) all_.erase(at);
  return taken;
}

std::pair<std::size_t, std::size_t> Stretches::largest() const {
  if (all_.empty()) return {0, 0};
  const Stretch& found = *std::ranges::max_element(all_, {}, &Stretch::nbytes);
  return {found.begin, found.nbytes};
}

}  // namespace rematfn
