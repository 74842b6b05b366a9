// SPDX-License-Identifier: Apache-2.0
#include "tensors/verify.h"

#include <ATen/Context.h>
#include <ATen/ops/zero.h>

#include "base/golden_ratio.h"
#include "tensors/elements.h"
#include "tensors/level_tensor.h"
#include "tensors/thread_keys.h"

namespace rematfn {

at::Tensor on_cpu(const at::Tensor& tensor) {
  if (tensor.is_cpu()) return tensor;
  const BackendScope scope;
  return tensor.to(c10::kCPU);
}

// See Note [Uninitialised memory is verified as zeros]
bool fills_uninitialised_memory() {
  return at::globalContext().deterministicAlgorithms() &&
         at::globalContext().deterministicFillUninitializedMemory();
}

void fill_with_zeros(const c10::Storage& storage) {
  const BackendScope scope;
  bytes_of(storage).zero_();
}

std::uint64_t fingerprint_of(const at::Tensor& tensor) {
  const at::Tensor here = on_cpu(tensor);
  auto whole = static_cast<std::uint64_t>(here.numel());
  const auto add = [&](std::uint64_t bits) {
    const std::uint64_t mixed = bits * kGoldenRatio;
    whole = (whole ^ mixed ^ (mixed >> 29U)) * kGoldenRatio + 1;
  };
  const Dimensions dimensions = dimensions_of(here.sizes(), here.strides());
  for_each_element(here.itemsize(), static_cast<const char*>(here.const_data_ptr()), dimensions,
                   here.numel(), 1, add);
  return whole;
}

}  // namespace rematfn
