// SPDX-License-Identifier: Apache-2.0
//
// races.h: calls whose bits depend on which of several threads comes first.
//
// Note [Operators that race]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~
// Where two threads write one element, or add to it, who comes last differs from run to run. Such a result
// is kept, and never replayed.
//   1. A CPU's index_put_, put_ and index_copy_ are split along their indices, two of which may be alike.
//      Most calls cannot race: with one thread, below the size from which on a loop is split, with a mask
//      (it has no index twice). Sums are split in float32 alone. max_unpool is split whatever its size.
//   2. On an accelerator these are the operators that torch's deterministic mode refuses, or replaces by
//      others: the list is that of torch.use_deterministic_algorithms. Of pools, pads, interpolations and
//      attention it is the backward; we take all backwards of such a family.
//   3. A convolution's backward, and a transposed one, which is the backward of another, may add by atomics.
//      When cuDNN finds the fastest kernel by timing (`torch.backends.cudnn.benchmark`), it does so on each
//      thread, and a replay on autograd's thread may find another one.
//   4. cuDNN's attention gives other bits when it runs again, before its version 9.18.
// In the deterministic mode, unless it only warns, nothing races.

#pragma once

#include <ATen/core/ivalue.h>

#include <cstdint>
#include <string_view>

namespace rematfn {

enum class Races : std::uint8_t {
  kNever,
  kByIndex,
  kOnThreads,
  kOnAccelerators,
  kConvolution,
  kConvolutionBackward,
  kCudnnAttention,
};

// `name` is a schema's: "aten::put_".
[[nodiscard]] Races races_of(std::string_view name);
// Of an operator that may race: whether this call does.
[[nodiscard]] bool races(Races how, c10::ArrayRef<c10::IValue> arguments);

}  // namespace rematfn
