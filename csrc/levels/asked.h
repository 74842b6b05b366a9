// SPDX-License-Identifier: Apache-2.0
//
// asked.h: bytes that an allocator is asked for on this thread: whom they count for, and what goes if there
// are none.
//
// Note [The allocation is tried again, not the operator]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
// When a system or a device gives no more, what a level holds may go. By then the operator is under way
// and may have written its arguments; to run it once more would write twice. So it is the allocation
// that is tried again, within the operator, each time after something has been evicted, until nothing
// more can go. The candidates are those of domains whose lock this thread holds. What the running
// operator reads is pinned there; of another domain a kernel might be reading anything, on this thread
// or on another.
//
// On an accelerator what is freed is handed out again in the order of its stream, after what reads it. So
// there the values of idle domains may go as well: those that only wait for a backward. What an operator
// reads of another domain has been sealed, and is that domain's no more. That a domain's lock is free does not
// mean that it is idle: between two operators autograd's engine works on gradients without us. So no level
// of it may be active, and its last operator must have run outside of a backward.

#pragma once

#include <c10/util/intrusive_ptr.h>

#include <cstddef>

#include "engine/unrecorded.h"
#include "levels/meter.h"
#include "memory/pages.h"

namespace rematfn {

// A block that is asked for now, which counts as long as this lives. Room for it is made first; if that cannot
// be done, a BudgetError comes.
class Asked {
 public:
  explicit Asked(std::size_t nbytes);
  ~Asked();
  Asked(const Asked&) = delete;
  Asked& operator=(const Asked&) = delete;

  // For as long as the block lives; to be given to stop_counting().
  [[nodiscard]] Pages::Label label() const { return {nbytes_, beside_.get()}; }
  // From now on it counts until it is freed.
  void granted();

 private:
  void count_if_unrecorded();

  const std::size_t nbytes_;
  Meter* meter_ = nullptr;
  c10::intrusive_ptr<UnrecordedBytes> beside_;  // null if it counts elsewhere
};

void stop_counting(const Pages::Label& label);

// An allocation of about `nbytes` failed: evicts about twice as much. False if nothing could go.
bool evict_for_allocation(std::size_t nbytes, bool on_accelerator);

}  // namespace rematfn
