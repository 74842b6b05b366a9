// SPDX-License-Identifier: Apache-2.0
//
// verify.h: fingerprints of operators' results, to tell whether a replay gave the same bits.

#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>

#include <cstdint>

namespace rematfn {

// Note [What a fingerprint can tell]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
// To keep the first result for comparison would be to keep what was evicted. 64 bits of all elements
// say that something differs, and not where: that would take some bits of each element, beside every
// budget. Only elements the tensor has are read: what lies between them in its storage, and what an
// operator like `empty` leaves, was never anybody's result.
[[nodiscard]] std::uint64_t fingerprint_of(const at::Tensor& tensor);

// The same elements, where a CPU can read them.
[[nodiscard]] at::Tensor on_cpu(const at::Tensor& tensor);

// Note [Uninitialised memory is verified as zeros]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
// Programs may read memory that they have not written, and never use what they read. Circular padding
// copies the sides of an `empty` before its corners are filled:
//   out = x.new_empty(size); out[1:-1, 1:-1] = x; out[0] = out[-2]; out[:, 0] = out[:, -2]
// A replay of `empty` leaves other garbage than the first run, and so the copy would be found to
// differ. A level that verifies therefore has `empty` give zeros, each time; unless torch fills such
// memory itself, as it does with deterministic algorithms.
[[nodiscard]] bool fills_uninitialised_memory();
void fill_with_zeros(const c10::Storage& storage);

}  // namespace rematfn
