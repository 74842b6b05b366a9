// SPDX-License-Identifier: Apache-2.0
#include "tensors/named_storages.h"

#include <c10/util/intrusive_ptr.h>

#include <mutex>
#include <unordered_map>
#include <utility>

namespace rematfn {
namespace {

struct Names {
  struct Entry {
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;  // lest another be at its address
    std::string name;
  };
  std::mutex mutex;
  std::unordered_map<const c10::StorageImpl*, Entry> entries;
};

Names& names() {
  static auto* const instance = new Names;  // outlives the tensors of a dying process
  return *instance;
}

}  // namespace

void name_storage(const c10::Storage& storage, std::string name) {
  c10::StorageImpl* impl = storage.unsafeGetStorageImpl();
  const auto held = c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(impl);
  const std::lock_guard guard(names().mutex);
  auto& entries = names().entries;
  if (!entries.contains(impl)) {
    std::erase_if(entries, [](const auto& entry) { return entry.second.storage.expired(); });
  }
  entries.insert_or_assign(
      impl, Names::Entry{c10::weak_intrusive_ptr<c10::StorageImpl>(held), std::move(name)});
}

std::string name_of(const c10::Storage& storage) {
  const std::lock_guard guard(names().mutex);
  const auto found = names().entries.find(storage.unsafeGetStorageImpl());
  if (found == names().entries.end() || found->second.storage.expired()) return "";
  return found->second.name;
}

}  // namespace rematfn
