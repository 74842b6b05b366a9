// SPDX-License-Identifier: Apache-2.0
#include "tensors/shared_bytes.h"

#include <utility>

namespace rematfn {

void SharedBytes::release_share(void* block) {
  c10::intrusive_ptr<Block>::reclaim(static_cast<Block*>(block));
}

SharedBytes::Block* SharedBytes::block_of(const c10::DataPtr& bytes) {
  return bytes.get_deleter() == &release_share ? static_cast<Block*>(bytes.get_context()) : nullptr;
}

c10::DataPtr SharedBytes::share(c10::intrusive_ptr<Block> block) {
  void* const data = block->bytes.get();
  const c10::Device device = block->bytes.device();
  return {data, block.release(), &release_share, device};
}

SharedBytes::SharedBytes(const c10::Storage& storage) {
  c10::StorageImpl& impl = *storage.unsafeGetStorageImpl();
  c10::DataPtr& bytes = impl._mutable_data_ptr_no_checks();
  if (Block* block = block_of(bytes)) {
    block_ = c10::intrusive_ptr<Block>::reclaim_copy(block);
  } else {
    block_ = c10::make_intrusive<Block>();
    block_->bytes = std::move(bytes);
    bytes = share(block_);
  }
  block_->storage = storage.getWeakStorageImpl();
}

SharedBytes& SharedBytes::operator=(SharedBytes&& other) noexcept {
  if (this != &other) {
    reset();
    block_ = std::move(other.block_);
  }
  return *this;
}

const c10::DataPtr& SharedBytes::data_ptr() const { return block_->bytes; }

void SharedBytes::reset() {
  if (!block_) return;
  const c10::intrusive_ptr<Block> block = std::move(block_);
  const c10::intrusive_ptr<c10::StorageImpl> storage = block->storage.lock();
  if (!storage) return;
  c10::DataPtr& bytes = storage->_mutable_data_ptr_no_checks();
  const bool is_last = block_of(bytes) == block.get() && block.use_count() == 2;
  if (is_last) bytes = std::move(block->bytes);
}

}  // namespace rematfn
