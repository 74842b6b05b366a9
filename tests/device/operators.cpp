// SPDX-License-Identifier: Apache-2.0
//
// operators.cpp: operators that have gone half of their way when they ask for memory.

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

}  // namespace

TORCH_LIBRARY_FRAGMENT(fake_device, library) {
  library.def("count(Tensor(a!) counter, Tensor x) -> Tensor");
  library.def("scale_at_random(Tensor x) -> Tensor", {at::Tag::nondeterministic_seeded});
}

TORCH_LIBRARY_IMPL(fake_device, CompositeExplicitAutograd, library) {
  library.impl("count", &count);
  library.impl("scale_at_random", &scale_at_random);
}

}  // namespace fake
