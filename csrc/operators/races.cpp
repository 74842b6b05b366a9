// SPDX-License-Identifier: Apache-2.0
#include "operators/races.h"

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/TensorIterator.h>

#include <algorithm>
#include <cstdint>

#include "tensors/stack_utils.h"

namespace rematfn {
namespace {

bool is_mask(const at::Tensor& index) {
  return index.scalar_type() == at::kBool || index.scalar_type() == at::kByte;
}

// At most how many elements `index_put_(self, indices, ..)` writes, each counted as often as it is; none,
// if no index can be there twice.
std::int64_t written_by_indices(const at::Tensor& self, const c10::IValue& indices) {
  std::int64_t places = 1;
  std::int64_t rest = self.numel();
  std::size_t count = 0;
  bool masked = false;
  for_each_tensor(indices, [&](const at::Tensor& index, int dim) {
    ++count;
    places = std::max(places, index.numel());
    masked |= is_mask(index);  // which may stand for several dimensions
    if (!masked && dim < self.dim()) rest /= std::max<std::int64_t>(self.size(dim), 1);
  });
  return (masked && count == 1) || places == 1 ? 0 : places * rest;
}

}  // namespace

bool races(c10::ArrayRef<c10::IValue> arguments) {
  const at::Tensor& self = arguments[0].toTensor();
  if (!self.is_cpu()) return true;
  if (at::get_num_threads() == 1 || at::globalContext().deterministicAlgorithms()) return false;
  const auto reaches_grain = [](std::int64_t written) { return written >= at::internal::GRAIN_SIZE; };
  // index_copy(self, dim, index, source); the others are f(self, indices, values, accumulate).
  if (arguments[1].isInt()) return reaches_grain(arguments[3].toTensor().numel());
  if (arguments[3].toBool() && self.scalar_type() != at::kFloat) return false;
  return reaches_grain(arguments[1].isTensor() ? arguments[1].toTensor().numel()
                                               : written_by_indices(self, arguments[1]));
}

}  // namespace rematfn
