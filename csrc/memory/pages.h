// SPDX-License-Identifier: Apache-2.0
//
// pages.h: larger blocks of memory, whose pages go back to the system as budgets demand.
//
// Nothing here knows a tensor, or a level: tenants say how much may stay.
//
// Note [What is mapped is what is counted]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
// What counts for the operating system is the pages that are resident. A C library gives them back
// late: what is freed stays for the next request, and where blocks of many sizes come and go, that is
// most of what there ever was. One that gives each block back at once (glibc with a low threshold for
// mmap) has the system clear every page of every block anew. So larger blocks are mapped by us. What is
// freed stays mapped and waits for the next block, as long as tenants leave room for it: a block is put
// into the smallest stretch that holds it, from its front. If none does, the largest grows, by what it
// lacks, at either end; else the block is mapped elsewhere. Then what is too much is unmapped, what has
// been unused for longest first. Nothing else is mapped: neither a limit on addresses nor the system, if it
// makes huge pages unasked, finds more than we count.
//
// Between two tenants as much stays as the last one would have left, and what its results took, once
// they are freed: a step in a loop finds its pages again, and those of its gradients, where to clear
// them anew took a tenth of its time. What is kept goes back when nobody has come for ten seconds; the
// part for results at once when a tenant comes that is not known to hand out as much.

#pragma once

#include <unistd.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <vector>

#include "memory/stretches.h"

namespace rematfn {

// On whose behalf pages stay resident. Asked on any thread, under the lock of the pool.
class Tenant {
 public:
  [[nodiscard]] virtual bool lives() const = 0;
  // Bytes of its budget that nothing uses, and of results that it has yet to hand out.
  [[nodiscard]] virtual std::size_t unused() const = 0;
  // Of results that it has: the next one like it will want as many.
  [[nodiscard]] virtual std::size_t handed_out() const { return 0; }

 protected:
  ~Tenant() = default;
};

class Pages {
 public:
  // What somebody has to say of a block.
  struct Label {
    std::size_t nbytes = 0;
    void* owner = nullptr;
  };

  Pages() = default;
  ~Pages() { give_back(); }
  Pages(const Pages&) = delete;
  Pages& operator=(const Pages&) = delete;

  void enter(Tenant& tenant);
  void leave(Tenant& tenant);
  // Gives back what tenants leave no room for any more.
  void trim();
  // Whether anything is kept for the next tenant.
  [[nodiscard]] bool keeps() const { return kept_.load(std::memory_order_relaxed) > 0; }
  // Keeps nothing any more until a tenant lives.
  void give_back_kept();
  // Gives back all that waits. Returns whether there was any.
  bool give_back();

  // A block of whole pages. Null if no tenant lives, or the system gives no more.
  [[nodiscard]] void* allocate(const Label& label);
  // Nothing if the block is not of this pool. For all that is known its tenant counts it still, so it
  // may wait beyond what is left, until the next request.
  std::optional<Label> free(void* block);
  // The block's first `nbytes` stay, and the rest is free. Its label as it was; or nothing, likewise.
  std::optional<Label> shrink(void* block, std::size_t nbytes);
  // The block's label as it was; its owner has nothing to do with it any more. Nothing if the block is
  // not of this pool.
  std::optional<Label> disown(void* block);

  [[nodiscard]] std::size_t waiting();  // bytes that are free and mapped

  // Around a fork.
  void lock() { mutex_.lock(); }
  void unlock() { mutex_.unlock(); }

 private:
  inline static const auto kPage = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));

  using Blocks = std::unordered_map<std::size_t, Label>;  // by address

  [[nodiscard]] static std::size_t whole_pages(std::size_t nbytes) {
    return (nbytes + kPage - 1) & ~(kPage - 1);
  }

  // Calls `change` with the block's entry, and returns its label as it was; nothing, likewise.
  template <class Change>
  std::optional<Label> with_block(void* block, const Change& change);
  // The lock is held.
  [[nodiscard]] bool any_lives() const;
  // Bytes that may wait; the tenants may still count `freed` bytes as used.
  [[nodiscard]] std::size_t room(std::size_t freed);
  void trim_to(std::size_t nbytes);
  void let_wait(std::size_t begin, std::size_t nbytes);
  // An address for a block; 0: none is to be had.
  [[nodiscard]] std::size_t find_place(std::size_t nbytes);

  std::mutex mutex_;
  std::vector<const Tenant*> tenants_;
  std::atomic<std::size_t> tenant_count_{0};
  Blocks blocks_;
  Stretches waiting_;
  std::atomic<std::size_t> kept_{0};  // bytes that may wait while no tenant lives
};

// The pool of the process.
[[nodiscard]] Pages& pages();
// From now on it keeps pages between calls for ten seconds; if a level with a budget comes meanwhile, for as
// long as it lives, and then anew.
void keep_pages_for_a_while();

}  // namespace rematfn
