// SPDX-License-Identifier: Apache-2.0
//
// footprint.h: what a call will allocate, as far as it is known; and what it costs.

#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <limits>
#include <optional>

#include "operators/operator_facts.h"

namespace rematfn {

// A call's operator, the geometry, dtypes and storages' sizes of its tensors and its plain arguments,
// as one number.
using FootprintKey = std::uint64_t;
[[nodiscard]] FootprintKey footprint_key_of(const c10::OperatorHandle& op,
                                     c10::ArrayRef<c10::IValue> arguments);

// Note [What one call teaches decides no other]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
// What a kernel allocates depends on more than can be written down: on the values that it reads
// (`matrix_exp` sorts matrices by their norms), on the number of threads, on the flags of its
// library, on what its library still has from the last call. So room is made in
// advance for what the last call that was alike took, and no more: what does not fit by that figure is not
// refused. A call is refused by its own requests, in the allocator; where that does not ask, in advance, by what
// shape inference says of its own arguments. So it does not matter what a process has run
// before: what fits in a fresh one fits, and what is refused is refused with the same figure.

// Note [Shapes are asked for where they decide]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
// torch has put shape functions in Python on top of most of those that it has in C++. The first one that runs
// imports the compiler, sympy and onnx, some 800 modules, which takes seconds. Where the allocator asks for room, it
// is made as kernels ask for it. Only a call that is refused is asked what all of its outputs take: the figure that
// its error names is theirs. Each call that is like none before is asked where the allocator does not ask, and where
// the operator writes an argument and makes a tensor as well: it may write first, and what is refused is to have
// changed nothing.

// Bytes of the outputs: 0 where shape inference fails; as a rule an upper bound where they depend on data.
[[nodiscard]] std::size_t infer_outputs(const c10::OperatorHandle& op, const OperatorFacts& facts,
                                        c10::ArrayRef<c10::IValue> arguments);
// What this thread knows of calls that are alike.
struct Footprint {
  std::optional<std::size_t> nbytes;  // that the last of them had allocated at once
  // See Note [An accelerator is timed once]
  int times_timed = 0;
  double seconds = std::numeric_limits<double>::infinity();  // the least
};
// It stays where it is until another one is asked for.
[[nodiscard]] Footprint& footprint_of(FootprintKey key);

// Note [Cost is a model]
// ~~~~~~~~~~~~~~~~~~~~~~
// Timers would make a program's evictions differ from run to run, and an accelerator's from the
// moment its queue fills. The default cost of a call is a roofline: the greater of its FLOPs (for
// matrix products, convolutions and attention) and the bytes it moves, each at a fixed rate, plus a
// launch. A CPU draws its random numbers one after the other, at about a fortieth of the rate that
// it moves bytes at: a dropout's mask is costly, though it looks like a copy. An accelerator draws them at
// the speed of its memory, and does some hundred FLOPs in the time of a byte where a CPU does five. Only
// ratios matter, and not precisely: costs wrong by 30 % at random change what is recomputed by a percent
// or two. So one row stands for all accelerators. `cost="time"` measures instead.
//
// Nor are a CPU's rates measured, so that plans are the same on every machine. As shares of a step on two
// cores, what the model gives is 0.9 to 1.2 of what is measured for products and convolutions, which take
// three quarters of a GPT's step and four fifths of a ResNet's; 0.3 and 2.2 for attention's backward and
// forward; 0.2 to 2.4 for most of the rest. Plans searched by the model's costs replay, in measured time,
// 0.124 and 0.222 of a GPT's step at 0.5 and 0.3 of its peak, those searched by measured costs 0.120 and
// 0.222; for a ResNet 0.171 and 0.625 against 0.144 and 0.622. With a factor for each operator, fitted to
// what was measured: 0.122, 0.223, 0.157 and 0.684.
//
// Of a call whose largest result has so many elements.
[[nodiscard]] double flops_of(const OperatorFacts& facts, c10::ArrayRef<c10::IValue> arguments, std::int64_t elements);
// In seconds. `itemsize`: of an element. `draws`: random numbers, on a CPU.
[[nodiscard]] double modelled_cost(double flops, std::size_t bytes_moved, c10::DeviceType device, std::size_t itemsize,
                                   bool draws);

// A tensor argument's bytes as the kernel reads them: the view's, not the storage's.
[[nodiscard]] inline std::size_t view_bytes(const c10::TensorImpl& tensor) {
  return static_cast<std::size_t>(tensor.numel()) * tensor.itemsize();
}

}  // namespace rematfn
