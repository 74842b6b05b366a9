// SPDX-License-Identifier: Apache-2.0
//
// device_memory.h: accelerators' allocators, which ask levels for room as the CPU's does.
//
// Note [An accelerator's allocator asks first]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
// Scratch of kernels, workspaces of libraries and what operators outside of levels hold are in nobody's
// schema: the allocator alone sees them. On a CPU we put an allocator of ours around torch's. CUDA's cannot
// be wrapped. It has some fifty virtual functions, which are not the same ones in two versions of torch, and
// most have a default that does nothing; and it knows its own blocks by their deleter: `record_stream` of any
// other does nothing, without an error.
//   1. So its object stays, and one entry of its class's table of virtual functions is replaced: that of
//      `allocate`, by a function of ours, which makes room, calls theirs, and where theirs finds no memory
//      evicts and calls it again. Whoever allocates by an interface comes by it: torch's operators, its
//      libraries' workspaces, extensions. `raw_alloc` is not replaced.
//   2. What is freed, the allocator tells of itself: `attachAllocatorTraceTracker`, once, after CUDA has been
//      initialised; a tracker is never taken off. It runs under the allocator's lock, so it takes no lock but
//      that of our small table of labels, and calls nothing of torch's.
//   3. Sizes are those that were asked for. The allocator rounds up, and leaves up to 1 MiB of a large block
//      unsplit: one or two hundredths of a step. After each large block it is asked by how much that has grown
//      since the level began, and room for that is made as long as something can go: no call is refused for
//      it, since it depends on what the process has freed before.
//   4. With another allocator (`cudaMallocAsync`, a pluggable one, or one that keeps no memory) nothing is
//      replaced: budgets hold by the sizes of tensors alone, and an operator that found no memory runs again,
//      as on any other device.
//
// Note [cuBLAS's workspace is nobody's]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
// The first matrix product of a thread on a stream makes a workspace for it, of 32 MiB on Hopper, which stays
// for the process. Counted as scratch of that product it would be foreseen for the next one too, and a first
// call in a fresh process would be refused where a second one fits. So a small product runs before the first
// operator of a level there: outside of every count.
//
// Note [What found no memory may have taken another way]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
// Where there is no memory for a convolution's workspace, torch takes the next of cuDNN's algorithms, and tells
// nobody. Run again with more memory, or with less, it would give other bits. So an operator that ended well
// though an allocation in it failed is not replayed, and a replay in which one fails is an error.

#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Device.h>

#include <cstddef>
#include <cstdint>

namespace rematfn {

// Whether the allocator of that device asks levels for room; from the first call on it does, if it can.
[[nodiscard]] bool asks_for_room(c10::DeviceType type);
// As count_no_more() of allocator.h.
void count_no_more_on_device(const c10::DataPtr& bytes);
// How many allocations on this thread have ended without memory, after all that could go had gone.
[[nodiscard]] std::uint64_t failed_allocations();
// Makes this thread's workspaces for the current stream of a device whose allocator asks, once.
void warm_libraries(c10::Device device);
// What they took, of all threads.
[[nodiscard]] std::size_t workspace_bytes();

// Bytes in use on devices whose allocator asks, beyond those that were asked for: now, and when the last large
// block was handed out.
std::int64_t count_rounded();
[[nodiscard]] std::int64_t last_rounded();

// For a device that is none of torch's: from now on its allocator asks. Returns what it is to call for each
// block that is given back.
using TellFreed = void (*)(const void* block, std::size_t nbytes);
TellFreed have_asked(c10::DeviceType type, c10::Allocator& its);

}  // namespace rematfn
