// SPDX-License-Identifier: Apache-2.0
#include "operators/races.h"

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/TensorIterator.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <string_view>

#include "tensors/stack_utils.h"

namespace rematfn {
namespace {

constexpr std::array<std::string_view, 7> kPuts{
    "aten::index_put",        "aten::index_put_",        "aten::_index_put_impl",
    "aten::_index_put_impl_", "aten::_unsafe_index_put", "aten::put",
    "aten::put_"};

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

// See Note [Writes that race]
bool may_differ(const Invocation& invocation) {
  const std::string_view name = invocation.op.schema().name();
  const bool puts = std::find(kPuts.begin(), kPuts.end(), name) != kPuts.end();
  if (!puts && name != "aten::index_copy" && name != "aten::index_copy_") return true;
  const c10::ArrayRef<c10::IValue> arguments = invocation.arguments();
  const at::Tensor& self = arguments[0].toTensor();
  if (!self.is_cpu()) return true;
  if (at::get_num_threads() == 1 || at::globalContext().deterministicAlgorithms()) return false;
  if (puts && arguments[3].toBool() && self.scalar_type() != at::kFloat) return false;
  const std::int64_t written =
      arguments[1].isTensor() ? arguments[1].toTensor().numel()
      : puts                  ? written_by_indices(self, arguments[1])
                              : arguments[3].toTensor().numel();
  return written >= at::internal::GRAIN_SIZE;
}

}  // namespace rematfn
