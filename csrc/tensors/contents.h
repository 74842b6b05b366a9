// SPDX-License-Identifier: Apache-2.0
//
// contents.h: how to tell that a storage from outside still holds what operations have read there.
//
// Note [Evidence of contents]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~
// A replay reads arguments and parameters where they are, so they must not have been written since.
// No single sign tells that of every write; these are looked at, the cheapest first:
//   1. Where the bytes are and how many. A resize (`storage.resize_(0)`) takes them away.
//   2. A hash of all bytes, taken when a resize is about to happen; until then it would be too costly.
//      Memory that is given back and asked for again often lies where it did, so that 1 does not
//      tell. Whoever refills the storage with what was there (FSDP gathers a parameter again) has
//      changed nothing, though the counter may have moved.
//   3. The version counter that autograd has. Fused kernels, NumPy and `.data` pass it by.
//   4. A sample of each view that an operation has read: some elements, by their bits. It costs one
//      hash for each view, and tells of whatever is written as a whole; not of a few elements.
//   5. Of contents that a level made, nobody but operators writes, until somebody has asked for the
//      address. From then on each reader's view is sampled, as it finds it; those that have read before
//      are, at that moment. What one read and another wrote by address is told apart by the reader.
// The sample is of the view, not of the storage: another parameter may be written that lies in the
// same flat buffer. Only dense memory of a CPU is sampled.

#pragma once

#include <c10/core/Storage.h>
#include <c10/core/TensorImpl.h>
#include <c10/util/SmallVector.h>

#include <cstdint>
#include <optional>
#include <vector>

namespace rematfn {

// Where a tensor finds its elements in its storage; counted in elements.
struct View {
  std::int64_t offset;
  c10::IntArrayRef sizes;
  c10::IntArrayRef strides;
  std::size_t itemsize;

  static View of(const c10::TensorImpl& tensor);
  // The same for equal views.
  [[nodiscard]] std::uint64_t key() const;
};

// What operations have read of contents whose address somebody has.
class Readings {
 public:
  // Operations come in their order; `input` is one of `operation`'s.
  void note(std::uint64_t operation, std::size_t input, const c10::Storage& storage, const View& view);
  // All bytes, as they are: somebody has an array of them.
  void note_array(const c10::Storage& storage);
  [[nodiscard]] bool has_array() const { return whole_.has_value(); }
  // Whether they are others now.
  [[nodiscard]] bool array_wrote(const c10::Storage& storage) const;
  // Whether the sample that was taken then, if there is one, agrees with what is there.
  [[nodiscard]] bool agrees(std::uint64_t operation, std::size_t input, const c10::Storage& storage,
                            const View& view) const;

 private:
  struct Reading {
    std::uint64_t operation;
    std::size_t input;
    std::uint64_t bits;
  };

  std::vector<Reading> readings_;
  std::optional<std::uint64_t> whole_;
};

class Contents {
 public:
  Contents() = default;
  explicit Contents(const c10::Storage& storage);

  // An operation is about to read `tensor`, which stands on the storage.
  void note_read(const c10::TensorImpl& tensor);
  // The bytes are about to be taken away, and are what they were; at least for the moment.
  void note_resize(const c10::Storage& storage, std::size_t nbytes);
  // They may have been; is_back() must be asked before anything is read.
  [[nodiscard]] bool may_be_gone(const c10::Storage& storage) const {
    return address_ != storage.data() || whole_.has_value();
  }
  // Whether the first `nbytes` are there again. Forgets the resize if so.
  [[nodiscard]] bool is_back(const c10::Storage& storage, std::size_t nbytes);
  // Whether the sample of `view`, if there is one, agrees with what is there.
  [[nodiscard]] bool agrees(const c10::Storage& storage, const View& view) const;

 private:
  struct Sample {
    std::uint64_t view;
    std::uint64_t bits;
  };

  [[nodiscard]] const Sample* sample_of(std::uint64_t view) const;

  const void* address_ = nullptr;
  std::optional<std::uint64_t> whole_;  // until a resize has been checked
  c10::SmallVector<Sample, 2> samples_;
};

}  // namespace rematfn
