// SPDX-License-Identifier: Apache-2.0
//
// elements.h: the elements that a tensor has in its storage, as bits.

#pragma once

#include <c10/util/ArrayRef.h>
#include <c10/util/SmallVector.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "base/golden_ratio.h"

namespace rematfn {

struct Dimension {
  std::int64_t size;
  std::int64_t stride;
};
// Sizes and strides, innermost first, without dimensions of one element; contiguous neighbours are merged.
using Dimensions = c10::SmallVector<Dimension, 4>;
[[nodiscard]] inline Dimensions dimensions_of(c10::IntArrayRef sizes, c10::IntArrayRef strides) {
  Dimensions dimensions;
  for (std::size_t d = sizes.size(); d-- > 0;) {
    const Dimension next{sizes[d], strides[d]};
    if (next.size == 1) continue;
    if (!dimensions.empty() && next.stride == dimensions.back().stride * dimensions.back().size) {
      dimensions.back().size *= next.size;
    } else {
      dimensions.push_back(next);
    }
  }
  return dimensions;
}

template <std::size_t kSize>
std::uint64_t bits_at(const char* element) {
  std::uint64_t bits = 0;
  std::memcpy(&bits, element, std::min(kSize, sizeof(bits)));
  if constexpr (kSize > sizeof(bits)) {
    std::uint64_t rest = 0;
    std::memcpy(&rest, element + sizeof(bits), kSize - sizeof(bits));
    bits ^= (rest ^ (rest >> 31U)) * kGoldenRatio;
  }
  return bits;
}

// Calls `visit` with the bits of so many elements in row-major order: that at `first`, and every `step`-th
// after it. Allocates nothing: it runs while a budget is being kept.
template <std::size_t kSize, class Visit>
void for_each_element(const char* first, const Dimensions& dimensions, std::int64_t count,
                      std::int64_t step, const Visit& visit) {
  const std::int64_t distance = dimensions.empty() ? 0 : step * dimensions.front().stride;
  for (std::int64_t done = 0; done < count;) {
    std::int64_t rest = done * step;
    std::int64_t place = 0;
    std::int64_t run = count - done;  // in one row
    for (const Dimension& d : dimensions) {
      const std::int64_t index = rest % d.size;
      if (&d == dimensions.begin()) run = std::min(run, (d.size - index + step - 1) / step);
      place += index * d.stride;
      rest /= d.size;
    }
    for (done += run; run > 0; --run, place += distance) {
      visit(bits_at<kSize>(first + place * static_cast<std::int64_t>(kSize)));
    }
  }
}

template <class Visit>
void for_each_element(std::size_t itemsize, const char* first, const Dimensions& dimensions,
                      std::int64_t count, std::int64_t step, const Visit& visit) {
  switch (itemsize) {
    case 1: return for_each_element<1>(first, dimensions, count, step, visit);
    case 2: return for_each_element<2>(first, dimensions, count, step, visit);
    case 4: return for_each_element<4>(first, dimensions, count, step, visit);
    case 8: return for_each_element<8>(first, dimensions, count, step, visit);
    default: return for_each_element<16>(first, dimensions, count, step, visit);
  }
}

}  // namespace rematfn
