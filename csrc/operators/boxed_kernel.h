// SPDX-License-Identifier: Apache-2.0
//
// boxed_kernel.h: the one kernel that every operator passes while a level is active.

#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/util/FunctionRef.h>

#include <optional>

#include "operators/invocation.h"

namespace rematfn {

// Registers the kernel with the dispatcher; inert until a level is pushed. Once per process.
void register_kernels();
// unboxed_kernel.cpp. The same kernel for `op`, or none if it has to come boxed. Those of torch's own operators
// come unboxed that have one of some signatures: a library's operator may go and come back with another schema,
// torch's do not. See Note [A reference to an argument is not free]
[[nodiscard]] std::optional<c10::KernelFunction> unboxed_kernel_for(const c10::OperatorHandle& op);
// What the kernel does.
void govern(Invocation& invocation);
// The same for a view of a plain tensor, of which nothing is to be found out and nothing written down.
[[nodiscard]] at::Tensor govern_view(const at::Tensor& base, c10::function_ref<at::Tensor()> run_below);
// `govern` of a boxed call; `instead` runs in the place of the kernel below.
void govern(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack,
            const c10::SafeKernelFunction* instead = nullptr);
// Registers it for operators defined since.
void register_new_operators();
// Registers any kernel, for good.
void register_kernel(const c10::OperatorName& name, c10::DispatchKey key,
                     c10::KernelFunction kernel);

}  // namespace rematfn
