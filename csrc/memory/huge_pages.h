// SPDX-License-Identifier: Apache-2.0
//
// huge_pages.h: which pages are made huge, and when to make them anew.
//
// Note [Huge pages, where all of one is wanted]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
// A huge page (2 MiB on most machines) is cleared in a quarter of the time that its small ones take,
// and is one piece for a disk that is written past the page cache: of small pages each is one. A
// request holds some 250 pieces, so bytes in huge pages took a tenth of the processor time, and half
// of the time. But what is resident must be what is counted. So pages are made huge only where a block
// will use all of one, and only while they are made: otherwise a fault beside it, or the system's
// thread that joins pages, would make more resident than anybody asked for. Larger blocks begin where
// a huge page does, if addresses cost nothing and nothing resident lies there to be used again.
// A part of a huge page may move, and still lies in one piece with the rest. A part may go back: it is
// not resident any more, but until the rest has gone as well, the system has it for others only when
// memory is short. So what goes back in parts is counted. Where that comes to a sixteenth of what is
// resident, and to more than two huge pages, no more are made until all that waits has gone back, and
// with it what is worn, but for pages that a result lies in. That is done while no tenant lives, and
// costs the next one what it takes to clear its pages: so not before so many bytes have been handed out
// that it does not matter.

#pragma once

#include <algorithm>
#include <cstddef>

#include "memory/system_pages.h"

namespace rematfn {

class HugePages {
 public:
  // Pages are made so; less than all of these may have been given.
  void note_made(std::size_t nbytes) { made_ += nbytes; }
  // Pages have gone back. Of what has no pages there, so many bytes are less than all of a huge page;
  // `before`, so many were.
  void note_given_back(std::size_t before, std::size_t now) {
    if (now > before) parts_ += now - before;
  }
  // In a block.
  void note_handed_out(std::size_t nbytes) { handed_out_ += nbytes; }

  // Whether as much as that is worn, if so many bytes are resident.
  [[nodiscard]] bool are_worn(std::size_t resident) const {
    return std::min(made_, parts_) > std::max(resident / kWorn, 2 * huge_page());
  }
  // Whether it is time to give back what waits, if so many bytes are resident.
  [[nodiscard]] bool are_due(std::size_t resident) const {
    return handed_out_ / kOften > resident && are_worn(resident);
  }
  // All that waited has gone back.
  void begin_anew() { *this = HugePages(); }

 private:
  static constexpr std::size_t kWorn = 16;
  static constexpr std::size_t kOften = 256;

  std::size_t made_ = 0;   // bytes
  std::size_t parts_ = 0;  // bytes that went back, and were not all of a huge page then
  std::size_t handed_out_ = 0;
};

}  // namespace rematfn
