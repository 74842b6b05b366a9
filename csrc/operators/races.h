// SPDX-License-Identifier: Apache-2.0
//
// races.h: calls whose result depends on which of several threads comes first.
//
// Note [Writes that race]
// ~~~~~~~~~~~~~~~~~~~~~~~~
// A CPU's index_put_, put_ and index_copy_ are split over threads along their indices. Where two of
// these are alike, two threads may write one element. Which of them is the last one differs from run to
// run, and so does the order in which numbers are added with `accumulate`. So such a result is kept,
// and never replayed. Most calls cannot race, and are replayed like any other: with one thread, below
// the size from which on a loop is split, with a mask (it has no index twice), with deterministic
// algorithms. Sums are split in float32 alone.

#pragma once

#include <ATen/core/ivalue.h>

namespace rematfn {

// Of an operator that may race: whether this call does.
[[nodiscard]] bool races(c10::ArrayRef<c10::IValue> arguments);

}  // namespace rematfn
