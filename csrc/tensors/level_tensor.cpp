// SPDX-License-Identifier: Apache-2.0
#include "tensors/level_tensor.h"

#include <ATen/record_function.h>
#include <c10/core/impl/COW.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <new>
#include <utility>

#include "base/errors.h"
#include "base/interpreter.h"
#include "tensors/tensor_store.h"
#include "tensors/thread_keys.h"

namespace rematfn {

TensorDomain::TensorDomain() : Domain(tensor_store) {}

namespace {

void set_keys(c10::TensorImpl& tensor, c10::DispatchKeySet keys) {
  KeySet::of(tensor).store(keys, std::memory_order_release);
}

// Note [Contents are found by their counter]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
// After `x.data = y` the tensor has another storage and its old counter. A write to it bumps that
// counter, and what was read from the old storage would seem to be overwritten. So those whose
// counter an operator bumps are found by that counter: by address_of() it, in by_counter_.

}  // namespace

TensorVersion::~TensorVersion() {
  if (outside != nullptr) outside->erase_outside(*this);
  if (table) table->expel(*this);  // a copy may be read from the bytes, which go with `storage`
}

c10::Storage TensorVersion::current_storage() const {
  if (storage) return storage;
  TORCH_INTERNAL_ASSERT(cell() != nullptr);
  return c10::Storage(cell()->storage.lock());
}

void TensorVersion::enter(const c10::intrusive_ptr<Cell>& cell) {
  cell_ = c10::weak_intrusive_ptr<Cell>(cell);
  has_tensor = true;
}

Cell::Cell(Table& owner, Ref<TensorVersion> contents, const c10::Storage& bytes)
    : level(&owner), version(std::move(contents)), storage(bytes.getWeakStorageImpl()) {}

c10::intrusive_ptr<Cell> make_cell(Table& level, Ref<TensorVersion> version,
                                   const c10::Storage& storage) {
  auto cell = c10::make_intrusive<Cell>(level, std::move(version), storage);
  if (cell->version->outside == nullptr) cell->version->enter(cell);
  return cell;
}

// When the last tensor on the storage is gone, c10 calls release_resources() if a weak reference is
// left (the version has one), and frees the memory later. Without a weak reference it calls the
// destructor alone. Either way the cell lets go of its version once.
Cell::~Cell() { let_go(); }
void Cell::release_resources() { let_go(); }

// Any thread, any time. See Note [The program may drop a tensor at any time]
void Cell::let_go() {
  if (!level) return;
  Domain& domain = *level->domain;
  domain.release(std::move(version), std::move(level), [&] { return storage.lock(); });
}

namespace {

// Whether somebody is shown the arguments of this thread's operators.
bool are_arguments_shown() {
  const auto callbacks = at::getStepCallbacksUnlessEmpty(at::RecordScope::FUNCTION);
  return callbacks.has_value() && callbacks->needs_inputs_;
}

}  // namespace

// See Note [A profiler keeps tensors from dying]
void TensorDomain::bury_unreported(bool at_once) {
  constexpr std::size_t kLookedAt = 512;  // for an operator, on average
  if (!are_arguments_shown()) return;
  if (!at_once && ++operators_since_look_ * kLookedAt < looked_at_) return;
  operators_since_look_ = looked_at_ = 0;
  std::vector<c10::intrusive_ptr<Cell>> dead;
  for (const Table* level : levels) {
    for (Version* v = level->oldest; v != nullptr; v = v->next, ++looked_at_) {
      auto& version = static_cast<TensorVersion&>(*v);
      if (version.cell() == nullptr) continue;
      if (version.cell()->storage.expired()) {
        if (auto cell = version.own_cell()) dead.push_back(std::move(cell));
        continue;
      }
      const bool may_stay = version.kept || (version.backward && floor.retained);
      const bool has_own = version.storage || version.held;
      if (!may_stay || !version.producer || !version.is_readable() || has_own) continue;
      const c10::Storage storage = version.current_storage();
      // torch would take what is to be copied when it is written for what is not.
      if (!c10::impl::cow::is_cow_data_ptr(storage.data_ptr())) version.held = SharedBytes(storage);
    }
  }
  std::vector<Ref<Table>> alive;
  for (const c10::intrusive_ptr<Cell>& cell : dead) {
    if (!cell->level) continue;
    alive.push_back(std::move(cell->level));
    burial.bury(std::move(cell->version), [&] { return cell->storage.lock(); });
  }
}

constinit HandleLock handle_lock;

void Cell::move_to(Table& heir) {
  Ref<Table> before(&heir);  // and is let go of when the lock is free
  const std::lock_guard guard(handle_lock);
  std::swap(level, before);
}

std::shared_ptr<Domain> domain_of(const c10::TensorImpl& tensor) {
  if (!has_level_key(tensor)) return nullptr;
  const std::lock_guard guard(handle_lock);
  const Cell* cell = cell_of(tensor);
  return cell == nullptr ? nullptr : cell->level->domain;
}

bool is_of(const Domain& domain, const c10::TensorImpl& tensor) {
  const std::lock_guard guard(handle_lock);
  const Cell* cell = cell_of(tensor);
  return cell != nullptr && cell->level->domain.get() == &domain;
}

void attach(c10::TensorImpl& tensor, c10::intrusive_ptr<Cell> cell) {
  // What it had is let go of when the lock is free: a cell that dies takes the domain's.
  const c10::intrusive_ptr<c10::BackendMeta> before = tensor.get_backend_meta_intrusive_ptr();
  const std::lock_guard guard(handle_lock);
  if (before.get() != cell.get()) tensor.set_backend_meta(std::move(cell));
  set_keys(tensor, keys_of(tensor).add(kLevelKey));
}

void attach_new(c10::TensorImpl& tensor, c10::intrusive_ptr<Cell> cell) {
  if (tensor.get_backend_meta() != nullptr) return attach(tensor, std::move(cell));
  tensor.set_backend_meta(std::move(cell));
  set_keys(tensor, keys_of(tensor).add(kLevelKey));
}

void detach(c10::TensorImpl& tensor) {
  const c10::intrusive_ptr<c10::BackendMeta> before = tensor.get_backend_meta_intrusive_ptr();
  const std::lock_guard guard(handle_lock);
  set_keys(tensor, keys_of(tensor).remove(kLevelKey));
  tensor.set_backend_meta(nullptr);
}

// ---- contents from outside ---------------------------------------------------------------------

// Note [A number is no tensor]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
// torch wraps the 2 of `x * 2` into a tensor before any kernel of ours sees it. Lineage that held on
// to that tensor would add eight bytes to each such operator, outside of every budget. An operator
// that declares a Scalar has its number in the record of its call; so do these have theirs, in bytes
// that are not the allocator's.
Ref<TensorVersion> number_version(const c10::TensorImpl& tensor) {
  const c10::Storage& from = tensor.unsafe_storage();
  void* bytes = std::malloc(from.nbytes());
  if (bytes == nullptr) throw std::bad_alloc();
  std::memcpy(bytes, from.data(), from.nbytes());
  Ref<TensorVersion> version(new TensorVersion);
  version->nbytes = from.nbytes();
  version->storage =
      c10::Storage(c10::Storage::use_byte_size_t(), from.nbytes(),
                   c10::DataPtr(bytes, bytes, &std::free, c10::kCPU), /*allocator=*/nullptr);
  return version;
}

Ref<TensorVersion> TensorDomain::outside_version(c10::TensorImpl& tensor, bool read) {
  const c10::Storage& storage = tensor.unsafe_storage();
  Outside& entry = outside_[storage.unsafeGetStorageImpl()];
  if (entry.version != nullptr && entry.contents.may_be_gone(storage)) check_resized(entry);
  if (entry.version == nullptr) {
    entry.version = new TensorVersion;
    entry.contents = Contents(storage);
    entry.version->storage = storage;
    entry.version->nbytes = storage.nbytes();
    entry.version->outside = this;
    count_outside();
    // functionalize bumps the counters of tensors it does not write.
    const bool counts =
        !c10::impl::tls_local_dispatch_key_set().included_.has(c10::DispatchKey::Functionalize);
    if (counts) note_counter(*entry.version, tensor);
  }
  if (read) entry.contents.note_read(tensor);
  return Ref<TensorVersion>(entry.version);
}

void TensorDomain::note_read(const TensorVersion& version, const c10::TensorImpl& tensor) {
  const auto found = outside_.find(version.storage.unsafeGetStorageImpl());
  if (found != outside_.end() && found->second.version == &version) {
    found->second.contents.note_read(tensor);
  }
}

// Either what was read is back, or it is nobody's to be found any more.
void TensorDomain::check_resized(Outside& entry) {
  TensorVersion& version = *entry.version;
  if (!entry.contents.is_back(version.storage, version.nbytes)) {
    drop_counter(version);
    version.lost_to_resize = true;
    entry.version = nullptr;
  } else if (version.counter.enabled()) {
    version.counted = version.counter.current_version();
  }
}

bool TensorDomain::has_moved_counter(const TensorVersion& version, std::uint32_t bumps) const {
  if (!version.counter.enabled()) return false;
  const std::uint32_t moved = version.counter.current_version() - version.counted;
  if (moved == 0 || moved == bumps) return false;
  return std::none_of(bumped_.begin(), bumped_.end(),
                      [&](const Ref<TensorVersion>& v) { return v.get() == &version; });
}

bool TensorDomain::agrees_with_readers(const Outside& entry) {
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

const char* TensorDomain::change_of(TensorVersion& version, const View& view) {
  constexpr const char* kOverwritten =
      "was overwritten after it was read. Write to a clone, or run the backward first";
  constexpr const char* kStored =
      "was overwritten after it was read. What the function stored away is replayed from it: return "
      "that, or call rematfn.materialize() on it before the write";
  const auto found = outside_.find(version.storage.unsafeGetStorageImpl());
  bool known = found != outside_.end() && found->second.version == &version;
  if (known && found->second.contents.may_be_gone(version.storage)) {
    check_resized(found->second);
    known = found->second.version != nullptr;
    if (!known) {
      outside_.erase(found);
      count_outside();
    }
  }
  if (version.lost_to_resize) {
    return "lost its bytes after it was read: its storage was resized "
           "(`untyped_storage().resize_`), and does not hold now what it held then. Refill it with "
           "the same values, resize it after the backward, or give the function a clone";
  }
  if (version.lost_for_want_of_room) {
    return "was overwritten after it was read, and the budget had no room for a copy. Raise the "
           "budget, or write to a clone";
  }
  if (!known || has_moved_counter(version)) return savers.has_any() ? kStored : kOverwritten;
  if (found->second.contents.agrees(version.storage, view)) return nullptr;
  return "was overwritten after it was read, in a way that no version counter shows (NumPy, "
         "`.data`). Write to a clone, or run the backward first";
}

void TensorDomain::note_resize(const c10::StorageImpl& storage) {
  const auto found = outside_.find(&storage);
  if (found == outside_.end()) return;
  if (TensorVersion* version = known_outside(storage)) {
    found->second.contents.note_resize(version->storage, version->nbytes);
  }
}

void TensorDomain::forget_outside(const c10::StorageImpl& storage, bool for_want_of_room) {
  const auto found = outside_.find(&storage);
  if (found == outside_.end()) return;
  found->second.version->lost_for_want_of_room = for_want_of_room;
  drop_counter(*found->second.version);
  outside_.erase(found);
  count_outside();
}

void TensorDomain::note_write(const c10::StorageImpl& storage) {
  const auto found = outside_.find(&storage);
  if (found == outside_.end() || found->second.version->readers != nullptr) return;
  TensorVersion& version = *found->second.version;
  found->second.contents = Contents(version.storage);
  if (version.counter.enabled()) version.counted = version.counter.current_version();
}

Cell* TensorDomain::cell_on(const c10::StorageImpl& storage) const {
  if (Cell* cell = cell_evicted_from(storage)) return cell;
  for (const Table* level : levels) {
    for (const Version* v = level->newest; v != nullptr; v = v->previous) {
      Cell* cell = static_cast<const TensorVersion*>(v)->cell();
      if (cell != nullptr && cell->storage._unsafe_get_target() == &storage) return cell;
    }
  }
  return nullptr;
}

TensorVersion* TensorDomain::known_outside(const c10::StorageImpl& storage, std::uint32_t bumps) {
  const auto found = outside_.find(&storage);
  if (found == outside_.end()) return nullptr;
  TensorVersion* version = found->second.version;
  if (found->second.contents.may_be_gone(version->storage)) return nullptr;
  if (!has_moved_counter(*version, bumps) && agrees_with_readers(found->second)) return version;
  forget_outside(storage);
  return nullptr;
}

void TensorDomain::erase_outside(TensorVersion& version) {
  drop_counter(version);
  const auto found = outside_.find(version.storage.unsafeGetStorageImpl());
  if (found != outside_.end() && found->second.version == &version) outside_.erase(found);
  count_outside();
}

namespace {
constinit std::atomic<std::size_t> known_outside_of_all{0};
}

void TensorDomain::count_outside() {
  const std::size_t now = outside_.size();
  known_outside_of_all += now - outside_count_.exchange(now);
}

bool TensorDomain::others_know_outside(const Domain* ours) {
  const auto* domain = static_cast<const TensorDomain*>(ours);
  const std::size_t own = domain == nullptr ? 0 : domain->outside_count_.load();
  return known_outside_of_all.load() != own;
}

void TensorDomain::note_counter(TensorVersion& version, c10::TensorImpl& tensor) {
  drop_counter(version);
  if (tensor.is_inference()) return;
  version.counter = tensor.version_counter();
  version.counted = version.counter.current_version();
  by_counter_.emplace(address_of(version.counter), &version);
}

void TensorDomain::drop_counter(TensorVersion& version) {
  if (!version.counter.enabled()) return;
  const auto [first, last] = by_counter_.equal_range(address_of(version.counter));
  by_counter_.erase(std::find_if(first, last, [&](const auto& e) { return e.second == &version; }));
  version.counter = {};
}

// See Note [Contents are found by their counter]
void TensorDomain::expect_bump(c10::TensorImpl& tensor) {
  if (by_counter_.empty() || tensor.is_inference()) return;
  const auto [first, last] = by_counter_.equal_range(address_of(tensor.version_counter()));
  for (auto it = first; it != last; ++it) {
    TensorVersion& version = *it->second;
    if (version.counter.current_version() == version.counted) bumped_.emplace_back(&version);
  }
}

void TensorDomain::expect_move(const c10::TensorImpl& tensor) {
  const auto found = outside_.find(tensor.unsafe_storage().unsafeGetStorageImpl());
  if (found != outside_.end()) drop_counter(*found->second.version);
}

void TensorDomain::note_bumps() {
  if (bumped_.empty()) return;
  for (const Ref<TensorVersion>& version : std::exchange(bumped_, {})) {
    if (version->counter.enabled()) version->counted = version->counter.current_version();
  }
}

void TensorDomain::make_outside(TensorVersion& version) {
  if (version.outside != nullptr) return;
  version.storage = version.current_storage();
  if (version.producer) cut(version);
  if (version.table) {
    version.table->note_result(version);
    version.table->expel(version);
  }
  version.leave_cell();
  version.has_tensor = false;
  // Two versions cannot share a storage: a cell has one current version, and the map no other.
  version.outside = this;
  outside_[version.storage.unsafeGetStorageImpl()] = {&version, Contents(version.storage)};
  count_outside();
}

at::Tensor bytes_of(const c10::Storage& storage) { return bytes_of(storage, 0, storage.nbytes()); }

at::Tensor bytes_of(const c10::Storage& storage, std::size_t begin, std::size_t nbytes) {
  const auto device = storage.device();
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(storage), c10::DispatchKeySet(c10::computeDispatchKey(
                                 c10::kByte, c10::kStrided, device)),
      c10::scalarTypeToTypeMeta(c10::kByte));
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous({static_cast<std::int64_t>(nbytes)});
  tensor.unsafeGetTensorImpl()->set_storage_offset(static_cast<std::int64_t>(begin));
  return tensor;
}

}  // namespace rematfn
