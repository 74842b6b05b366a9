// SPDX-License-Identifier: Apache-2.0
#include "tensors/contents.h"

#include <algorithm>
#include <bit>

#include "base/golden_ratio.h"
#include "memory/checksum.h"
#include "tensors/elements.h"
#include "tensors/level_tensor.h"
#include "tensors/verify.h"

namespace rematfn {
namespace {

constexpr std::int64_t kElements = 32;  // of a sample
constexpr std::size_t kMostViews = 64;  // of one storage; those beyond go without
constexpr std::size_t kMostReadings = 4096;  // of one version; the oldest go without

std::uint64_t mix(std::uint64_t hash, std::uint64_t bits) {
  return std::rotl((hash ^ bits) * kGoldenRatio, 29);
}

// Nothing, if there are no bytes where the view looks for them, or they are not a CPU's.
std::optional<std::uint64_t> sample(const c10::Storage& storage, const View& view) {
  if (storage.device_type() != c10::kCPU || storage.data() == nullptr) return {};
  const Dimensions dimensions = dimensions_of(view.sizes, view.strides);
  std::int64_t last = 0;
  for (const Dimension& d : dimensions) {
    if (d.size == 0) return {};
    last += (d.size - 1) * d.stride;
  }
  const auto end = static_cast<std::size_t>(view.offset + last + 1) * view.itemsize;
  if (end > storage.nbytes()) return {};
  std::int64_t count = 1;
  for (const Dimension& d : dimensions) count *= d.size;
  const bool all = count <= 2 * kElements;
  // The first element, the last, and some between, in equal steps. A step is odd, lest it go down a column.
  std::int64_t step = all ? 1 : (count - 1) / (kElements - 1);
  if (step > 2) step = (step - 1) | 1;
  const auto itemsize = static_cast<std::int64_t>(view.itemsize);
  const char* first = static_cast<const char*>(storage.data()) + view.offset * itemsize;
  std::uint64_t hash = kGoldenRatio;
  const auto add = [&](std::uint64_t bits) { hash = mix(hash, bits); };
  for_each_element(view.itemsize, first, dimensions, (all ? count : kElements) - 1, step, add);
  for_each_element(view.itemsize, first + last * itemsize, dimensions, 1, 1, add);
  return hash;
}

std::uint64_t hash_all(const c10::Storage& storage, std::size_t nbytes) {
  const at::Tensor bytes = on_cpu(bytes_of(storage));
  return checksum(static_cast<const char*>(bytes.const_data_ptr()), nbytes);
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

void Contents::note_read(const c10::TensorImpl& tensor) {
  if (samples_.size() == kMostViews) [[unlikely]] return;
  const View view = View::of(tensor);
  const std::uint64_t key = view.key();
  if (sample_of(key) != nullptr) return;
  if (const auto bits = sample(tensor.unsafe_storage(), view)) [[likely]] samples_.push_back({key, *bits});
}

const Contents::Sample* Contents::sample_of(std::uint64_t view) const {
  const auto found = std::ranges::find(samples_, view, &Sample::view);
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
