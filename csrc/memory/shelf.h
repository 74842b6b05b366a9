// SPDX-License-Identifier: Apache-2.0
//
// shelf.h: things by size, in lists of those that are nearly as large.

#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>

#include "memory/system_pages.h"

namespace rematfn {

template <class Thing>
struct Links {
  Thing* previous = nullptr;
  Thing* next = nullptr;
};

// Linked by `links`; those of a list differ by less than a quarter in `size`, which is in whole pages.
template <class Thing, Links<Thing> Thing::*links, std::size_t Thing::*size>
class Shelf {
 public:
  void put(Thing& thing) {
    const std::size_t list = list_of(thing.*size);
    Thing* next = first_[list];
    thing.*links = {nullptr, next};
    if (next != nullptr) (next->*links).previous = &thing;
    first_[list] = &thing;
    filled_[list / 64] |= std::uint64_t{1} << list % 64;
  }

  void remove(Thing& thing) {
    const auto [previous, next] = thing.*links;
    if (next != nullptr) (next->*links).previous = previous;
    if (previous != nullptr) {
      (previous->*links).next = next;
      return;
    }
    const std::size_t list = list_of(thing.*size);
    first_[list] = next;
    if (next == nullptr) filled_[list / 64] &= ~(std::uint64_t{1} << list % 64);
  }

  // Calls `visit` for things from about `nbytes` upwards, until it says so.
  template <class Visit>
  void visit_from(std::size_t nbytes, Visit visit) const {
    std::size_t list = list_of(nbytes);
    for (; list < first_.size(); ++list) {
      const std::uint64_t rest = filled_[list / 64] >> list % 64;
      if (rest == 0) {
        list |= 63;  // the next word
        continue;
      }
      list += static_cast<std::size_t>(std::countr_zero(rest));
      for (Thing* thing = first_[list]; thing != nullptr; thing = (thing->*links).next) {
        if (visit(*thing, list)) return;
      }
    }
  }

 private:
  static constexpr std::size_t kWords = 3;

  [[nodiscard]] static std::size_t list_of(std::size_t nbytes) {
    const std::size_t pages = nbytes / kPage;
    const std::size_t log = std::bit_width(pages) - 1;
    const std::size_t quarter = log >= 2 ? (pages >> (log - 2)) & 3 : (pages << (2 - log)) & 3;
    return 4 * log + quarter;
  }

  std::array<Thing*, kWords * 64> first_{};
  std::array<std::uint64_t, kWords> filled_{};
};

}  // namespace rematfn
