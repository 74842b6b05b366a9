// SPDX-License-Identifier: Apache-2.0
//
// unrecorded.h: bytes that a program allocates beside its operators.
//
// Note [Bytes beside operators]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
// For `h * 0.1` torch makes a tensor of the number before any operator runs, and autograd saves it. It
// is eight bytes, and nobody can make it anew for us; but a loop makes thousands, and a budget that
// knows only what operators return is exceeded by them. So what the CPU allocator hands out on a
// thread under a budgeted level, while none of our kernels runs there, counts in that level and in
// those around it until it is freed or leaves as a result. It cannot go; others make room for it. It may be freed at any
// time and on any thread, after the level too. So the count is not the table's: the table takes
// notice of it when the next bytes are asked for, or the next operator comes. A shared budget's sum
// is told at once: others go by it, and no operator of the level may come any more.

#pragma once

#include <c10/util/intrusive_ptr.h>

#include <atomic>
#include <cstddef>
#include <memory>
#include <utility>

#include "engine/shared_budget.h"

namespace rematfn {

class UnrecordedBytes final : public c10::intrusive_ptr_target {
 public:
  // `shared`: the budget whose sum these bytes are part of, if they are and not by `enclosing`.
  UnrecordedBytes(c10::intrusive_ptr<UnrecordedBytes> enclosing,
                  std::shared_ptr<SharedBudget> shared)
      : enclosing_(std::move(enclosing)), shared_(std::move(shared)) {}

  void add(std::size_t nbytes) {
    for (UnrecordedBytes* u = this; u != nullptr; u = u->enclosing_.get()) {
      u->live_ += nbytes;
      if (u->shared_) u->shared_->add(nbytes);
    }
  }
  void subtract(std::size_t nbytes) {
    for (UnrecordedBytes* u = this; u != nullptr; u = u->enclosing_.get()) {
      u->live_ -= nbytes;
      if (u->shared_) u->shared_->subtract(nbytes);
    }
  }
  [[nodiscard]] std::size_t live() const { return live_.load(std::memory_order_relaxed); }

  // Whether any level of the process counts such bytes; to ask costs next to nothing.
  [[nodiscard]] static bool are_counted() { return counting.load(std::memory_order_relaxed) > 0; }
  static inline std::atomic<int> counting{0};  // such levels

 private:
  std::atomic<std::size_t> live_{0};
  const c10::intrusive_ptr<UnrecordedBytes> enclosing_;
  const std::shared_ptr<SharedBudget> shared_;
};

}  // namespace rematfn
