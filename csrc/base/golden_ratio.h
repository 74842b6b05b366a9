// SPDX-License-Identifier: Apache-2.0
//
// golden_ratio.h: an odd number whose products spread over all bits (Knuth, TAOCP 3, section 6.4).

#pragma once

#include <cstdint>

namespace rematfn {

constexpr std::uint64_t kGoldenRatio = 0x9E3779B97F4A7C15ULL;  // of 2^64

}  // namespace rematfn
