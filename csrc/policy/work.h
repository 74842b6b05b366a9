// SPDX-License-Identifier: Apache-2.0
//
// work.h: what kind of work an operator does, told by its name. Knows no tensor.

#pragma once

#include <cstdint>
#include <string_view>

namespace rematfn {

// Of all but the first, the time is in the FLOPs; of the last, whoever calls it says how many.
enum class Work : std::uint8_t { kBytes, kMatmul, kConvolution, kConvolutionBackward, kAttention, kStated };
[[nodiscard]] constexpr bool is_product(Work work) { return work != Work::kBytes && work != Work::kStated; }

// `name` is a schema's: "aten::mm".
[[nodiscard]] Work work_of(std::string_view name);

// Note [Statistics are written aside]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
// A batch norm that trains moves the running statistics, and its results do not depend on them. So they
// are no inputs of the recorded call: the old ones are not copied for it, and a replay is given zeros in
// their place, which it moves. They are the last tensors among its arguments. This holds for the caller's
// statistics; those that a level has made are inputs, since the new ones are replayed from the old.
[[nodiscard]] bool writes_statistics_aside(std::string_view name);

}  // namespace rematfn
