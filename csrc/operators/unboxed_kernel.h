// SPDX-License-Identifier: Apache-2.0
//
// unboxed_kernel.h: the kernel that every operator passes, for those that come unboxed.
//
// See Note [A reference to an argument is not free]. The operators are torch's own of the signatures
// listed in unboxed_kernel.cpp: those of most pointwise operators, of products, of reductions and of
// views. A library's operator may go and come back with another schema; torch's do not.

#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <optional>

namespace rematfn {

// The kernel for `op`, or none if it has to come boxed.
[[nodiscard]] std::optional<c10::KernelFunction> unboxed_kernel_for(const c10::OperatorHandle& op);

}  // namespace rematfn
