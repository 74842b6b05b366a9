// SPDX-License-Identifier: Apache-2.0
#include "operators/races.h"

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/TensorIterator.h>

#include <algorithm>
#include <array>
#include <cstdint>

#include "tensors/stack_utils.h"

namespace rematfn {
namespace {

// All without the `_` of those that write in place.
constexpr std::array<std::string_view, 5> kByIndex{"index_put", "_index_put_impl", "_unsafe_index_put", "put",
                                                   "index_copy"};
constexpr std::array<std::string_view, 11> kOnAccelerators{
    "bincount", "cumsum",    "histc",   "index_add",   "index_reduce",   "nll_loss2d_forward",
    "median",   "nanmedian", "scatter", "scatter_add", "scatter_reduce"};
constexpr std::array<std::string_view, 7> kBackwardsOf{
    "_pool", "_pad", "upsample_", "grid_sampler_", "attention_", "_embedding_bag_", "ctc_loss_"};
constexpr long kCudnnThatRepeats = 91800;

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

Races races_of(std::string_view name) {
  constexpr std::string_view kNamespace = "aten::";
  if (!name.starts_with(kNamespace)) return Races::kNever;
  name.remove_prefix(kNamespace.size());
  if (name.ends_with('_')) name.remove_suffix(1);
  const auto is_among = [&](const auto& names) {
    return std::find(names.begin(), names.end(), name) != names.end();
  };
  if (is_among(kByIndex)) return Races::kByIndex;
  if (name == "max_unpool2d" || name == "max_unpool3d") return Races::kOnThreads;
  if (name == "convolution" || name == "_convolution") return Races::kConvolution;
  if (name == "convolution_backward") return Races::kConvolutionBackward;
  if (name == "_scaled_dot_product_cudnn_attention" || name == "_cudnn_attention_forward") {
    return Races::kCudnnAttention;
  }
  const bool is_in_family =
      name.ends_with("_backward") &&
      std::any_of(kBackwardsOf.begin(), kBackwardsOf.end(),
                  [&](std::string_view family) { return name.find(family) != std::string_view::npos; });
  return is_in_family || is_among(kOnAccelerators) ? Races::kOnAccelerators : Races::kNever;
}

namespace {

bool races_on_cpu(Races how, const at::Tensor& self, c10::ArrayRef<c10::IValue> arguments) {
  if (at::get_num_threads() == 1) return false;
  if (how != Races::kByIndex) return how == Races::kOnThreads;
  const auto reaches_grain = [](std::int64_t written) { return written >= at::internal::GRAIN_SIZE; };
  // index_copy(self, dim, index, source); the others are f(self, indices, values, accumulate).
  if (arguments[1].isInt()) return reaches_grain(arguments[3].toTensor().numel());
  if (arguments[3].toBool() && self.scalar_type() != at::kFloat) return false;
  return reaches_grain(arguments[1].isTensor() ? arguments[1].toTensor().numel()
                                               : written_by_indices(self, arguments[1]));
}

bool races_on_accelerator(Races how, const at::Tensor& self, c10::ArrayRef<c10::IValue> arguments) {
  const at::Context& context = at::globalContext();
  switch (how) {
    case Races::kConvolution:  // (input, weight, bias, stride, padding, dilation, transposed, ..)
      return !context.deterministicCuDNN() && (context.benchmarkCuDNN() || arguments[6].toBool());
    case Races::kConvolutionBackward:
      return !context.deterministicCuDNN();
    case Races::kCudnnAttention:
      return self.is_cuda() && at::Context::versionCuDNN() < kCudnnThatRepeats;
    default:
      return true;
  }
}

}  // namespace

// See Note [Operators that race]
bool races(Races how, c10::ArrayRef<c10::IValue> arguments) {
  const at::Context& context = at::globalContext();
  if (context.deterministicAlgorithms() && !context.deterministicAlgorithmsWarnOnly()) return false;
  const at::Tensor& self = arguments[0].toTensor();
  return self.is_cpu() ? races_on_cpu(how, self, arguments) : races_on_accelerator(how, self, arguments);
}

}  // namespace rematfn
