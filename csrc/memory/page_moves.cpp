// SPDX-License-Identifier: Apache-2.0
#include "memory/page_moves.h"

#include <algorithm>
#include <exception>

#include "memory/system_pages.h"

namespace rematfn {
namespace {

bool system_moves_pages() {
  auto* pages = static_cast<char*>(map_pages(2 * kPage));
  if (pages == nullptr) return false;
  *pages = 1;
  const bool moves = move_pages(pages, pages + kPage, kPage) && pages[0] == 0 && pages[1 * kPage] == 1;
  munmap(pages, 2 * kPage);
  return moves;
}

std::size_t count_cuts(const std::ptrdiff_t* origin, std::size_t count) {
  std::size_t cuts = 0;
  for (std::size_t i = 0; i <= count; ++i) cuts += origin[i] != origin[i - 1];
  return cuts;
}

// The first so many bytes.
Stretch head(const Stretch& pages, std::size_t nbytes) {
  return {pages.begin, nbytes, pages.origins, pages.first};
}

void skip(Stretch& pages, std::size_t nbytes) {
  pages.begin += nbytes;
  pages.nbytes -= nbytes;
  pages.first += nbytes / kPage;
}

}  // namespace

bool PageMoves::may_move() {
  static const bool possible = system_moves_pages();
  pauses_ = cuts_ >= (pauses_ ? kMostCuts / 2 : kMostCuts);
  return possible && !pauses_;
}

template <class Origin>
void PageMoves::set_origins(Stretch pages, Origin origin) {
  std::ptrdiff_t* const first = pages.origins->by_page + pages.first;
  const std::size_t count = pages.nbytes / kPage;
  const std::size_t before = count_cuts(first, count);
  for (std::size_t i = 0; i < count; ++i) {
    if (first[i] != origin(i)) first[i] = origin(i);  // what was never written is not resident
  }
  const std::size_t change = count_cuts(first, count) - before;  // modulo 2^64
  pages.origins->cuts += change;
  cuts_ += change;
}

bool PageMoves::move(Stretch from, Stretch to) {
  while (from.nbytes > 0) {
    // Pages that are one mapping; older kernels move no more at once.
    const std::ptrdiff_t* origin = from.origins->by_page + from.first;
    const std::ptrdiff_t* end = origin + from.nbytes / kPage;
    const std::ptrdiff_t* cut = std::find_if(origin, end, [&](auto o) { return o != *origin; });
    const auto nbytes = static_cast<std::size_t>(cut - origin) * kPage;
    const Stretch target = head(to, nbytes);
    if (!move_pages(from.begin, to.begin, nbytes)) {
      map_anew(target);
      give_back(from);
      return false;
    }
    const std::ptrdiff_t there = *origin + (from.begin - to.begin) / static_cast<std::ptrdiff_t>(kPage);
    set_origins(target, [&](std::size_t) { return there; });
    skip(from, nbytes);
    skip(to, nbytes);
  }
  return true;
}

void PageMoves::give_back(Stretch pages) {
  if (pages.origins->cuts > 0 && !pages.origins->inherited) {
    const std::ptrdiff_t* first = pages.origins->by_page + pages.first;
    const bool moved = std::any_of(first, first + pages.nbytes / kPage, [](auto o) { return o != 0; });
    if (moved) return map_anew(pages);
  }
  drop_pages(pages.begin, pages.nbytes);
}

void PageMoves::map_anew(Stretch pages) {
  if (map_pages(pages.nbytes, pages.begin) == nullptr) {
    // Too many mappings are one reason, and nothing else is wrong then. But where these were not mapped
    // any more, by a move that failed or by a system that unmaps before it looks, somebody else may get
    // them, and would be overwritten. That takes a system without memory for its own tables.
    if (!drop_pages(pages.begin, pages.nbytes)) std::terminate();
    return;
  }
  want_small_pages(pages.begin, pages.nbytes);
  set_origins(pages, [](std::size_t) { return 0; });
}

}  // namespace rematfn
