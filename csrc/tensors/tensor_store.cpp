// SPDX-License-Identifier: Apache-2.0
#include "tensors/tensor_store.h"

#include <ATen/ops/clone.h>
#include <ATen/record_function.h>
#include <c10/core/impl/COW.h>
#include <libshm.h>
#include <torch/csrc/autograd/function.h>

#include <utility>

#include "base/errors.h"
#include "base/interpreter.h"
#include "tensors/thread_keys.h"
#include "tensors/torch_compat.h"
#include "tensors/torch_layout.h"

namespace rematfn {
namespace {

constexpr const char* kEvicted =
    "This tensor was evicted by rematfn and its bytes were asked for outside of the dispatcher. Call "
    "rematfn.materialize(x) first, or return the tensor from the transformed function.";
constexpr const char* kMoved =
    "This tensor was moved away by rematfn (offload) and its bytes were asked for outside of the "
    "dispatcher. Call rematfn.materialize(x) first, or return the tensor from the transformed function.";

const char* said_of(const Version& version) {
  return version.copied_by() != nullptr ? kMoved : kEvicted;
}

// Note [The engine asks for bytes that have gone]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
// Where a gradient goes to a node that runs on another stream, autograd's engine tells the allocator
// so. It reads the address off the storage, not through the dispatcher, and the gradient may have been
// evicted since its node returned. An address of null is ignored there, and when the bytes have been
// made again we tell the allocator ourselves. So where that may happen, to ask for the address is no
// error.
bool engine_may_ask(const TensorVersion& version, const c10::StorageImpl& storage) {
  if (storage.device_type() == c10::kCPU) return false;
  const auto& domain = static_cast<const TensorDomain&>(*version.table->domain);
  return domain.streams.are_several() || torch::autograd::get_current_node();
}

// See Note [An evicted storage knows its cell]
void free_cell(void* cell) { c10::intrusive_ptr<Cell>::reclaim(static_cast<Cell*>(cell)); }

c10::DataPtr instead_of_bytes(c10::intrusive_ptr<Cell> cell, c10::Device device) {
  if (!cell) return c10::DataPtr(nullptr, device);
  return c10::DataPtr(nullptr, cell.release(), &free_cell, device);
}

// Note [A profiler asks for addresses]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
// A profiler that records shapes reads the address of every argument before the operator runs, that
// is before a level has brought it back. If that throws, the profiler loses count of its own records,
// and fails at its end with thousands of lines. So while anybody listens to operators, to read the
// address of what is evicted gives null, and only to ask for one to write to is an error. It is not
// so at all times: what reads past the dispatcher would find null instead of a message.
void refuse_write(c10::StorageImpl* storage) {
  const Cell* cell = cell_evicted_from(*storage);
  TORCH_CHECK(false, cell == nullptr ? kEvicted : said_of(*cell->version));
}

void forbid(c10::StorageImpl& storage, const Version& version) {
  if (at::hasCallbacks() && forbid_writes(storage, &refuse_write)) return;
  forbid_access(storage, said_of(version));
}

// A constant that lineage reads, and the program too.
bool is_shared_with_cell(const TensorVersion& version) {
  const Cell* cell = version.cell();
  return version.storage && cell != nullptr &&
         cell->storage._unsafe_get_target() == version.storage.unsafeGetStorageImpl();
}

// Other processes may have them. torch leaves no other mark when it moves a storage's bytes there.
bool are_in_shared_memory(const c10::DataPtr& bytes) {
  return at::MapAllocator::fromDataPtr(bytes) != nullptr ||
         THManagedMapAllocator::fromDataPtr(bytes) != nullptr;
}

// Other storages may have them, until one is written. Who copies them for that holds the lock that freeing takes.
bool are_shared_until_written(const c10::DataPtr& bytes) { return c10::impl::cow::is_cow_data_ptr(bytes); }

}  // namespace

constinit TensorStore tensor_store;

// See Note [An evicted storage knows its cell]
Cell* cell_evicted_from(const c10::StorageImpl& storage) {
  const auto& bytes = const_cast<c10::StorageImpl&>(storage)._mutable_data_ptr_no_checks();
  return bytes.get_deleter() == &free_cell ? static_cast<Cell*>(bytes.get_context()) : nullptr;
}

void TensorStore::serve_signals() {
  const BelowLevels below;
  serve_signals_now_and_then();  // See Note [Interrupts are served between replays]
}

void TensorStore::drop(Version& version) {
  auto& v = static_cast<TensorVersion&>(version);
  const bool only_ours = v.storage && !is_shared_with_cell(v);
  v.storage = c10::Storage();
  if (only_ours) return;
  const auto storage = v.cell()->storage.lock();
  if (!storage) return;  // See Note [A handle may outlive its storage]
  storage->set_data_ptr_noswap(instead_of_bytes(v.own_cell(), storage->device()));
  // See Note [The engine asks for bytes that have gone]. See Note [A profiler asks for addresses].
  if (!engine_may_ask(v, *storage)) forbid(*storage, v);
}

bool TensorStore::held_elsewhere(const Version& version) {
  const auto& v = static_cast<const TensorVersion&>(version);
  if (!static_cast<const TensorDomain&>(*v.table->domain).is_on_this_side(v)) return true;
  const bool is_shared = is_shared_with_cell(v);
  if (v.storage && !is_shared) {
    return holders_of(*v.storage.unsafeGetStorageImpl()) > 1 || are_shared_until_written(v.storage.data_ptr());
  }
  const auto storage = v.cell()->storage.lock();
  // tensor.numpy() leaves the storage unresizable: an array may stand on its bytes.
  if (!storage) return false;
  const auto tensors = c10::raw::intrusive_ptr::use_count(v.cell());
  const auto queue = tensors == 0 ? 1 : 0;  // the program dropped it while the lock was held
  const auto ours = 1 + is_shared;
  const c10::DataPtr& bytes = storage->_mutable_data_ptr_no_checks();
  return !storage->resizable() || holders_of(*storage) - ours > tensors + queue || are_in_shared_memory(bytes) ||
         are_shared_until_written(bytes);
}

// See Note [A handle may outlive its storage]
bool TensorStore::lost(const Version& version) {
  const auto& v = static_cast<const TensorVersion&>(version);
  return !v.storage && (v.cell() == nullptr || v.cell()->storage.expired());
}

// See Note [A kept value outlives the program's tensors]
bool TensorStore::retain(Version& version, const Bytes& bytes) {
  auto& v = static_cast<TensorVersion&>(version);
  if (!v.storage && !bytes) return false;
  if (!v.storage) {
    v.storage = c10::Storage(c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(
        static_cast<c10::StorageImpl*>(bytes.get())));
  }
  v.leave_cell();
  return true;
}

bool TensorStore::forget(Version& version) {
  auto& v = static_cast<TensorVersion&>(version);
  v.leave_cell();
  return !v.storage;
}

void TensorStore::copy(Version& version) {
  auto& v = static_cast<TensorVersion&>(version);
  const BackendScope scope;
  const c10::Storage original = v.current_storage();
  auto& domain =
      v.outside != nullptr ? *v.outside : static_cast<TensorDomain&>(*v.table->domain);
  domain.streams.enter(original.device());
  domain.streams.note_use(*original.unsafeGetStorageImpl());
  const c10::Storage copy = bytes_of(original).clone().storage();
  if (v.outside != nullptr) {
    v.outside->outside.erase(v);
    v.outside = nullptr;
  }
  v.leave_cell();
  v.storage = copy;
  v.capture = {.side = domain.side_of_captures(original.device()), .is_copy = true};
}

void TensorStore::overwritten(Version& version) {
  auto& v = static_cast<TensorVersion&>(version);
  v.leave_cell();
  v.storage = c10::Storage();
}

void TensorStore::keep_alive(Version& version) {
  auto& v = static_cast<TensorVersion&>(version);
  if (!v.storage) v.storage = v.current_storage();
}

void refill(TensorVersion& version, c10::Storage from) {
  version.capture.brought_back = static_cast<TensorDomain&>(*version.table->domain).capture_of_return();
  const c10::intrusive_ptr<Cell> cell = version.own_cell();
  auto storage = cell ? cell->storage.lock() : c10::intrusive_ptr<c10::StorageImpl>();
  if (!storage) {  // See Note [A handle may outlive its storage]
    version.leave_cell();
    version.table->ledger.lose_tensor(version);
    version.storage = std::move(from);
    return;
  }
  check_replay(storage->nbytes() == from.nbytes(),
               "a replay produced another number of bytes than the first run");
  allow_access(*storage);
  storage->set_data_ptr_noswap(
      from.set_data_ptr(c10::DataPtr(nullptr, storage->device())));
  if (cell.use_count() > 1) return;
  // No tensor is left on the storage, which somebody holds by itself.
  version.leave_cell();
  version.storage = c10::Storage(std::move(storage));
}

}  // namespace rematfn
