// SPDX-License-Identifier: Apache-2.0
//
// checksum.h: 64 bits of some bytes, to tell whether they are what they were.

#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "base/golden_ratio.h"

namespace rematfn {

// Against accidents, not against anybody. Each step is a bijection of what it has so far, and of the
// word that comes in, so no change of a single word goes unseen. Four words at once, for speed.
[[nodiscard]] inline std::uint64_t checksum(const char* bytes, std::size_t nbytes) {
  const auto step = [](std::uint64_t so_far, std::uint64_t word) {
    so_far = (so_far ^ word) * kGoldenRatio;
    return (so_far ^ so_far >> 32) * 0xD6E8FEB86659FD93ULL;  // else the highest bits stay alone
  };
  std::array<std::uint64_t, 4> lanes{1, 2, 3, 4};
  std::array<std::uint64_t, 4> words{};
  std::size_t done = 0;
  for (; nbytes - done >= sizeof(words); done += sizeof(words)) {
    std::memcpy(words.data(), bytes + done, sizeof(words));
    for (std::size_t i = 0; i < lanes.size(); ++i) lanes[i] = step(lanes[i], words[i]);
  }
  words = {};
  if (done < nbytes) std::memcpy(words.data(), bytes + done, nbytes - done);
  std::uint64_t sum = nbytes;
  for (std::size_t i = 0; i < lanes.size(); ++i) sum = step(sum, step(lanes[i], words[i]));
  return sum;
}

}  // namespace rematfn
