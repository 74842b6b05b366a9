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
// pointer to the same bytes that releases a share. When nobody else has one, it gets its own back,
// since torch tells by the deleter whose bytes they are. So it is no way to hold what the program is
// about to ask an allocator about.

#pragma once

#include <c10/core/Storage.h>
#include <c10/util/intrusive_ptr.h>

namespace rematfn {

class SharedBytes {
 public:
  SharedBytes() = default;
  explicit SharedBytes(const c10::Storage& storage);
  SharedBytes(SharedBytes&&) = default;
  SharedBytes& operator=(SharedBytes&& other) noexcept;
  ~SharedBytes() { reset(); }

  explicit operator bool() const { return static_cast<bool>(block_); }
  // As they were allocated.
  [[nodiscard]] const c10::DataPtr& data_ptr() const;
  void reset();

 private:
  struct Block final : c10::intrusive_ptr_target {
    c10::DataPtr bytes;
    c10::weak_intrusive_ptr<c10::StorageImpl> storage{c10::intrusive_ptr<c10::StorageImpl>()};
  };

  static void release_share(void* block);
  // By which `bytes` are shared, or null.
  [[nodiscard]] static Block* block_of(const c10::DataPtr& bytes);
  [[nodiscard]] static c10::DataPtr share(c10::intrusive_ptr<Block> block);

  c10::intrusive_ptr<Block> block_;
};

}  // namespace rematfn
