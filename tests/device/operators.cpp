// SPDX-License-Identifier: Apache-2.0
//
// operators.cpp: operators that have gone half of their way when they ask for memory, ask for scratch, or do without.

#include <ATen/ops/empty.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/rand.h>
#include <torch/library.h>

namespace fake {
namespace {

at::Tensor count(at::Tensor& counter, const at::Tensor& x) {
  counter.add_(1);
  return x.mul(counter);
}

at::Tensor scale_at_random(const at::Tensor& x) { return x.mul(at::rand({1}, x.options())); }

// Takes another way where there is no memory for the first, as torch does with cuDNN's convolutions.
at::Tensor falls_back(const at::Tensor& x, std::int64_t scratch) {
  try {
    static_cast<void>(at::empty({scratch}, x.options().dtype(at::kByte)));
  } catch (const c10::OutOfMemoryError&) {
    return x.mul(3);
  }
  return x.mul(2);
}

// Takes so many bytes for the while.
at::Tensor doubled(const at::Tensor& x, std::int64_t scratch) {
  static_cast<void>(at::empty({scratch}, x.options().dtype(at::kByte)));
  return x.mul(2);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(fake_device, library) {
  library.def("count(Tensor(a!) counter, Tensor x) -> Tensor");
  library.def("falls_back(Tensor x, int scratch) -> Tensor");
  library.def("doubled(Tensor x, int scratch) -> Tensor");
  library.def("scale_at_random(Tensor x) -> Tensor", {at::Tag::nondeterministic_seeded});
}

TORCH_LIBRARY_IMPL(fake_device, CompositeExplicitAutograd, library) {
  library.impl("count", &count);
  library.impl("scale_at_random", &scale_at_random);
  library.impl("doubled", &doubled);
  library.impl("falls_back", &falls_back);
}

}  // namespace fake
