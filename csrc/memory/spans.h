// SPDX-License-Identifier: Apache-2.0
//
// spans.h: addresses of ours, the blocks on them, and what is resident between these.
//
// Nothing here is locked, or says how much may stay: Pages does. A block is put
//   1. into the smallest resident span that holds it, else
//   2. where it covers most resident pages, in one of the smallest holes that hold it.
// Invariants, asserted by check():
//   P1  The spans of a range lie side by side; of two neighbours that are free, one is resident.
//   P2  A hole, a run of free spans, is filed by its first span, under the bytes of all.
//   P3  The bytes that wait are the sum over the spans that are free and resident.

#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "memory/huge_pages.h"
#include "memory/page_moves.h"
#include "memory/shelf.h"
#include "memory/system_pages.h"

namespace rematfn {

struct Range;

// A block, or what lies between two: pages that are alike.
struct Span {
  enum State : std::uint8_t { kLive, kWaiting, kGone };  // waiting: free and resident
  // What somebody has to say of a block.
  struct Label {
    std::size_t nbytes = 0;
    void* owner = nullptr;
  };

  [[nodiscard]] bool is_free() const { return state != kLive; }
  [[nodiscard]] char* end() const { return begin + nbytes; }
  [[nodiscard]] Stretch stretch() const;

  char* begin = nullptr;
  std::size_t nbytes = 0;
  State state = kGone;
  Range* range = nullptr;
  Span* before = nullptr;  // by address
  Span* after = nullptr;
  Label label;           // of a block
  Links<Span> by_size;   // of what waits
  Links<Span> by_use;    // of what waits
  Links<Span> by_hole;   // of the first of a hole
  std::size_t hole = 0;  // its bytes
};

// Addresses that the system has given at once.
struct Range {
  [[nodiscard]] Stretch stretch(char* from, std::size_t count);

  char* begin;
  std::size_t nbytes;
  Span** blocks;  // by page; a block's at its first
  Span* first;
  Range* next;
  Origins origins;
  char* used;  // what lies beyond has never been in a block
};

class Spans {
 public:
  struct Usage {
    std::size_t live = 0;      // bytes handed out, in whole pages
    std::size_t waiting = 0;   // free and resident
    std::size_t reserved = 0;  // addresses
    std::size_t moved = 0;     // to another address, since the beginning
    std::size_t cuts = 0;      // between mappings
  };
  // Parts of a block that are not resident; not all, if there are many.
  struct Gone {
    // Now; with huge pages if `huge`.
    void populate(bool huge) const;

    struct Part {
      char* begin;
      std::size_t nbytes;
    };
    std::array<Part, 8> parts;
    std::size_t count = 0;
  };

  Spans() = default;
  ~Spans();  // no block is in use any more
  Spans(const Spans&) = delete;
  Spans& operator=(const Spans&) = delete;

  // A block of whole pages that holds so many bytes; null if the system gives no more.
  [[nodiscard]] Span* allocate(std::size_t nbytes, Gone& gone);
  // That begins at this address; null if none does.
  [[nodiscard]] Span* find_block(const void* address) const;
  // Whether `block` may be of these; if not, it never was. Any thread.
  [[nodiscard]] bool may_be_ours(const void* block) const {
    const auto address = reinterpret_cast<std::uintptr_t>(block);
    return address >= lowest_.load(std::memory_order_relaxed) &&
           address < highest_.load(std::memory_order_relaxed);
  }
  // Its pages wait.
  void free(Span& block);

  // Of what waits, that which has been unused for longest; no more than so many bytes if that can be.
  [[nodiscard]] Span& longest_unused(std::size_t nbytes);
  void give_back(Span& waiting);
  // Pages that have to go, of which no more than `excess` bytes, move to where the block lacks them.
  void move_to(const Span& block, Gone& gone, std::size_t excess);
  // Whether these are to be made huge where that can be: they will be made now.
  [[nodiscard]] bool makes_huge(const Gone& gone);
  // Whether they are to be made anew when nobody wants what waits; all of that goes back then.
  [[nodiscard]] bool huge_pages_are_due() const { return huge_.are_due(usage_.live + usage_.waiting); }
  void renew_huge_pages();
  // Ranges that no block is in, and no resident page, unless these go too. Returns whether there were any.
  bool unmap_unused(bool waiting_too = false);

  // As found when addresses were asked for last, or limits: those that nobody uses cost nothing.
  [[nodiscard]] bool has_cheap_addresses() const { return cheap_addresses_; }
  void notice_limits() { cheap_addresses_ = cheap_addresses_ && !addresses_are_limited(); }
  [[nodiscard]] bool is_empty() const { return ranges_ == nullptr; }
  [[nodiscard]] std::size_t live() const { return usage_.live; }
  [[nodiscard]] std::size_t waiting() const { return usage_.waiting; }
  [[nodiscard]] Usage usage() const;
  void inherit();  // in a child of a fork
  void check() const;  // throws std::logic_error

 private:
  struct Place {
    Span* hole = nullptr;  // its first span
    char* begin = nullptr;
  };

  [[nodiscard]] bool reserve(std::size_t nbytes);
  [[nodiscard]] bool map(std::size_t nbytes);
  void unmap(Range& range);
  [[nodiscard]] Range* range_of(const void* block) const;
  [[nodiscard]] Place find(std::size_t nbytes) const;
  [[nodiscard]] char* begin_in(const Span& hole, std::size_t nbytes) const;
  [[nodiscard]] static std::size_t covered(const Span& hole, const char* begin, std::size_t nbytes);
  [[nodiscard]] static Place best_in(Span& hole, std::size_t nbytes, std::size_t& most);
  Span& take(const Place& place, std::size_t nbytes, Gone& gone);
  [[nodiscard]] bool have_spare(int count);
  Span& split(Span& span, std::size_t nbytes);
  void absorb_next(Span& span);
  Span& merged(Span& span);
  Span& is_gone(Span& span);
  void renew(Range& range);
  void let_wait(Span& span, Span* older);
  void end_wait(Span& span);
  [[nodiscard]] static Span& first_of_hole(Span& span);
  void file_hole(Span& span);
  void unfile_hole(Span& span);

  // What lies outside of these has never been ours.
  std::atomic<std::uintptr_t> lowest_{UINTPTR_MAX};
  std::atomic<std::uintptr_t> highest_{0};
  Range* ranges_ = nullptr;
  Shelf<Span, &Span::by_size, &Span::nbytes> waiting_;
  Shelf<Span, &Span::by_hole, &Span::hole> holes_;
  Span* longest_unused_ = nullptr;
  Span* latest_used_ = nullptr;
  Span* spare_ = nullptr;  // linked by `after`
  Usage usage_;
  PageMoves moves_;
  HugePages huge_;
  bool cheap_addresses_ = false;
};

}  // namespace rematfn
