// SPDX-License-Identifier: Apache-2.0
#include "tensors/shared_bytes.h"

#include <utility>

namespace rematfn {

void SharedBytes::share(const c10::Storage& storage) {
  c10::DataPtr& bytes = storage.unsafeGetStorageImpl()->_mutable_data_ptr_no_checks();
  void* const data = bytes.get();
  const c10::Device device = bytes.device();
  bytes_ = std::make_shared<c10::DataPtr>(std::move(bytes));
  storage_ = storage.getWeakStorageImpl();
  bytes = {data, new Share(bytes_), &release, device};
}

void SharedBytes::release(void* share) { delete static_cast<Share*>(share); }

void SharedBytes::reset() {
  const Share own = std::move(bytes_);
  const auto storage = own ? storage_.lock() : c10::intrusive_ptr<c10::StorageImpl>();
  if (!storage) return;
  c10::DataPtr& bytes = storage->_mutable_data_ptr_no_checks();
  const bool is_shared = bytes.get_deleter() == &release && *static_cast<Share*>(bytes.get_context()) == own;
  if (is_shared) bytes = std::move(*own);
}

}  // namespace rematfn
