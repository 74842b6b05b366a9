// SPDX-License-Identifier: Apache-2.0
#include "tensors/outside.h"

#include <algorithm>
#include <utility>

#include "tensors/level_tensor.h"
#include "tensors/torch_layout.h"

namespace rematfn {

Ref<TensorVersion> OutsideContents::version_of(c10::TensorImpl& tensor, bool read) {
  const c10::Storage& storage = tensor.unsafe_storage();
  Entry& entry = by_storage_[storage.unsafeGetStorageImpl()];
  if (entry.version != nullptr && entry.contents.may_be_gone(storage)) check_resized(entry);
  if (entry.version == nullptr) {
    entry.version = new TensorVersion;
    entry.contents = Contents(storage);
    entry.version->storage = storage;
    entry.version->nbytes = storage.nbytes();
    entry.version->outside = &domain_;
    read_since_ += storage.nbytes();
    take_name(*entry.version);
    // functionalize bumps the counters of tensors it does not write.
    const bool counts =
        !c10::impl::tls_local_dispatch_key_set().included_.has(c10::DispatchKey::Functionalize);
    if (counts) note_counter(*entry.version, tensor);
  }
  if (read) entry.contents.note_read(tensor);
  return Ref<TensorVersion>(entry.version);
}

void OutsideContents::note_read(const TensorVersion& version, const c10::TensorImpl& tensor) {
  if (Entry* entry = entry_of(version)) entry->contents.note_read(tensor);
}

OutsideContents::Entry* OutsideContents::entry_of(const TensorVersion& version) {
  const auto found = by_storage_.find(version.storage.unsafeGetStorageImpl());
  return found != by_storage_.end() && found->second.version == &version ? &found->second : nullptr;
}

// Either what was read is back, or it is nobody's to be found any more.
void OutsideContents::check_resized(Entry& entry) {
  TensorVersion& version = *entry.version;
  if (!entry.contents.is_back(version.storage, version.nbytes)) {
    drop_counter(version);
    version.lost_to_resize = true;
    entry.version = nullptr;
  } else if (version.counter.enabled()) {
    version.counted = version.counter.current_version();
  }
}

bool OutsideContents::has_moved_counter(const TensorVersion& version, std::uint32_t bumps) const {
  if (!version.counter.enabled()) return false;
  const std::uint32_t moved = version.counter.current_version() - version.counted;
  if (moved == 0 || moved == bumps) return false;
  return std::none_of(bumped_.begin(), bumped_.end(),
                      [&](const Ref<TensorVersion>& v) { return v.get() == &version; });
}

bool OutsideContents::agrees_with_readers(const Entry& entry) {
  std::uint64_t last = 0;
  for (const Input* use = entry.version->readers; use != nullptr; use = use->next) {
    const auto& reader = static_cast<const TensorOperation&>(*use->reader);
    const auto view = reader.read_by(static_cast<std::size_t>(use - reader.inputs.begin()));
    if (!view) continue;
    if (const std::uint64_t key = view->key(); std::exchange(last, key) == key) continue;
    if (!entry.contents.agrees(entry.version->storage, *view)) return false;
  }
  return true;
}

const char* OutsideContents::change_of(TensorVersion& version, const View& view) {
  constexpr const char* kOverwritten =
      "was overwritten after it was read. Write to a clone, or run the backward first";
  constexpr const char* kStored =
      "was overwritten after it was read. What the function stored away is replayed from it: return "
      "that, or call rematfn.materialize() on it before the write";
  Entry* entry = entry_of(version);
  if (entry != nullptr && entry->contents.may_be_gone(version.storage)) {
    check_resized(*entry);
    if (entry->version == nullptr) {
      by_storage_.erase(version.storage.unsafeGetStorageImpl());
      entry = nullptr;
    }
  }
  if (version.lost_to_resize) {
    return "lost its bytes after it was read: its storage was resized "
           "(`untyped_storage().resize_`), and does not hold now what it held then. Refill it with "
           "the same values, resize it after the backward (in FSDP: reshard_after_forward=False), or give "
           "the function a clone";
  }
  if (version.lost_for_want_of_room) {
    return "was overwritten after it was read, and the budget had no room for a copy. Raise the "
           "budget, or write to a clone";
  }
  if (entry == nullptr || has_moved_counter(version)) {
    return domain_.savers.has_any() ? kStored : kOverwritten;
  }
  if (entry->contents.agrees(version.storage, view)) return nullptr;
  return "was overwritten after it was read, in a way that no version counter shows (NumPy, "
         "`.data`). Write to a clone, or run the backward first";
}

void OutsideContents::note_resize(const c10::StorageImpl& storage) {
  if (TensorVersion* version = known(storage)) {
    by_storage_[&storage].contents.note_resize(version->storage, version->nbytes);
  }
}

void OutsideContents::forget(const c10::StorageImpl& storage, bool for_want_of_room) {
  const auto found = by_storage_.find(&storage);
  if (found == by_storage_.end()) return;
  found->second.version->lost_for_want_of_room = for_want_of_room;
  drop_counter(*found->second.version);
  by_storage_.erase(found);
}

void OutsideContents::note_write(const c10::StorageImpl& storage) {
  names_.erase(&storage);
  const auto found = by_storage_.find(&storage);
  if (found == by_storage_.end() || found->second.version->readers != nullptr) return;
  TensorVersion& version = *found->second.version;
  found->second.contents = Contents(version.storage);
  if (version.counter.enabled()) version.counted = version.counter.current_version();
}

TensorVersion* OutsideContents::known(const c10::StorageImpl& storage, std::uint32_t bumps) {
  const auto found = by_storage_.find(&storage);
  if (found == by_storage_.end()) return nullptr;
  TensorVersion* version = found->second.version;
  if (found->second.contents.may_be_gone(version->storage)) return nullptr;
  if (!has_moved_counter(*version, bumps) && agrees_with_readers(found->second)) return version;
  forget(storage);
  return nullptr;
}

// See Note [What the program drops beside operators]
void OutsideContents::release_dropped(bool weighs) {
  std::vector<Ref<TensorVersion>> dropped;
  held_ = read_since_ = 0;
  for (const auto& [storage, entry] : by_storage_) {
    if (entry.version == nullptr) continue;
    if (holders_of(*storage) == 1) {
      dropped.emplace_back(entry.version);
    } else {
      held_ += entry.version->nbytes;
    }
  }
  for (const Ref<TensorVersion>& version : dropped) domain_.free_dropped(*version, weighs);
}

void OutsideContents::erase(TensorVersion& version) {
  drop_counter(version);
  if (entry_of(version) != nullptr) by_storage_.erase(version.storage.unsafeGetStorageImpl());
}

void OutsideContents::bury(TensorVersion& version) {
  const bool is_named = version.value != kNoValue || version.recorded != kNoValue;
  if (is_named && entry_of(version) != nullptr) {
    names_[version.storage.unsafeGetStorageImpl()] = {version.storage.getWeakStorageImpl(), version.value,
                                                      version.recorded};
  }
  erase(version);
}

void OutsideContents::take_name(TensorVersion& version) {
  const auto found = names_.find(version.storage.unsafeGetStorageImpl());
  if (found == names_.end()) return;
  if (!found->second.storage.expired()) {
    version.value = found->second.value;
    version.recorded = found->second.recorded;
  }
  names_.erase(found);
}

void OutsideContents::note_counter(TensorVersion& version, c10::TensorImpl& tensor) {
  drop_counter(version);
  if (tensor.is_inference()) [[unlikely]] return;
  version.counter = tensor.version_counter();
  version.counted = version.counter.current_version();
  by_counter_.emplace(address_of(version.counter), &version);
}

void OutsideContents::drop_counter(TensorVersion& version) {
  if (!version.counter.enabled()) return;
  const auto [first, last] = by_counter_.equal_range(address_of(version.counter));
  by_counter_.erase(std::find_if(first, last, [&](const auto& e) { return e.second == &version; }));
  version.counter = {};
}

// See Note [Contents are found by their counter]
void OutsideContents::expect_bump(c10::TensorImpl& tensor) {
  if (by_counter_.empty() || tensor.is_inference()) return;
  const auto [first, last] = by_counter_.equal_range(address_of(tensor.version_counter()));
  for (auto it = first; it != last; ++it) {
    TensorVersion& version = *it->second;
    if (version.counter.current_version() == version.counted) bumped_.emplace_back(&version);
  }
}

void OutsideContents::expect_move(const c10::TensorImpl& tensor) {
  const auto found = by_storage_.find(tensor.unsafe_storage().unsafeGetStorageImpl());
  if (found != by_storage_.end()) drop_counter(*found->second.version);
}

void OutsideContents::note_bumps() {
  if (bumped_.empty()) [[likely]] return;
  for (const Ref<TensorVersion>& version : std::exchange(bumped_, {})) {
    if (version->counter.enabled()) version->counted = version->counter.current_version();
  }
}

void OutsideContents::add(TensorVersion& version) {
  // Two versions cannot share a storage: a cell has one current version, and the map no other.
  version.outside = &domain_;
  by_storage_[version.storage.unsafeGetStorageImpl()] = {&version, Contents(version.storage)};
}

}  // namespace rematfn
