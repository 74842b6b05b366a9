// SPDX-License-Identifier: Apache-2.0
//
// context_layout.h: what we rely on in at::Context, and in its guards, that no interface of theirs promises.

#pragma once

#include <ATen/Context.h>

#include <cstddef>
#include <span>
#include <vector>

namespace rematfn {

// Where at::Context keeps its settings, for which it has getters that may throw and setters that may refuse
// what is already set. Assumes that all but the precisions lie side by side, from enabled_cudnn on up to
// fp32_precision, as plain values, and that this is a map without entries to come. Another name or type
// does not compile; tests/tensors/test_settings.py reads torch's header for members elsewhere.
struct ContextParts {
  struct Precision {
    at::Float32Backend backend;
    at::Float32Op op;
    at::Float32Precision* value;
  };
  std::span<std::byte> settings;
  std::vector<Precision> precisions;
};
[[nodiscard]] const ContextParts& parts_of_context();

// This thread's marks, which torch has guards for that only set them, for a scope. Assumes that what a guard's
// destructor does, if the guard changed anything, is to take the mark away.
void set_without_tf32(bool on);
void set_in_backward(bool on);

}  // namespace rematfn
