// SPDX-License-Identifier: Apache-2.0
#include "policy/work.h"

#include <algorithm>
#include <array>

namespace rematfn {

Work work_of(std::string_view name) {
  static constexpr std::array<std::string_view, 6> kMatmuls{
      "aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::_addmm_activation",
      "aten::mkldnn_linear"};
  static constexpr std::array<std::string_view, 5> kConvolutions{
      "aten::convolution", "aten::_convolution", "aten::mkldnn_convolution",
      "aten::convolution_overrideable", "aten::cudnn_convolution"};
  const auto is_among = [&](const auto& names) {
    return std::find(names.begin(), names.end(), name) != names.end();
  };
  if (is_among(kMatmuls)) return Work::kMatmul;
  if (is_among(kConvolutions)) return Work::kConvolution;
  if (name == "aten::convolution_backward") return Work::kConvolutionBackward;
  if (name.starts_with("aten::_scaled_dot_product")) return Work::kAttention;
  if (name == "rematfn::compiled" || name == "rematfn::compiled_") return Work::kStated;
  return Work::kBytes;
}

bool writes_statistics_aside(std::string_view name) {
  return name == "aten::native_batch_norm" || name == "aten::cudnn_batch_norm" ||
         name == "aten::miopen_batch_norm";
}

}  // namespace rematfn
