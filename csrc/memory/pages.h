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
// knows that it hands out as much. Where a block lies, spans.h says; if other pages have to go for it,
// they move to where it lacks some: Note [A page that moves need not be cleared].

#pragma once

#include <atomic>
#include <cstddef>
#include <mutex>
#include <optional>

#include "base/thread_local.h"
#include "memory/spans.h"

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
  using Label = Span::Label;
  using Usage = Spans::Usage;

  Pages() = default;
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
  [[nodiscard]] bool may_be_ours(const void* block) const { return spans_.may_be_ours(block); }
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
  // The lock is held.
  [[nodiscard]] bool any_lives() const;
  [[nodiscard]] std::size_t left_by_tenants() const;
  [[nodiscard]] std::size_t handed_out_by_tenants() const;
  // Bytes that wait although tenants leave no room for them.
  [[nodiscard]] std::size_t excess(std::size_t freed);
  void trim_to_tenants(std::size_t freed = 0);

  std::mutex mutex_;
  Tenant* tenants_ = nullptr;
  std::atomic<std::size_t> tenant_count_{0};
  Spans spans_;
  std::atomic<std::size_t> kept_{0};  // bytes that may wait while no tenant lives
};

// The pool of the process.
[[nodiscard]] Pages& pages();

}  // namespace rematfn
