// SPDX-License-Identifier: Apache-2.0
#include "tensors/level_tensor.h"

#include <ATen/record_function.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <new>
#include <ranges>
#include <utility>
#include <vector>

#include "tensors/tensor_store.h"

namespace rematfn {

TensorDomain::TensorDomain() : Domain(tensor_store), outside(*this) {}

namespace {

void set_keys(c10::TensorImpl& tensor, c10::DispatchKeySet keys) {
  KeySet::of(tensor).store(keys, std::memory_order_release);
}

}  // namespace

TensorVersion::~TensorVersion() {
  if (outside != nullptr) outside->outside.bury(*this);
  if (table) table->ledger.expel(*this);  // a copy may be read from the bytes, which go with `storage`
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
  if (cell->version->outside == nullptr) [[likely]] cell->version->enter(cell);
  return cell;
}

// When the last tensor on the storage is gone, c10 calls release_resources() if a weak reference is
// left (the version has one), and frees the memory later. Without a weak reference it calls the
// destructor alone. Either way the cell releases its version once.
Cell::~Cell() { release_version(); }
void Cell::release_resources() { release_version(); }

// Any thread, any time. See Note [The program may drop a tensor at any time]
void Cell::release_version() {
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
  if (!are_arguments_shown()) [[likely]] return;
  if (!at_once && ++operators_since_look_ * kLookedAt < looked_at_) return;
  operators_since_look_ = looked_at_ = 0;
  std::vector<c10::intrusive_ptr<Cell>> dead;
  for (const Table* level : levels) {
    for (Version* v = level->oldest; v != nullptr; v = v->next, ++looked_at_) {
      auto& version = static_cast<TensorVersion&>(*v);
      if (version.cell() == nullptr || !version.cell()->storage.expired()) continue;
      if (auto cell = version.own_cell()) dead.push_back(std::move(cell));
    }
  }
  std::vector<Ref<Table>> alive;
  for (const c10::intrusive_ptr<Cell>& cell : dead) {
    if (!cell->level) continue;
    alive.push_back(std::move(cell->level));
    bury(std::move(cell->version), [&] { return cell->storage.lock(); });
  }
}

constinit HandleLock handle_lock;

void Cell::move_to(Table& heir) {
  Ref<Table> before(&heir);  // and is released when the lock is free
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
  // What it had is released when the lock is free: a cell that dies takes the domain's.
  const c10::intrusive_ptr<c10::BackendMeta> before = tensor.get_backend_meta_intrusive_ptr();
  const std::lock_guard guard(handle_lock);
  if (before.get() != cell.get()) [[likely]] tensor.set_backend_meta(std::move(cell));
  set_keys(tensor, keys_of(tensor).add(kLevelKey));
}

void detach(c10::TensorImpl& tensor) {
  const c10::intrusive_ptr<c10::BackendMeta> before = tensor.get_backend_meta_intrusive_ptr();
  const std::lock_guard guard(handle_lock);
  set_keys(tensor, keys_of(tensor).remove(kLevelKey));
  tensor.set_backend_meta(nullptr);
}

void TensorVersion::note_reader(const TensorOperation& reader, std::size_t i) {
  if (const auto view = reader.read_by(i)) readings->note(reader.order, i, current_storage(), *view);
}

void TensorVersion::note_array() {
  note_readers();
  if (is_here() && current_storage().device().is_cpu()) readings->note_array(current_storage());
}

void TensorVersion::note_address_of(const TensorVersion& overwritten) {
  if (overwritten.readings->has_array()) {
    note_array();
  } else {
    note_readers();
  }
}

// Later ones are noted as they come.
void TensorVersion::note_readers() {
  if (readings) return;
  readings = std::make_unique<Readings>();
  std::vector<const Input*> uses;  // the latest first
  for (const Input* use = Version::readers; use != nullptr; use = use->next) uses.push_back(use);
  for (const Input* use : uses | std::views::reverse) {
    note_reader(static_cast<const TensorOperation&>(*use->reader),
                static_cast<std::size_t>(use - use->reader->inputs.begin()));
  }
}

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

void TensorDomain::make_outside(TensorVersion& version) {
  if (version.outside != nullptr) return;
  version.storage = version.current_storage();
  if (version.producer) cut(version);
  if (version.table) {
    note_result(version);
    expel(version);
  }
  version.leave_cell();
  version.has_tensor = false;
  version.capture = {};
  outside.add(version);
}

at::Tensor bytes_of(const c10::Storage& storage) { return bytes_of(storage, 0, storage.nbytes()); }

at::Tensor bytes_of(const c10::Storage& storage, Cell& cell) {
  at::Tensor bytes = bytes_of(storage);
  attach(*bytes.unsafeGetTensorImpl(), c10::intrusive_ptr<Cell>::reclaim_copy(&cell));
  return bytes;
}

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
