// SPDX-License-Identifier: Apache-2.0
#include "tensors/verify.h"

#include <ATen/Context.h>
#include <ATen/ops/zero.h>

#include <algorithm>
#include <cstring>
#include <sstream>

#include "base/golden_ratio.h"
#include "tensors/level_tensor.h"
#include "tensors/thread_keys.h"

namespace rematfn {
namespace {

template <std::size_t kSize>
std::uint64_t bits_of(const char* element) {
  std::uint64_t bits = 0;
  std::memcpy(&bits, element, std::min(kSize, sizeof(bits)));
  if constexpr (kSize > sizeof(bits)) {
    std::uint64_t rest = 0;
    std::memcpy(&rest, element + sizeof(bits), kSize - sizeof(bits));
    bits ^= (rest ^ (rest >> 31U)) * kGoldenRatio;
  }
  return bits;
}

// Calls `visit` with the bits of each element in row-major order. Allocates nothing: it runs
// while a budget is being kept.
template <std::size_t kSize, class Visit>
void for_each_element(const at::Tensor& tensor, const Visit& visit) {
  constexpr auto kStep = static_cast<std::int64_t>(kSize);
  const auto sizes = tensor.sizes();
  const auto strides = tensor.strides();
  const auto* row = static_cast<const char*>(tensor.const_data_ptr());
  const std::size_t outer = sizes.empty() ? 0 : sizes.size() - 1;
  const std::int64_t length = sizes.empty() ? 1 : sizes[outer];
  const std::int64_t step = sizes.empty() ? 0 : strides[outer] * kStep;
  c10::SmallVector<std::int64_t, 8> index(outer, 0);
  for (std::int64_t left = tensor.numel(); left > 0; left -= length) {
    for (std::int64_t i = 0; i < length; ++i) visit(bits_of<kSize>(row + i * step));
    for (std::size_t d = outer; d-- > 0;) {
      row += strides[d] * kStep;
      if (++index[d] < sizes[d]) break;
      row -= strides[d] * kStep * sizes[d];
      index[d] = 0;
    }
  }
}

template <class Visit>
void for_each_element(const at::Tensor& tensor, const Visit& visit) {
  switch (tensor.itemsize()) {
    case 1: return for_each_element<1>(tensor, visit);
    case 2: return for_each_element<2>(tensor, visit);
    case 4: return for_each_element<4>(tensor, visit);
    case 8: return for_each_element<8>(tensor, visit);
    default: return for_each_element<16>(tensor, visit);
  }
}

at::Tensor readable(const at::Tensor& tensor) {
  if (tensor.is_cpu()) return tensor;
  const BackendScope scope;
  return tensor.to(c10::kCPU);
}

}  // namespace

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
  const at::Tensor here = readable(tensor);
  elements_.resize(static_cast<std::size_t>(here.numel()));
  std::uint64_t whole = 0;
  std::uint16_t* place = elements_.data();
  for_each_element(here, [&](std::uint64_t bits) {
    const std::uint64_t mixed = bits * kGoldenRatio;
    whole = (whole ^ mixed ^ (mixed >> 29U)) * kGoldenRatio + 1;
    *place++ = static_cast<std::uint16_t>(mixed >> 48U);
  });
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
