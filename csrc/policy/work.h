// SPDX-License-Identifier: Apache-2.0
//
// work.h: what kind of work an operator does, told by its name. Knows no tensor.

#pragma once

#include <cstdint>
#include <string_view>

namespace rematfn {

// Of all but the first, the time is in the FLOPs.
enum class Work : std::uint8_t { kBytes, kMatmul, kConvolution, kConvolutionBackward, kAttention };

// `name` is a schema's: "aten::mm".
[[nodiscard]] Work work_of(std::string_view name);

}  // namespace rematfn
