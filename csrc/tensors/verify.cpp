// SPDX-License-Identifier: Apache-2.0
#include "tensors/verify.h"

#include <ATen/Context.h>
#include <ATen/ops/zero.h>

#include <algorithm>
#include <sstream>

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

Fingerprint::Fingerprint(const at::Tensor& tensor) {
  const at::Tensor here = on_cpu(tensor);
  elements_.resize(static_cast<std::size_t>(here.numel()));
  std::uint64_t whole = 0;
  std::uint16_t* place = elements_.data();
  const auto add = [&](std::uint64_t bits) {
    const std::uint64_t mixed = bits * kGoldenRatio;
    whole = (whole ^ mixed ^ (mixed >> 29U)) * kGoldenRatio + 1;
    *place++ = static_cast<std::uint16_t>(mixed >> 48U);
  };
  Dimensions dimensions = dimensions_of(here.sizes(), here.strides());
  for_each_element(here.itemsize(), static_cast<const char*>(here.const_data_ptr()), dimensions,
                   here.numel(), 1, add);
  whole_ = whole;
}

std::optional<std::size_t> Fingerprint::first_difference(const at::Tensor& now) const {
  if (elements_.empty()) return std::nullopt;
  const Fingerprint other(now);
  if (other.whole_ == whole_ && other.elements_.size() == elements_.size()) return std::nullopt;
  const std::size_t common = std::min(elements_.size(), other.elements_.size());
  const auto differs = std::mismatch(elements_.begin(), elements_.begin() + common,
                                     other.elements_.begin());
  return static_cast<std::size_t>(differs.first - elements_.begin());
}

std::string describe_element(const at::Tensor& tensor, std::size_t position) {
  std::ostringstream text;
  std::vector<std::int64_t> index(tensor.dim());
  auto left = static_cast<std::int64_t>(position);
  for (std::int64_t d = tensor.dim(); d-- > 0;) {
    const std::int64_t size = std::max<std::int64_t>(tensor.size(d), 1);
    index[d] = left % size;
    left /= size;
  }
  text << "element " << c10::IntArrayRef(index) << " of " << c10::toString(tensor.scalar_type()) << tensor.sizes();
  return text.str();
}

}  // namespace rematfn
