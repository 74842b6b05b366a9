// SPDX-License-Identifier: Apache-2.0
//
// meter.h: what a kernel allocates while it runs, as the CPU allocator tells.
//
// Note [Scratch is made room for as it is asked for]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
// Shape inference knows an operator's outputs, not the buffers its kernel takes for the while: an
// im2col matrix, a row of partial sums for each thread. So our allocator, which the first
// level puts around torch's, tells the running operator's meter of each request. What goes beyond
// the room already made has to be made room for there and then: evicting only frees, so it may run
// inside `allocate`. If it cannot be done the operator fails, in its middle. What a call took is where
// room is made before the next one like it: see Note [What one call teaches decides no other].

#pragma once

#include <c10/util/FunctionRef.h>

#include "base/thread_local.h"
#include "levels/level.h"

namespace rematfn {

// For a scope: this thread's allocations are those of one operator of `level`, for which room for
// `granted` bytes has been made.
class Meter {
 public:
  // Raises an error: there is no room for `asked` bytes, which the operator would have had then.
  using Refuse = c10::function_ref<void(const NoRoom& why, std::size_t asked)>;

  Meter(Table& level, std::size_t granted, Refuse refuse);
  ~Meter();
  Meter(const Meter&) = delete;
  Meter& operator=(const Meter&) = delete;

  // The most bytes the operator had allocated at once.
  [[nodiscard]] std::size_t peak() const { return static_cast<std::size_t>(peak_); }

  void allocated(std::size_t nbytes);
  void freed(std::size_t nbytes) { add(-static_cast<std::int64_t>(nbytes)); }

 private:
  void add(std::int64_t nbytes);

  Table& level_;
  std::int64_t granted_;
  const Refuse refuse_;
  std::int64_t live_ = 0;
  std::int64_t peak_ = 0;
  Meter* outer_;
};

// The innermost meter of this thread, or null.
extern REMATFN_THREAD_LOCAL Meter* running_meter;

}  // namespace rematfn
