// SPDX-License-Identifier: Apache-2.0
//
// verify.h: fingerprints of operators' results, to tell whether a replay gave the same bits.

#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace rematfn {

// Note [What a fingerprint can tell]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
// To keep the first result for comparison would be to keep what was evicted. 64 bits of all elements
// say that something differs; 16 bits of each one say where (another element is named as the first
// if its 16 bits agree by chance). Only elements the tensor has are read: what lies between them in
// its storage, and what an operator like `empty` leaves, was never anybody's result.
class Fingerprint {
 public:
  Fingerprint() = default;  // of nothing: agrees with everything
  explicit Fingerprint(const at::Tensor& tensor);

  // The position, in row-major order, of the first element in which `now` is not what it was.
  [[nodiscard]] std::optional<std::size_t> first_difference(const at::Tensor& now) const;

 private:
  std::uint64_t whole_ = 0;
  std::vector<std::uint16_t> elements_;
};

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

// "element [1, 2] of float[3, 4]"
[[nodiscard]] std::string describe_element(const at::Tensor& tensor, std::size_t position);

}  // namespace rematfn
