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
// notice of it when the next bytes are asked for, or the next operator comes.

#pragma once

#include <c10/util/intrusive_ptr.h>

#include <atomic>
#include <cstddef>
#include <utility>

namespace rematfn {

class UnrecordedBytes final : public c10::intrusive_ptr_target {
 public:
  explicit UnrecordedBytes(c10::intrusive_ptr<UnrecordedBytes> enclosing)
      : enclosing_(std::move(enclosing)) {}

  void add(std::size_t nbytes) {
    for (UnrecordedBytes* u = this; u != nullptr; u = u->enclosing_.get()) u->live_ += nbytes;
  }
  void subtract(std::size_t nbytes) {
    for (UnrecordedBytes* u = this; u != nullptr; u = u->enclosing_.get()) u->live_ -= nbytes;
  }
  [[nodiscard]] std::size_t live() const { return live_.load(std::memory_order_relaxed); }

 private:
  std::atomic<std::size_t> live_{0};
  const c10::intrusive_ptr<UnrecordedBytes> enclosing_;
};

}  // namespace rematfn
