// SPDX-License-Identifier: Apache-2.0
//
// pages.h: larger blocks of memory, whose pages go back to the system as budgets demand.
//
// Nothing here knows a tensor, or a level: tenants say how much may stay.
//
// Note [Pages count, addresses do not]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
// What counts for the operating system is the pages that are resident. A C library gives them back
// late: what is freed stays for the next request, and where blocks of many sizes come and go, that is
// most of what there ever was. One that gives each block back at once (glibc with a low threshold for
// mmap) has the system clear every page of every block anew. So larger blocks come from addresses of
// ours, of which there are more than will be used; holes among them cost nothing. What is freed stays
// resident, for the next block to take, as long as tenants leave room for it; what has been unused for
// longest goes back first. Between two tenants as much stays as the last one would have left, and what
// its results took, once they are freed: a step in a loop finds its pages again, and those of its
// gradients, where to clear them anew took a tenth of its time. What is kept so goes back when nobody
// has come for a while (idle_pages.h), and at once what is of the results when one comes of which nobody
// knows that it hands out as much. A block is put
//   1. into the smallest resident span that holds it, else
//   2. where it covers most resident pages, in one of the smallest holes that hold it. If others have to
//      go for that, they move to where it lacks some: Note [A page that moves need not be cleared].
// Invariants, asserted by check():
//   P1  The spans of a range lie side by side; of two neighbours that are free, one is resident.
//   P2  A hole, a run of free spans, is filed by its first span, under the bytes of all.
//   P3  The bytes that wait are the sum over the spans that are free and resident.

#pragma once

#include <array>
#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>

#include "base/thread_local.h"
#include "memory/page_moves.h"

namespace rematfn {

// Whoever allocates on this thread fills all of the block.
class WillBeFilled {
 public:
  WillBeFilled() { ++depth_; }
  ~WillBeFilled() { --depth_; }
  WillBeFilled(const WillBeFilled&) = delete;
  WillBeFilled& operator=(const WillBeFilled&) = delete;
  [[nodiscard]] static bool holds() { return depth_ > 0; }

 private:
  REMATFN_THREAD_LOCAL static int depth_;
};

// On whose behalf pages stay resident. Asked on any thread, under the pool's lock.
class Tenant {
 public:
  [[nodiscard]] virtual bool lives() const = 0;
  // Bytes of its budget that nothing uses, and of results that it has yet to hand out.
  [[nodiscard]] virtual std::size_t unused() const = 0;
  // Of results that it has: the next one like it will want as many.
  [[nodiscard]] virtual std::size_t handed_out() const { return 0; }

 protected:
  ~Tenant() = default;

 private:
  friend class Pages;
  Tenant* previous_ = nullptr;
  Tenant* next_ = nullptr;
};

class Pages {
 public:
  // What somebody has to say of a block.
  struct Label {
    std::size_t nbytes = 0;
    void* owner = nullptr;
  };
  struct Usage {
    std::size_t live = 0;      // bytes handed out, in whole pages
    std::size_t waiting = 0;   // free and resident
    std::size_t reserved = 0;  // addresses
    std::size_t moved = 0;     // to another address, since the beginning
    std::size_t cuts = 0;      // between mappings
  };

  Pages() = default;
  ~Pages();  // no block is in use any more
  Pages(const Pages&) = delete;
  Pages& operator=(const Pages&) = delete;

  void enter(Tenant& tenant);
  void leave(Tenant& tenant);
  // Gives back what tenants leave no room for any more.
  void trim();
  // Whether anything is kept for the next tenant.
  [[nodiscard]] bool keeps() const { return kept_.load(std::memory_order_relaxed) > 0; }
  // Keeps nothing any more until a tenant lives, nor addresses that are dear and that no block is on.
  // Returns whether anything went back.
  bool give_back_kept();

  // A block of whole pages, which are `populated` if all of them will be used. Null if no tenant
  // lives, or the system gives no more.
  [[nodiscard]] void* allocate(const Label& label, bool populated = false);
  // Whether `block` may be of this pool; if not, it never was.
  [[nodiscard]] bool may_be_ours(const void* block) const {
    const auto address = reinterpret_cast<std::uintptr_t>(block);
    return address >= lowest_.load(std::memory_order_relaxed) &&
           address < highest_.load(std::memory_order_relaxed);
  }
  // Nothing if the block is not of this pool. For all that is known its tenant counts it still, so it
  // may wait beyond what is left, until the next request.
  std::optional<Label> free(void* block);
  // The block's label as it was; its owner has nothing to do with it any more. Nothing if the block is
  // not of this pool.
  std::optional<Label> disown(void* block);

  [[nodiscard]] Usage usage();
  void check();  // throws std::logic_error

  // Around a fork.
  void lock() { mutex_.lock(); }
  void unlock() { mutex_.unlock(); }
  void unlock_in_child();

 private:
  struct Span;
  struct Range;
  struct Links {
    Span* previous = nullptr;
    Span* next = nullptr;
  };
  // Spans that are linked by `links`, in lists of those whose `size` differs by less than a quarter.
  template <Links Span::*links, std::size_t Span::*size>
  class Shelf {
   public:
    void put(Span& span);
    void remove(Span& span);
    // Calls `visit` for spans from about `nbytes` upwards, until it says so.
    template <class Visit>
    void visit_from(std::size_t nbytes, Visit visit) const;

   private:
    static constexpr std::size_t kWords = 3;
    [[nodiscard]] static std::size_t list_of(std::size_t nbytes);
    std::array<Span*, kWords * 64> first_{};
    std::array<std::uint64_t, kWords> filled_{};
  };
  struct Span {
    enum State : std::uint8_t { kLive, kWaiting, kGone };  // waiting: free and resident

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
    Links by_size;         // of what waits
    Links by_use;          // of what waits
    Links by_hole;         // of the first of a hole
    std::size_t hole = 0;  // its bytes
  };
  struct Range {
    [[nodiscard]] Stretch stretch(char* from, std::size_t count);

    char* begin;
    std::size_t nbytes;
    Span** blocks;  // by page; a block's at its first
    Span* first;
    Range* next;
    Origins origins;
  };
  struct Place {
    Span* hole = nullptr;  // its first span
    char* begin = nullptr;
  };

  // Parts of a block that are not resident; not all, if there are many.
  struct Gone {
    struct Part {
      char* begin;
      std::size_t nbytes;
    };
    std::array<Part, 8> parts;
    std::size_t count = 0;
  };

  [[nodiscard]] char* allocate(const Label& label, bool populated, Gone& gone);
  // The lock is held.
  [[nodiscard]] bool any_lives() const;
  [[nodiscard]] std::size_t left_by_tenants() const;
  [[nodiscard]] std::size_t handed_out_by_tenants() const;
  // Bytes that wait although tenants leave no room for them.
  [[nodiscard]] std::size_t excess(std::size_t freed);
  void trim_to_tenants(std::size_t freed = 0);
  [[nodiscard]] Span& longest_unused(std::size_t nbytes);
  void give_back(Span& span);
  void is_gone(Span& span);
  void move_to(Gone& gone, Range& range);
  [[nodiscard]] bool reserve(std::size_t nbytes);
  [[nodiscard]] bool map(std::size_t nbytes);
  void unmap(Range& range);
  // Ranges that no block is in, and no resident page, unless these go too. Returns whether there were any.
  bool unmap_unused(bool waiting_too = false);
  [[nodiscard]] Range* range_of(const void* block) const;
  [[nodiscard]] Place find(std::size_t nbytes) const;
  [[nodiscard]] static std::size_t covered(const Span& hole, const char* begin, std::size_t nbytes);
  [[nodiscard]] static Place best_in(Span& hole, std::size_t nbytes, std::size_t& most);
  Span& take(const Place& place, std::size_t nbytes, Gone& gone);
  [[nodiscard]] bool have_spare(int count);
  Span& split(Span& span, std::size_t nbytes);
  void absorb_next(Span& span);
  Span& merged(Span& span);
  void let_wait(Span& span, Span* older);
  void end_wait(Span& span);
  [[nodiscard]] static Span& first_of_hole(Span& span);
  void file_hole(Span& span);
  void unfile_hole(Span& span);

  std::mutex mutex_;
  Tenant* tenants_ = nullptr;
  std::atomic<std::size_t> tenant_count_{0};
  // What lies outside of these has never been ours.
  std::atomic<std::uintptr_t> lowest_{UINTPTR_MAX};
  std::atomic<std::uintptr_t> highest_{0};
  Range* ranges_ = nullptr;
  Shelf<&Span::by_size, &Span::nbytes> waiting_;
  Shelf<&Span::by_hole, &Span::hole> holes_;
  Span* longest_unused_ = nullptr;
  Span* latest_used_ = nullptr;
  Span* spare_ = nullptr;  // linked by `after`
  Usage usage_;
  PageMoves moves_;
  bool may_keep_ = false;
  std::atomic<std::size_t> kept_{0};  // bytes that may wait while no tenant lives
};

// The pool of the process.
[[nodiscard]] Pages& pages();

}  // namespace rematfn
