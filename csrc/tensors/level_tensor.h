// SPDX-License-Identifier: Apache-2.0
//
// level_tensor.h: cells, handles and storages: what ties the program's tensors to their lineage.
//
// Note [The handle and the key]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
// A level tensor is the backend kernel's own tensor with two things added: our dispatch key in its
// key set, so that operators on it come to us, and a handle in its backend meta, so that we know
// what it is. Nothing is wrapped: while it is resident, whatever works on a tensor works on it.
//
// The handle is the cell itself, one for all tensors on a storage. Copies of a tensor that autograd
// makes (`detach`, saved variables) share the handle, as c10 copies backend meta by reference. Hence
//   - the cell dies exactly when the program's last tensor on the storage does, and
//   - its reference count is the number of tensors we know of on the storage. When the storage has
//     more holders than that, somebody else (an UntypedStorage object) has it, and evicting would
//     pull it from under them. NumPy holds the tensor instead, but makes the storage unresizable.
//
// Note [A handle may outlive its storage]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
// c10 copies backend meta along with sizes and strides, so a tensor can come to hold the handle of
// a storage on which it does not stand: functionalize's wrapper, which mirrors the value it wraps
// and is later given another one; a tensor that `x.data = y` has moved. cell_of() looks at the
// storage and is not taken in. But the cell of the storage lives on with such a tensor, and when the
// storage dies nobody says so. So before a replay counts on a version of the program's, it asks
// whether it was lost, and an eviction finds nothing to free.
//
// Note [A profiler keeps tensors from dying]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
// A profiler that records shapes keeps a weak reference to each tensor that it is shown, lest another
// is made at its address. When the program drops such a tensor, c10 frees its bytes, but what else it
// has, its handle too, only when the profile ends. Nobody says then that it is gone: its version would
// go on to count, be evicted, and be replayed for nobody. So while somebody is shown arguments,
// whoever is about to make room looks first for those whose storage has died, and buries them. That is
// before each operator, and between two of them no level does anything; of a long record, before every
// so many, or else its time would be quadratic. What a policy would keep has no bytes by then: it goes.
//
// Note [Another thread may seal a tensor]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
// Threads may read one tensor at once. But the first use of a tensor that has left its level seals
// it: the key is taken off, and the cell goes. So whoever does not hold the domain's lock must not
// follow a handle, not even to find the lock. They ask domain_of(), lock what it says, and look at
// the handle then: it may be gone. A lock of its own keeps handles still for a few instructions, in
// which nothing else is locked, so it spins. A key set is one word, which is read and written whole, and
// whoever finds the key gone finds the bytes that were put back before.

#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>
#include <c10/core/TensorImpl.h>

#include <atomic>
#include <memory>
#include <thread>

#include "base/pool.h"
#include "engine/domain.h"
#include "tensors/captures.h"
#include "tensors/contents.h"
#include "tensors/dispatch_key.h"
#include "tensors/outside.h"
#include "tensors/savers.h"
#include "tensors/streams.h"
#include "tensors/torch_layout.h"

namespace rematfn {

struct TensorVersion;
struct TensorOperation;
class TensorDomain;

// One storage as its level knows it. Lives in the backend meta of every tensor on it.
struct Cell final : c10::BackendMeta, Pooled<Cell> {
  Cell(Table& level, Ref<TensorVersion> version, const c10::Storage& storage);
  ~Cell() override;
  void release_resources() override;
  // Another level of the same domain takes over.
  void move_to(Table& heir);

  Ref<Table> level;
  Ref<TensorVersion> version;  // the current contents
  c10::weak_intrusive_ptr<c10::StorageImpl> storage;

 private:
  friend class TensorDomain;

  void release_version();
};

struct TensorVersion final : Version, Pooled<TensorVersion> {
  ~TensorVersion() override;

  // Whose current contents these are, or null. It may be dying on another thread: own_cell() is null then.
  [[nodiscard]] Cell* cell() const { return cell_._unsafe_get_target(); }
  [[nodiscard]] c10::intrusive_ptr<Cell> own_cell() const { return cell_.lock(); }
  void enter(const c10::intrusive_ptr<Cell>& cell);
  void leave_cell() { cell_.reset(); }

  // Ours alone: recomputed without a cell, a snapshot, a constant that lineage reads, or the storage
  // of a tensor from outside.
  c10::Storage storage;

  // Once somebody has asked for the address; or null. See Note [Evidence of contents]
  std::unique_ptr<Readings> readings;

  // For a tensor from outside: whose map it stands in, and how to tell that it was written.
  // The domain's note_counter() and drop_counter() change the counter.
  TensorDomain* outside = nullptr;
  c10::VariableVersion counter;
  std::uint32_t counted = 0;
  bool lost_to_resize = false;
  bool lost_for_want_of_room = false;  // it was overwritten, and there was none for a copy
  bool handed_over = false;  // and its tensors still have their handles
  Capture capture;

  NodeRange savers;  // See Note [What autograd may have saved]

  [[nodiscard]] c10::Storage current_storage() const;
  // Somebody has the address now, and may write there.
  void note_readers();
  // It lies where those contents lay that it has overwritten.
  void note_address_of(const TensorVersion& overwritten);
  // Somebody has a NumPy array of it. See Note [Arrays are seldom written]
  void note_array();
  [[nodiscard]] bool was_written_by_array() const {
    return readings && producer && is_here() && readings->array_wrote(current_storage());
  }
  // The operation reads it by its i-th input, where somebody may write.
  void note_reader(const TensorOperation& reader, std::size_t i);

 private:
  c10::weak_intrusive_ptr<Cell> cell_{c10::intrusive_ptr<Cell>()};
};

inline TensorVersion& tensor_version(Version& version) { return static_cast<TensorVersion&>(version); }
inline const TensorVersion& tensor_version(const Version& version) {
  return static_cast<const TensorVersion&>(version);
}

struct TensorOperation : Operation {
  // How it saw its i-th input; nothing if it read the shape alone.
  [[nodiscard]] virtual std::optional<View> read_by(std::size_t input) const = 0;
};

// The contents of a number that torch has wrapped, kept as numbers are. See Note [A number is no tensor]
[[nodiscard]] Ref<TensorVersion> number_version(const c10::TensorImpl& tensor);

// The cell of the program's tensors on `storage`, whose contents are `version`.
[[nodiscard]] c10::intrusive_ptr<Cell> make_cell(Table& level, Ref<TensorVersion> version,
                                                 const c10::Storage& storage);

// The domain of a level tensor, or null. Needs no lock.
[[nodiscard]] std::shared_ptr<Domain> domain_of(const c10::TensorImpl& tensor);
// Whether it is a level tensor of `domain`. Needs no lock.
[[nodiscard]] bool is_of(const Domain& domain, const c10::TensorImpl& tensor);
// The cell a tensor stands on, if it is a level tensor. To follow it is to hold the domain's lock.
[[nodiscard]] inline Cell* cell_of(const c10::TensorImpl& tensor);
// Whether our key is on the tensor: a level tensor's, or one that a view has taken along.
[[nodiscard]] inline bool has_level_key(const c10::TensorImpl& tensor);
// The cell whose bytes `storage` has lost, if it is an evicted one.
[[nodiscard]] Cell* cell_evicted_from(const c10::StorageImpl& storage);
// See Note [Another thread may seal a tensor]. A fork waits for it.
class HandleLock {
 public:
  void lock() {
    while (held_.test_and_set(std::memory_order_acquire)) [[unlikely]] std::this_thread::yield();
  }
  void unlock() { held_.clear(std::memory_order_release); }

 private:
  std::atomic_flag held_;
};
extern constinit HandleLock handle_lock;
// Calls `visit` with the cell that the tensor stands on, the lock of its domain being held, unless another
// thread has sealed it by then. False if it is no level tensor.
template <class Visit>
bool with_cell(const at::Tensor& tensor, const Visit& visit) {
  const std::shared_ptr<Domain> domain = domain_of(*tensor.unsafeGetTensorImpl());
  if (!domain) return false;
  const DomainLock lock(domain);
  if (Cell* cell = cell_of(*tensor.unsafeGetTensorImpl())) visit(*cell);
  return true;
}
// Makes `tensor`, whose storage is the cell's, a level tensor.
void attach(c10::TensorImpl& tensor, c10::intrusive_ptr<Cell> cell);
void detach(c10::TensorImpl& tensor);

// A dense tensor with bytes of its own; anything else passes through untracked.
[[nodiscard]] inline bool is_plain(const c10::TensorImpl& tensor);

class TensorDomain final : public Domain {
 public:
  TensorDomain();

  // The cell of a storage, resident or not: a walk over all versions.
  [[nodiscard]] Cell* cell_on(const c10::StorageImpl& storage) const;
  // See Note [A profiler keeps tensors from dying]
  void bury_unreported(bool at_once = true);
  // `version` becomes the caller's: resident, uncounted, a constant.
  void make_outside(TensorVersion& version);
  // See Note [A captured call keeps to itself]. On which side of captures a device's streams are now.
  [[nodiscard]] Capture::Side side_of_captures(c10::Device device) const;
  // Whether `version` is of that side.
  [[nodiscard]] bool is_on_this_side(const TensorVersion& version) const;
  // Raises if it cannot be had again, or read again, on this side.
  void check_side(const TensorVersion& version) const;
  // An operator is about to run in a capture.
  void enter_capture();
  // Where what is brought back now is so: which capture of a backward; 0: none.
  [[nodiscard]] std::uint64_t capture_of_return() const;

  std::vector<Table*> levels;  // the domain's, alive in Python or in a tensor
  std::vector<std::unique_ptr<Way>> ways;  // of its levels, beside dropping
  std::shared_ptr<void> call_templates;  // CallTemplates, whose type this folder may not know
  OutsideContents outside;
  Savers savers;
  Streams streams;
  bool was_in_backward = false;  // the last operator of an accelerator was

 private:
  [[nodiscard]] std::uint64_t capture_here() const;
  [[nodiscard]] bool is_anothers(const TensorVersion& version) const;

  std::uint64_t last_capture_ = 0;  // that an operator ran in
  // Of bury_unreported(), which has last looked at so many versions.
  std::size_t looked_at_ = 0;
  std::size_t operators_since_look_ = 0;
};

// A one-dimensional tensor over the bytes of a storage, or a part of them; with the handle of its cell, or
// without.
[[nodiscard]] at::Tensor bytes_of(const c10::Storage& storage);
[[nodiscard]] at::Tensor bytes_of(const c10::Storage& storage, Cell& cell);
[[nodiscard]] at::Tensor bytes_of(const c10::Storage& storage, std::size_t begin, std::size_t nbytes);

inline c10::DispatchKeySet keys_of(const c10::TensorImpl& tensor) {
  return KeySet::of(tensor).load(std::memory_order_acquire);
}

inline bool has_level_key(const c10::TensorImpl& tensor) { return keys_of(tensor).has(kLevelKey); }

// See Note [The handle and the key]
inline Cell* cell_of(const c10::TensorImpl& tensor) {
  if (!has_level_key(tensor)) return nullptr;
  auto& impl = const_cast<c10::TensorImpl&>(tensor);  // the getter is not const
  auto* cell = static_cast<Cell*>(impl.get_backend_meta());
  // `x.data = y` and `set_` may leave a handle behind on a tensor that has moved to another storage.
  if (cell == nullptr || !tensor.has_storage() ||
      cell->storage._unsafe_get_target() != tensor.unsafe_storage().unsafeGetStorageImpl()) {
    return nullptr;
  }
  return cell;
}

inline bool is_plain(const c10::TensorImpl& tensor) {
  // Tensors without bytes of their own, or whose bytes are not what their metadata says.
  // layout() would read the keys once more, and not atomically; they name all that is not strided.
  constexpr c10::DispatchKeySet kNotPlain({
      c10::DispatchKey::Sparse, c10::DispatchKey::SparseCsr, c10::DispatchKey::MkldnnCPU,
      c10::DispatchKey::Quantized, c10::DispatchKey::NestedTensor, c10::DispatchKey::ZeroTensor,
      c10::DispatchKey::Python, c10::DispatchKey::Functionalize, c10::DispatchKey::FuncTorchBatched,
      c10::DispatchKey::FuncTorchGradWrapper});
  return !keys_of(tensor).has_any(kNotPlain) && !tensor.is_meta() && tensor.has_storage() &&
         !tensor.has_symbolic_sizes_strides();
}

}  // namespace rematfn
