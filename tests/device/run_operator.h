// SPDX-License-Identifier: Apache-2.0
//
// run_operator.h: runs an operator on the device, by the kernel that the CPU has for it.
//
// Note [A kernel of the CPU, in the stream's thread]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
// The host must go on before the kernel has run, so it has to know the results' shapes: the operator is
// run on meta tensors, and memory is allocated for what comes out. The kernel is enqueued with CPU
// tensors that stand on the device's bytes. They own nothing, since nothing on a stream keeps memory
// alive. When the stream comes to it, the CPU's kernel runs, and its results are copied to
// where they belong. An operator that meta tensors cannot answer for, since its shapes or its results
// are numbers that depend on data, waits for the stream and runs at once.

#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

namespace fake {

// A boxed kernel, for whatever has none of its own.
void run_operator(const c10::OperatorHandle& op, torch::jit::Stack* stack);

}  // namespace fake
