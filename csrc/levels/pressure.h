// SPDX-License-Identifier: Apache-2.0
//
// pressure.h: levels without a budget, and what they do when memory runs out.
//
// Note [Passive levels]
// ~~~~~~~~~~~~~~~~~~~~~
// A level without a budget holds what the device can hold, as in Capuchin's passive mode (Peng et
// al., ASPLOS 2020). An accelerator says when that is exceeded: its allocator fails, we evict, and the
// allocation is tried again. A CPU does not say; the kernel kills the process. So a level asks what
// memory is left (the system's or its control group's) each time it has made another 32 MiB, and
// evicts when little is. What it frees goes back to the system, for otherwise nothing would be left
// for others; the C library is told to. Where a CPU's allocation does fail, for a limit on addresses or
// on what the system promises: Note [The allocation is tried again, not the operator].
//
// Note [An operator that found no memory runs again]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
// Where an accelerator's allocator does not ask us for room, it is the operator that is tried again. It may have gone
// half of its way. If it drew random numbers, the generator is put back first. If it writes to its
// arguments, it may have done so, and a second run would write twice: then the error stands. Batch
// normalisation writes too, and allocates much: of an operator that does both, the bytes that are
// foreseen are asked for, and given back, before it runs. A replay writes to copies, which are made
// again, unless the only original has been handed to it.

#pragma once

#include <cstddef>
#include <optional>

#include "levels/level.h"

namespace rematfn {

// Bytes the operating system, or the process's control group, would still give; for tests, what
// pretend_memory_left() was last told.
[[nodiscard]] std::size_t memory_left();
void pretend_memory_left(std::optional<std::size_t> nbytes);

// `level` has made `nbytes` more: evicts if memory is short.
void relieve_pressure(Level& level, std::size_t nbytes);

}  // namespace rematfn
