// SPDX-License-Identifier: Apache-2.0
//
// small_results.h: operators on a few numbers, of which a level without a budget keeps no record.
//
// Note [Smaller than its record]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
// To write down how four numbers can be made again takes more memory than the numbers, and more time
// than to make them. Where a level has nothing else to gain, what an operator makes of a few numbers
// from outside is left a tensor from outside. Lineage that reads it holds it, as it holds an argument
// of `f`. A level has more to gain
//   - under a budget, which counts the numbers and not the records;
//   - if records are asked for: to be guided by, to keep what has a name, to evict everything;
//   - where a graph leads to the numbers, for that will ask for what the level has evicted. A tensor
//     that leaves `f` by a side effect brings its graph along and is known by its record only: see
//     Note [Why the backward finds its level again]. Under a gradient of torch.func's we see tensors
//     that require none, whatever leads to them.
// How large results are is known once they are there. So the operator runs first; what is recorded
// after all is the same then, since it overwrites nothing and draws no random numbers.

#pragma once

#include <cstddef>
#include <optional>

#include "operators/find_level.h"
#include "operators/invocation.h"

namespace rematfn {

// Whether an operator is to run first under this thread's level, as far as its arguments tell.
[[nodiscard]] bool reads_little(const Invocation& invocation, const FoundTensors& found,
                                Arguments kind);
// It has run. Whether its results are left alone.
[[nodiscard]] bool makes_little(c10::ArrayRef<c10::IValue> results);
// They are.
void pass_over();
// For tests: what is larger is recorded; the default again, without a value.
void pretend_record_bytes(std::optional<std::size_t> nbytes);

}  // namespace rematfn
