// SPDX-License-Identifier: Apache-2.0
//
// page_moves.h: pages move to other addresses, instead of going back while others are cleared.
//
// Note [A page that moves need not be cleared]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
// A block may lie where pages are missing while others, elsewhere, have to go. To give those back and
// have as many cleared costs about two microseconds a page; to move a megabyte of them costs some ten,
// and a tenth of a microsecond a page for less. mremap() does so since Linux 5.7; where it cannot, pages
// go back. What is in them is what somebody has left there, as in any block that is handed out again.
//
// The price is mappings, of which a process may have 65,530. The system has one entry for neighbouring
// addresses whose pages lie in the same order as where they were first touched. So a cut, a place where
// two entries meet, is where the distances to those origins differ; we keep them by page, count the cuts,
// and stop at a quarter of the limit. Then what goes goes back as it did, and is mapped anew, which makes
// it one with its neighbours again; below half of that, pages move again. In a child of a fork mappings
// that it has inherited do not become one again, so nothing moves there but in ranges of its own.

#pragma once

#include <cstddef>

namespace rematfn {

// Where the pages of a range come from: how many pages further on they were first touched. The entries
// before the first and after the last exist, and are 0.
struct Origins {
  std::ptrdiff_t* by_page = nullptr;
  std::size_t cuts = 0;
  bool inherited = false;
};

// Neighbouring pages of one range.
struct Stretch {
  char* begin;
  std::size_t nbytes;
  Origins* origins;
  std::size_t first;  // of its pages, in the range
};

class PageMoves {
 public:
  static constexpr std::size_t kMostCuts = std::size_t{1} << 14;
  // Fewer pages are cleared for less.
  static constexpr std::size_t kLeastPages = 8;

  // Whether pages may move at all, and now.
  [[nodiscard]] bool may_move();
  // Moves all pages `from` to as many addresses that have none. If it returns false some may have moved;
  // the others have gone back.
  bool move(Stretch from, Stretch to);
  void give_back(Stretch pages);
  // Gives back what is there; the addresses are as they were at first, unless there are too many mappings.
  void map_anew(Stretch pages);
  // The range is unmapped.
  void forget(const Origins& range) { cuts_ -= range.cuts; }
  [[nodiscard]] std::size_t cuts() const { return cuts_; }

 private:
  template <class Origin>
  void set_origins(Stretch pages, Origin origin);

  std::size_t cuts_ = 0;
  bool pauses_ = false;
};

}  // namespace rematfn
