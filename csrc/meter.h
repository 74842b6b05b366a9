// SPDX-License-Identifier: Apache-2.0
//
// meter.h: what a kernel allocates while it runs, seen by the CPU allocator.
//
// Note [Scratch is made room for as it is asked for]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
// Shape inference knows an operator's outputs, not the buffers its kernel takes for the while: an
// im2col matrix, a row of partial sums for each thread. The first budgeted level therefore puts an
// allocator around torch's that tells the running operator's meter of each request. What goes beyond
// the room already made has to be made room for there and then: evicting only frees, so it may run
// inside `allocate`. If it cannot be done the operator fails, in its middle this one time; what it
// needed is remembered, and from then on it is refused before it starts.

#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <optional>

#include "level.h"

namespace rematfn {

// For a scope: this thread's allocations are those of one operator of `level`, for which room for
// `granted` bytes has been made.
class Meter {
 public:
  Meter(Table& level, std::size_t granted, const c10::OperatorHandle& op);
  ~Meter();
  Meter(const Meter&) = delete;
  Meter& operator=(const Meter&) = delete;

  // The most bytes the operator had allocated at once.
  [[nodiscard]] std::size_t peak() const { return static_cast<std::size_t>(peak_); }
  // What it would have had, had the request that failed been granted; 0 if none failed.
  [[nodiscard]] std::size_t refused() const { return static_cast<std::size_t>(refused_); }

  void allocated(std::size_t nbytes);
  void freed(std::size_t nbytes) { live_ -= static_cast<std::int64_t>(nbytes); }

 private:
  Table& level_;
  std::int64_t granted_;
  const c10::OperatorHandle& op_;
  std::int64_t live_ = 0;
  std::int64_t peak_ = 0;
  std::int64_t refused_ = 0;
  Meter* outer_;
};

// Puts the counting allocator around torch's. Once per process; later calls do nothing.
void install_counting_allocator();

// For tests: the allocation after the next `count` on this thread fails, once. Returns how many were
// left of the last such wish: none, if it has been granted.
std::optional<std::size_t> fail_allocation(std::optional<std::size_t> count);

}  // namespace rematfn
