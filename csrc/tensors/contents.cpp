// SPDX-License-Identifier: Apache-2.0
#include "tensors/contents.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "base/golden_ratio.h"
#include "tensors/level_tensor.h"
#include "tensors/thread_keys.h"

namespace rematfn {
namespace {

constexpr std::int64_t kElements = 32;  // of a sample
constexpr std::size_t kMostViews = 64;  // of one storage; those beyond go without
constexpr std::size_t kMostReadings = 4096;  // of one version; the oldest go without

std::uint64_t mix(std::uint64_t hash, std::uint64_t bits) {
  return std::rotl((hash ^ bits) * kGoldenRatio, 29);
}

struct Dimension {
  std::int64_t size;
  std::int64_t stride;
};

// The dimensions of a view that matter, the last one first; neighbours that are one run are one.
using Dimensions = c10::SmallVector<Dimension, 4>;
Dimensions dimensions_of(const View& view) {
  Dimensions dimensions;
  for (std::size_t d = view.sizes.size(); d-- > 0;) {
    const Dimension next{view.sizes[d], view.strides[d]};
    if (next.size == 1) continue;
    if (!dimensions.empty() && next.stride == dimensions.back().stride * dimensions.back().size) {
      dimensions.back().size *= next.size;
    } else {
      dimensions.push_back(next);
    }
  }
  return dimensions;
}

// Calls `visit` with the places of the first element, the last, and some between, in equal steps. A
// step is odd, lest it go down a column.
template <class Visit>
void for_each_sampled(const Dimensions& dimensions, std::int64_t last, const Visit& visit) {
  std::int64_t count = 1;
  for (const Dimension& d : dimensions) count *= d.size;
  const bool all = count <= 2 * kElements;
  std::int64_t step = all ? 1 : (count - 1) / (kElements - 1);
  if (step > 2) step = (step - 1) | 1;
  const std::int64_t steps = (all ? count : kElements) - 1;
  c10::SmallVector<std::int64_t, 4> index(dimensions.size(), 0);
  c10::SmallVector<std::int64_t, 4> increment;
  std::int64_t distance = 0;
  for (const Dimension& d : dimensions) {
    increment.push_back(step % d.size);
    distance += increment.back() * d.stride;
    step /= d.size;
  }
  std::int64_t place = 0;
  for (std::int64_t i = 0; i < steps; ++i) {
    visit(place);
    place += distance;
    for (std::size_t d = 0; d < dimensions.size(); ++d) {
      index[d] += increment[d];
      if (index[d] < dimensions[d].size) continue;
      index[d] -= dimensions[d].size;
      place -= dimensions[d].size * dimensions[d].stride;
      if (d + 1 == dimensions.size()) continue;
      ++index[d + 1];
      place += dimensions[d + 1].stride;
    }
  }
  visit(last);
}

template <class Element>
std::uint64_t hash_sampled(const Dimensions& dimensions, std::int64_t last, const char* first) {
  std::uint64_t hash = kGoldenRatio;
  for_each_sampled(dimensions, last, [&](std::int64_t place) {
    Element element;
    std::memcpy(&element, first + place * static_cast<std::int64_t>(sizeof(Element)),
                sizeof(Element));
    if constexpr (sizeof(Element) > sizeof(std::uint64_t)) {
      hash = mix(mix(hash, element.low), element.high);
    } else {
      hash = mix(hash, element);
    }
  });
  return hash;
}

struct Wide {
  std::uint64_t low;
  std::uint64_t high;
};

// Nothing, if there are no bytes where the view looks for them, or they are not a CPU's.
std::optional<std::uint64_t> sample(const c10::Storage& storage, const View& view) {
  if (storage.device_type() != c10::kCPU || storage.data() == nullptr) return {};
  const Dimensions dimensions = dimensions_of(view);
  std::int64_t last = 0;
  for (const Dimension& d : dimensions) {
    if (d.size == 0) return {};
    last += (d.size - 1) * d.stride;
  }
  const auto end = static_cast<std::size_t>(view.offset + last + 1) * view.itemsize;
  if (end > storage.nbytes()) return {};
  const char* first = static_cast<const char*>(storage.data()) +
                      view.offset * static_cast<std::int64_t>(view.itemsize);
  switch (view.itemsize) {
    case 1: return hash_sampled<std::uint8_t>(dimensions, last, first);
    case 2: return hash_sampled<std::uint16_t>(dimensions, last, first);
    case 4: return hash_sampled<std::uint32_t>(dimensions, last, first);
    case 8: return hash_sampled<std::uint64_t>(dimensions, last, first);
    case 16: return hash_sampled<Wide>(dimensions, last, first);
    default: return {};
  }
}

std::uint64_t hash_all(const c10::Storage& storage, std::size_t nbytes) {
  at::Tensor bytes = bytes_of(storage);
  if (!storage.device().is_cpu()) {
    const BackendScope scope;
    bytes = bytes.to(c10::kCPU);
  }
  const auto* at = static_cast<const char*>(bytes.const_data_ptr());
  constexpr std::size_t kWord = sizeof(std::uint64_t);
  constexpr std::size_t kLanes = 4;  // so that multiplications need not wait for one another
  std::uint64_t lanes[kLanes] = {1, 2, 3, 4};
  std::uint64_t word = 0;
  std::size_t i = 0;
  for (; i + kLanes * kWord <= nbytes; i += kLanes * kWord) {
    for (std::size_t lane = 0; lane < kLanes; ++lane) {
      std::memcpy(&word, at + i + lane * kWord, kWord);
      lanes[lane] = mix(lanes[lane], word);
    }
  }
  for (; i < nbytes; i += kWord) {
    word = 0;
    std::memcpy(&word, at + i, std::min(kWord, nbytes - i));
    lanes[0] = mix(lanes[0], word);
  }
  return mix(mix(lanes[0], lanes[1]), mix(lanes[2], lanes[3]));
}

}  // namespace

View View::of(const c10::TensorImpl& tensor) {
  return {tensor.storage_offset(), tensor.sizes(), tensor.strides(), tensor.itemsize()};
}

std::uint64_t View::key() const {
  std::uint64_t hash = mix(itemsize, static_cast<std::uint64_t>(offset));
  for (const std::int64_t size : sizes) hash = mix(hash, static_cast<std::uint64_t>(size));
  for (const std::int64_t stride : strides) hash = mix(hash, static_cast<std::uint64_t>(stride));
  return hash;
}

void Readings::note(std::uint64_t operation, std::size_t input, const c10::Storage& storage,
                    const View& view) {
  const auto bits = sample(storage, view);
  if (!bits) return;
  if (readings_.size() == kMostReadings) {
    readings_.erase(readings_.begin(), readings_.begin() + kMostReadings / 2);
  }
  readings_.push_back({operation, input, *bits});
}

void Readings::note_array(const c10::Storage& storage) {
  if (!whole_) whole_ = hash_all(storage, storage.nbytes());
}

bool Readings::array_wrote(const c10::Storage& storage) const {
  return whole_.has_value() && hash_all(storage, storage.nbytes()) != *whole_;
}

bool Readings::agrees(std::uint64_t operation, std::size_t input, const c10::Storage& storage,
                      const View& view) const {
  auto known = std::ranges::lower_bound(readings_, operation, {}, &Reading::operation);
  for (; known != readings_.end() && known->operation == operation; ++known) {
    if (known->input == input) return sample(storage, view) == known->bits;
  }
  return true;
}

Contents::Contents(const c10::Storage& storage) : address_(storage.data()) {}

void Contents::note_view(const c10::TensorImpl& tensor) {
  last_read_ = &tensor;
  last_offset_ = tensor.storage_offset();
  if (samples_.size() == kMostViews) return;
  const View view = View::of(tensor);
  const std::uint64_t key = view.key();
  if (sample_of(key) != nullptr) return;
  if (const auto bits = sample(tensor.unsafe_storage(), view)) samples_.push_back({key, *bits});
}

const Contents::Sample* Contents::sample_of(std::uint64_t view) const {
  const auto found = std::find_if(samples_.begin(), samples_.end(),
                                  [&](const Sample& s) { return s.view == view; });
  return found == samples_.end() ? nullptr : &*found;
}

void Contents::note_resize(const c10::Storage& storage, std::size_t nbytes) {
  if (!whole_) whole_ = hash_all(storage, nbytes);
}

bool Contents::is_back(const c10::Storage& storage, std::size_t nbytes) {
  if (!whole_ || storage.nbytes() < nbytes || (storage.data() == nullptr && nbytes > 0) ||
      hash_all(storage, nbytes) != *whole_) {
    return false;
  }
  whole_.reset();
  address_ = storage.data();
  return true;
}

bool Contents::agrees(const c10::Storage& storage, const View& view) const {
  const Sample* known = sample_of(view.key());
  if (known == nullptr) return true;
  const auto now = sample(storage, view);
  return now.has_value() && *now == known->bits;
}

}  // namespace rematfn
