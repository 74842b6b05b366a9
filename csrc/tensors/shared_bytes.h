// SPDX-License-Identifier: Apache-2.0
//
// shared_bytes.h: the bytes of a storage of the program's, which outlive it as long as somebody needs.
//
// Note [A storage has the holders that it has in eager]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
// Where gradients meet, autograd's engine adds in place if nobody else holds the storage of the first,
// and out of place otherwise. The sum is the same; but it takes one gradient more, and where a dimension
// has one element, its stride may be another. So a reference of ours to a storage that the program's
// tensors stand on would change results, and one that is held while a copy is made would change them now
// and then. Who needs bytes to outlive the program's tensors shares these: the storage is given a
// pointer to the same bytes that releases a share. Afterwards it gets its own back, since torch tells by
// the deleter whose bytes they are. So it is no way to hold what the program is about to ask an allocator
// about.

#pragma once

#include <c10/core/Storage.h>

#include <memory>

namespace rematfn {

class SharedBytes {
 public:
  SharedBytes() = default;
  SharedBytes(const SharedBytes&) = delete;
  SharedBytes& operator=(const SharedBytes&) = delete;
  ~SharedBytes() { reset(); }

  explicit operator bool() const { return bytes_ != nullptr; }
  // As they were allocated.
  [[nodiscard]] const c10::DataPtr& data_ptr() const { return *bytes_; }
  void share(const c10::Storage& storage);
  void reset();

 private:
  using Share = std::shared_ptr<c10::DataPtr>;

  static void release(void* share);

  Share bytes_;
  c10::weak_intrusive_ptr<c10::StorageImpl> storage_{c10::intrusive_ptr<c10::StorageImpl>()};
};

}  // namespace rematfn
