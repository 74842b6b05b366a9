// SPDX-License-Identifier: Apache-2.0
//
// shapes.h: what torch's commonest operators allocate, without asking Python.
//
// Note [Shapes without Python]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
// torch has put shape functions in Python on top of most of those that it has in C++. The first one
// that runs imports the compiler, sympy and onnx, some 800 modules, which takes seconds. For the
// operators that most programs are made of, C++ knows as well: `at::meta` still holds the functions
// beneath, and where there is none the result's size follows from the arguments' in a line. What is
// neither here goes through Python. All three give the same bytes; only how long it takes differs. Where an
// accelerator asks its library how much it keeps (cuDNN for a recurrent network's or a norm's backward), all
// three leave that out, and the first run tells.

#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <optional>

namespace rematfn {

// The shape function in C++, to be called with meta tensors; null if there is none.
[[nodiscard]] const c10::KernelFunction* shape_function_of(const c10::OperatorHandle& op);
// The bytes that the call adds, where they follow from its arguments in a line.
[[nodiscard]] std::optional<std::size_t> bytes_added_by(const c10::OperatorHandle& op,
                                                        c10::ArrayRef<c10::IValue> arguments);

}  // namespace rematfn
