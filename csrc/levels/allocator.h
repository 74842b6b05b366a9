// SPDX-License-Identifier: Apache-2.0
//
// allocator.h: torch's CPU allocator, which counts what it hands out, and places it.
//
// Smaller blocks come from the C library. Larger ones come from the pool of pages while a level lives
// that has a budget, or is recorded to learn of one; each goes back to where it came from, whenever
// and on whichever thread that is. Levels without a budget leave all blocks to the C library: they
// hold what memory can hold, and what they free may stay for the next.

#pragma once

#include <c10/core/StorageImpl.h>

#include <cstddef>
#include <optional>

namespace rematfn {

// Puts our allocator around torch's. Once per process; later calls do nothing.
void install_allocator();
// Whether it is there: somebody else's stays.
[[nodiscard]] bool is_allocator_installed();

// For measurements: without, all blocks come from the C library.
void use_pages(bool on);

// The block behind `storage`, if it counts beside operators, is the caller's from now on.
void count_no_more(c10::StorageImpl& storage);

// For tests: the allocation after the next `count` on this thread fails, once. Returns how many were
// left of the last such wish: none, if it has been granted.
std::optional<std::size_t> fail_allocation(std::optional<std::size_t> count);

}  // namespace rematfn
